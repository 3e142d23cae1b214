"""Where the question of a chat begins: many templates, all kinds of messages, and any question."""

import asyncio
import shutil
import threading
from pathlib import Path

import mistral_common
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.renderers import ChatParams
from vllm.renderers.mistral import MistralRenderer
from vllm.tokenizers.mistral import MistralTokenizer
from vllm.v1.engine.input_processor import InputProcessor

from tests.engine.support.chats import (
    BLIND,
    CASES,
    CHATML,
    DOCUMENT,
    GLUED,
    PICKY,
    QUESTION,
    READ,
    SYSTEM,
    TURN,
    TURNS,
    ask,
    decoded,
    prefix_len_of,
    render,
)
from vllm_kvevict.engine import metrics
from vllm_kvevict.engine.frontend import chat, noting
from vllm_kvevict.engine.frontend.counting import common_length
from vllm_kvevict.engine.request_options import RequestOptions, facts_of


@pytest.fixture(scope="module")
def renderer(renderers):
    return renderers(scope="prefix")


AWKWARD = [
    "", " ", "\n\n", "\n\nWhy?", "  Why?", "0", "42 what?", "]/INST]", "user", "<|im_end|>\n", ":", "\ue000", "\ue000?",
]  # fmt: skip


@pytest.mark.parametrize("template, before, prefix", CASES.values(), ids=CASES)
@settings(max_examples=30, deadline=None)
@given(question=st.sampled_from(AWKWARD) | st.text(max_size=20))
@example(question=QUESTION)
def test_the_prefix_is_the_templates_whatever_is_asked(template, before, prefix, renderer, question):
    prompt, found = render(renderer, [*before, ask(question)], template)
    assert found == prefix and (question != QUESTION or QUESTION in prompt["prompt"])


MARKS = "".join(map(chr, range(0xE000, 0xE100)))


@pytest.mark.parametrize("question", [MARKS, "q" + MARKS, "7" + MARKS])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_question_of_characters_without_meaning(question, all_of_them, renderer, monkeypatch):
    """One that is left stands in for the question; where none is left, no question begins like two others."""
    if all_of_them:
        monkeypatch.setattr(chat, "MEANINGLESS", tuple(MARKS))
    assert render(renderer, [*TURN, ask(question)])[1] == READ + "<|im_start|>"
    assert render(renderer, [*TURN, ask(question)], GLUED)[1] == (DOCUMENT + "I have read it.")[:-1]


ESCAPES = {
    "JSON": ("{{ m.content | tojson(ensure_ascii=True) }}", '"'),
    "a list": ("{{ [m.content] }}", "['"),
    "a part of a URL": ("{{ m.content | urlencode }}", ""),
}


@pytest.mark.parametrize("escape, opening", ESCAPES.values(), ids=ESCAPES)
@pytest.mark.parametrize("tokenize", [False, True])
def test_escaped_questions(escape, opening, tokenize, renderer):
    """What an escape of the stand-in has in common with the question's does not belong to the prefix."""
    template = CHATML.replace("{{ m.content }}", escape)
    header = "<|im_start|>user\n" + opening
    prefixes = set()
    for question in (*AWKWARD, "\ue001", "\uefff?", "\ue000" * 2, "\u2026", "%EE", "\\ue", "q", "7", "q7"):
        prompt, prefix = render(renderer, [*TURN, ask(question)], template, tokenize=tokenize)
        text = decoded(renderer, prompt["prompt_token_ids"])
        assert text.startswith(prefix) and len(prefix) <= text.rindex(header) + len(header)
        assert prefix.endswith("<|im_end|>\n<|im_start|>") or "I%20have" in prefix or "I have" in prefix
        prefixes.add(prefix)
    assert tokenize or len(prefixes) == 1


@pytest.mark.parametrize("template, before, prefix", CASES.values(), ids=CASES)
def test_templates_that_give_tokens(template, before, prefix, renderer):
    # There is no text to compare.
    prompt, found = render(renderer, [*before, ask()], template, tokenize=True)
    assert "prompt" not in prompt
    text = renderer.get_tokenizer().decode(prompt["prompt_token_ids"], clean_up_tokenization_spaces=False)
    assert text.startswith(found) and len(prefix) - 1 <= len(found) <= text.index(QUESTION)


DATA = Path(mistral_common.__file__).parent / "data"


