"""Pages of a prompt of random tokens, and what an engine's answer says that it kept of it."""

from tests.engine.support.running import Ask
from tests.inspection.pages import read
from vllm_kvevict.inspect import inspection
from vllm_kvevict.inspect.page import render
from vllm_kvevict.policy_list import PolicySpec

LENGTH, BUDGET = 300, 0.2
ASK = Ask(LENGTH)
TEXT = " ".join(f"w{token}" for token in ASK.prompt)


def page_of(llm, policies, prefix_len=None, **how):
    """The data of the page that shows what an engine keeps of the prompt, or of chats."""
    entries = [PolicySpec(policy) for policy in policies]
    wanted = inspection.Wanted("tiny", "" if "chats" in how else TEXT, entries, BUDGET, prefix_len, **how)
    return read(render(inspection.read(llm, wanted)))


def kept_by(answer, layers, heads, n, length):
    """Positions by layer and head that an answer's evictions left, those behind the prefix included."""
    if not answer.kept:
        return [[list(range(length))] * heads] * layers
    behind = list(range(n, length))
    return [[head + behind for head in answer.kept[-1][layer]] for layer in range(layers)]
