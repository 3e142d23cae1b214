"""Compression that does not see the question: through ``LLM.chat``."""

import pytest
from vllm import SamplingParams

from tests.engine.support.clients import words
from tests.engine.support.running import decided, evicting_engine

pytestmark = pytest.mark.engine

DOCUMENTS = words(300)
BEFORE = [{"role": "user", "content": DOCUMENTS}, {"role": "assistant", "content": "w7"}]
PREFIX = 1 + 300 + 2  # with the headers of both messages
QUESTIONS = [words(40, 1), words(90, 2)]


def conversation(question):
    return [*BEFORE, {"role": "user", "content": question}]


@pytest.fixture(scope="module")
def llm(models):
    options = {"policy": "ada-snapkv", "budget": 0.25, "min_prompt": 64, "scope": "prefix"}
    with evicting_engine(models("llama"), eviction=options) as llm:
        yield llm


def sampling(**fields):
    return SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, extra_args=fields or None)


def chat_with(llm, conversations, params=None):
    return decided(llm, llm.chat(conversations, params or sampling(), use_tqdm=False))


def generate(llm, conversation, params):
    template = llm.get_tokenizer().apply_chat_template
    ids = template(conversation, add_generation_prompt=True, tokenize=True, return_dict=False)
    return decided(llm, llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False))[0]


def test_no_question_changes_what_is_kept(llm):
    answers = chat_with(llm, [conversation(question) for question in QUESTIONS])
    kept = answers[0].kept
    assert len(kept) == 1 and len(kept[0]) == 4
    assert sum(len(head) for layer in kept[0].values() for head in layer) == 8 * 75
    assert max(position for layer in kept[0].values() for head in layer for position in head) == PREFIX - 1
    assert answers[1].kept == kept
    assert answers[0].tokens != answers[1].tokens
    # The same as to say how long the prefix is, in a chat or not.
    for question, answer in zip(QUESTIONS, answers, strict=True):
        explicit = sampling(kv_prefix_len=PREFIX)
        for again in (
            *chat_with(llm, [conversation(question)], explicit),
            generate(llm, conversation(question), explicit),
        ):
            assert (again.kept, again.tokens) == (kept, answer.tokens)
    # Other documents keep something else, and so does who sees the question.
    other = [{"role": "user", "content": words(300, 5)}, *conversation(QUESTIONS[0])[1:]]
    assert chat_with(llm, [other])[0].kept != kept
    length = PREFIX + 1 + 40 + 1
    aware = generate(llm, conversation(QUESTIONS[0]), sampling(kv_prefix_len=length))
    assert max(position for head in aware.kept[0][0] for position in head) == length - 1


def test_one_setting_for_chats_with_different_prefixes(llm):
    params = sampling()
    longer = [{"role": "system", "content": words(50)}, *conversation(QUESTIONS[1])]
    alone = [{"role": "user", "content": DOCUMENTS}]
    answers = chat_with(llm, [conversation(QUESTIONS[0]), longer, alone, BEFORE[1:]], params)
    ends = [max(answer.kept[0][0][0]) + 1 if answer.kept else None for answer in answers]
    assert ends == [PREFIX, 1 + 50 + PREFIX, None, None]
    assert params.extra_args is None