@pytest.mark.parametrize(
    "name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_241114.model.v7", "tekken_240911.json"]
)
def test_mistrals_own_tokenizers(name, renderer, tmp_path):
    shutil.copy(DATA / name, tmp_path / ("tekken.json" if name.endswith("json") else name))
    tokenizer = MistralTokenizer.from_pretrained(str(tmp_path))
    mistral = MistralRenderer(renderer.config, tokenizer)
    params = ChatParams(chat_template_kwargs={"tokenize": True})
    counts = set()
    for question in (QUESTION, "a port?", "q", "q?", "42?", "…", "Какой?"):
        _, (prompt,) = mistral.render_chat([[*TURN, ask(question)]], params)
        ids, count = prompt["prompt_token_ids"], prefix_len_of(prompt)
        before, rest = (
            tokenizer.decode(part, skip_special_tokens=False).replace("▁", " ")
            for part in (ids[:count], ids[count:])
        )
        assert "I have read it." in before and question in rest
        counts.add(count)
    assert len(counts) == 1
    mistral.shutdown()


def test_parts_are_rendered_like_text(renderer):
    def parts(text):
        half = len(text) // 2
        return [{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:]}]

    messages = [{"role": "user", "content": parts(DOCUMENT)}, TURN[1], ask(parts(QUESTION))]
    half = len(DOCUMENT) // 2
    joined = DOCUMENT[:half] + "\n" + DOCUMENT[half:]
    assert render(renderer, messages)[1] == READ.replace(DOCUMENT, joined) + "<|im_start|>"
    by_part = CHATML.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
    assert render(renderer, messages, by_part)[1] == READ + "<|im_start|>"
    assert messages[2] == ask(parts(QUESTION))


def test_tools(renderer):
    call = {
        "type": "function",
        "id": "call_1",
        "function": {"name": "look", "arguments": '{"at": "the port"}'},
    }
    looked = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": DOCUMENT},
    ]
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}{{ tools }}")
    tools = [{"type": "function", "function": {"name": "look"}}]
    _, found = render(renderer, [*TURN, ask(), *looked], template, tools=tools)
    begin = render(renderer, [*TURN, ask()], template, tools=tools)[1]
    # What a tool answers to the question belongs to the question, and to the prefix of the next one.
    assert found == begin and DOCUMENT in begin and "look" in begin
    _, found = render(renderer, [*TURN, ask(), *looked, ask("And now?")], template, tools=tools)
    assert found.startswith(begin) and QUESTION in found and found.count(DOCUMENT) == 2 and "And" not in found
    assert call["function"]["arguments"] in ('{"at": "the port"}', {"at": "the port"})


def test_without_a_question_there_is_no_prefix(renderer):
    for messages in (SYSTEM, [TURN[1]]):
        prompt, found = render(renderer, messages)
        assert (found, prefix_len_of(prompt)) == ("", 0)


# It answers one question only.
CLOSED = (
    TURNS + "{% if m.role == 'user' and loop.last and m.content != 'Which port is the largest?' %}"
    "{{ raise_exception('I was not made for that') }}{% endif %}{{ m.content }}{% endfor %}"
)


def test_chats_that_may_have_been_cut_are_left_open(renderer):
    tok_params = renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)
    ids = render(renderer, [*TURN, ask()], tok_params=tok_params)[0]["prompt_token_ids"]
    for limit in (len(ids) - 3, len(ids)):
        cut = tok_params.with_kwargs(truncate_prompt_tokens=limit, truncation_side="left")
        assert render(renderer, [*TURN, ask()], tok_params=cut)[1] is None
    for limit in (len(ids) + 1, -1):
        whole = tok_params.with_kwargs(truncate_prompt_tokens=limit)
        assert render(renderer, [*TURN, ask()], tok_params=whole)[1] == READ + "<|im_start|>"


@pytest.mark.parametrize("tokenize", [False, True])
def test_a_template_that_refuses_short_questions(tokenize, renderer):
    """The stand-in then stands before the question, which is as long as the template likes."""
    begin = DOCUMENT.strip()[:-2]
    for content in (QUESTION, [{"type": "text", "text": QUESTION}], "\ue000?", "q?"):
        prompt, prefix = render(renderer, [*SYSTEM, ask(content)], PICKY, tokenize=tokenize)
        assert prefix.startswith(begin) and len(prefix) <= len(DOCUMENT)
        assert decoded(renderer, prompt["prompt_token_ids"]).startswith(prefix)


@pytest.mark.parametrize(
    "template, settings, reason",
    [
        (CLOSED, {}, r"the chat template refuses another question \(I was not made for that\)"),
        (BLIND, {}, "the chat template does not show the last user message"),
        (CHATML, {"truncate_prompt_tokens": 20}, r"the chat may have been cut \(truncate_prompt_tokens\)"),
    ],
)
def test_a_refusal_says_why(template, settings, reason, renderer):
    tok_params = renderer.default_chat_tok_params.with_kwargs(**settings)
    prompt, _ = render(renderer, [*SYSTEM, ask()], template, tok_params)
    with pytest.raises(VLLMValidationError, match=f"kv_prefix_len is required with .* prefix: {reason}"):
        InputProcessor(renderer.config).process_inputs("r", prompt, SamplingParams(), ("generate",))


CLOCK = "{{ strftime_now('%H:%M:%S.%f') }}" + CHATML


@pytest.fixture
def warnings(monkeypatch):
    """What the module warns of."""
    found = []
    monkeypatch.setattr(chat.logger, "warning", lambda text, *args: found.append(text % args))
    chat._log_changes.cache_clear()
    return found


def test_a_template_with_a_clock_is_named_once(renderer, warnings):
    """A prefix ends at a clock, which nobody sees otherwise."""
    for _ in range(3):
        prompt, prefix = render(renderer, [*TURN, ask()], CLOCK)
        assert facts_of(prompt).changes and len(prefix) < len("12:34:56.789012")
    (warning,) = warnings
    assert "{{ strftime_now('%H:%M:%S.%f') }}" in warning and "a prefix ends there" in warning
    render(renderer, [*TURN, ask()], "Now " + CLOCK)
    assert len(warnings) == 2


def test_chats_that_are_kept_whole_are_counted(renderers, monkeypatch):
    """Once each, and only if their scope is why."""
    renderer, counted = renderers(scope="prefix", min_prompt=30), []
    processor = InputProcessor(renderer.config)
    monkeypatch.setattr(metrics, "count_kept_whole", counted.append)

    def serve(messages, template=CHATML, **fields):
        prompt, _ = render(renderer, messages, template)
        params = SamplingParams(extra_args=fields or None)
        request = processor.process_inputs("r", prompt, params, ("generate",))
        return RequestOptions.of(request.sampling_params)

    assert serve([*TURN, ask()]).ends[0] > 30
    serve([ask("Why?")])  # a short prompt
    serve([*TURN, ask()], CLOCK, kv_prefix_len=60)
    serve([ask(DOCUMENT)], kv_eviction="full")
    assert counted == []
    serve([ask(DOCUMENT)])
    serve(SYSTEM)
    assert counted == ["short", "short"]
    serve([*TURN, ask()], CLOCK)
    assert counted[2:] == ["changes"]


def test_renderers_of_other_engines_are_left_alone(renderers):
    count = len(render(renderers(scope="prefix"), [*TURN, ask()])[0]["prompt_token_ids"])
    assert render(renderers(scope="prefix", min_prompt=count), [*TURN, ask()])[1]
    for options in ({}, {"scope": "prompt"}, {"scope": "prefix", "min_prompt": count + 1}):
        assert render(renderers(**options), [*TURN, ask()])[1] is None


def test_the_server_renders_in_vllms_threads(renderer, monkeypatch):
    threads = []
    find_prefix = chat.find_prefix

    def watched(*args):
        threads.append(threading.current_thread())
        return find_prefix(*args)

    monkeypatch.setattr(noting, "find_prefix", watched)
    params = ChatParams(chat_template=CHATML, chat_template_kwargs={"tokenize": False})
    chats = [[*TURN, ask(f"{number}?")] for number in range(5)]
    _, expected = renderer.render_chat(chats, params)
    assert set(threads) == {threading.current_thread()}
    threads.clear()
    _, prompts = asyncio.run(renderer.render_chat_async(chats, params))
    assert [prefix_len_of(prompt) for prompt in prompts] == [prefix_len_of(prompt) for prompt in expected]
    assert len(threads) == 5 and threading.current_thread() not in threads


@given(st.text("ab", max_size=12), st.text("ab", max_size=12))
def test_common_length(first, second):
    length = common_length(first, second)
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]
    assert common_length(list(first), list(second)) == length
