"""Compression that does not see the question: through ``LLM.chat``, and through every endpoint of a server."""

import json

import httpx
import openai
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.support.clients import complete, evictions, words
from tests.engine.support.running import decided, evicting_engine
from tests.engine.support.serving import ForkedServer, log_evictions

pytestmark = pytest.mark.engine

DOCUMENTS = words(300)
BEFORE = [{"role": "user", "content": DOCUMENTS}, {"role": "assistant", "content": "w7"}]
PREFIX = 1 + 300 + 2  # with the headers of both messages
QUESTIONS = [words(40, 1), words(90, 2)]


def conversation(question):
    return [*BEFORE, {"role": "user", "content": question}]


# From Python.


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


def test_other_prompts_have_to_say_where_their_prefix_ends(llm):
    with pytest.raises(VLLMValidationError, match="kv_prefix_len is required"):
        generate(llm, conversation(QUESTIONS[0]), sampling())
    for fields in ({"kv_eviction": "full"}, {"kv_budget": 1.0}):
        assert not generate(llm, conversation(QUESTIONS[0]), sampling(**fields)).kept
    assert not generate(llm, [{"role": "user", "content": words(60)}], sampling()).kept


def test_an_answer_of_one_token_needs_no_eviction(llm):
    one = SamplingParams(max_tokens=1, temperature=0)
    (answer,) = decided(llm, llm.generate([DOCUMENTS], one, use_tqdm=False))
    (same,) = decided(llm, llm.generate([DOCUMENTS], sampling(kv_eviction="full"), use_tqdm=False))
    assert not answer.kept and answer.tokens == same.tokens[:1]


# Over HTTP.


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    flags = ["--kv-eviction", "ada-snapkv", "--kv-budget", "0.25", "--kv-eviction-config.min_prompt", "64"]
    flags += ["--kv-eviction-config.scope", "prefix", "--dtype", "float32", "--enforce-eager"]
    # So that each request has an eviction to look at.
    flags += ["--max-model-len", "2048", "--no-enable-prefix-caching", "--trust-request-chat-template"]
    log = tmp_path_factory.mktemp("server") / "log"
    with ForkedServer(
        models("llama"), log, *flags, *log_evictions(log), env={"VLLM_KVEVICT_CHECK": "1"}
    ) as server:
        yield server


def post(server, path, stream, fields=None, **body):
    """The text of an answer, whatever the endpoint puts around it."""
    settings = {"model": server.model, "temperature": 0, "stream": stream, "vllm_xargs": fields or {}}
    answer = httpx.post(f"{server.url}/v1/{path}", json={**settings, **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.text
    assert "error" not in answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def ask_chat(server, messages, stream, fields=None):
    return post(server, "chat/completions", stream, fields, messages=messages, max_tokens=8)


def ask_responses(server, messages, stream, fields=None):
    return post(server, "responses", stream, fields, input=messages, max_output_tokens=8)


def ask_messages(server, messages, stream, fields=None):
    return post(server, "messages", stream, fields, messages=messages, max_tokens=8)


def ask_chat_in_parts(server, messages, stream, fields=None):
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    return ask_chat(server, parts, stream, fields)


ENDPOINTS = [ask_chat, ask_chat_in_parts, ask_responses, ask_messages]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_endpoints(endpoint, server):
    start = len(server.evictions)
    for stream in (False, True):
        for question in QUESTIONS:
            endpoint(server, conversation(question), stream)
            endpoint(server, conversation(question), stream, {"kv_prefix_len": PREFIX})
    for line in evictions(server, 8, start):
        assert (line["tokens"], line["policy"]) == (PREFIX, "ada-snapkv")
        assert (line["kept"], line["stored"]) == (8 * 75, 8 * PREFIX)
        # The same prefix, so the same choice.
        assert len(line["heads"]) == 4 and line["heads"] == server.evictions[start]["heads"]


def test_a_chat_with_nothing_before_the_question_is_kept_whole(server, client):
    start, counted = len(server.evictions), kept_whole(server)
    for stream in (False, True):
        ask_chat(server, [{"role": "user", "content": DOCUMENTS}], stream)
    ask_chat(server, conversation(QUESTIONS[0]), False)
    assert evictions(server, 1, start)[0]["tokens"] == PREFIX
    assert kept_whole(server) == {**counted, "short": counted["short"] + 2}


def kept_whole(server):
    """Chats that the server has kept whole, by reason."""
    return {
        reason: server.metrics()[f'chats_kept_whole_total{{reason="{reason}"}}']
        for reason in ("short", "changes")
    }


def test_a_chat_whose_template_has_a_clock_is_counted_and_logged_once(server):
    counted = kept_whole(server)
    template = "{{ strftime_now('w%f ') }}{% for m in messages %}{{ m.content }} {% endfor %}"
    for question in QUESTIONS:
        post(
            server, "chat/completions", False, messages=conversation(question), chat_template=template, max_tokens=8
        )  # fmt: skip
    assert kept_whole(server) == {**counted, "changes": counted["changes"] + 2}
    assert server.log.count("writes something else each time a chat is rendered") == 1


def test_completions_have_to_say_where_their_prefix_ends(server, client):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            complete(client, DOCUMENTS, stream=stream)
        assert "kv_prefix_len is required with --kv-eviction-config.scope prefix" in error.value.message
    start = len(server.evictions)
    assert complete(client, words(60)).choices[0].text
    assert complete(client, DOCUMENTS, fields={"kv_eviction": "full"}).choices[0].text
    assert complete(client, DOCUMENTS, fields={"kv_prefix_len": 200}).choices[0].text
    (line,) = evictions(server, 1, start)
    assert (line["tokens"], line["policy"]) == (200, "ada-snapkv")


def test_scoring_reads_one_token(server):
    """Its prompts are no chats, and there is no field for where a prefix ends."""
    body = {
        "model": server.model,
        "query": DOCUMENTS,
        "items": [words(5, 1), words(9, 2)],
        "label_token_ids": [7, 8],
    }
    answer = httpx.post(f"{server.url}/generative_scoring", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == 2


def test_a_chat_that_is_cut_has_to_say_it_too(client, server):
    body = {"model": server.model, "messages": conversation(QUESTIONS[0]), "max_tokens": 8}
    for cut, status in ((200, 400), (1000, 200)):
        for stream in (False, True):
            cut_body = {**body, "truncate_prompt_tokens": cut, "truncation_side": "left", "stream": stream}
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=cut_body, timeout=120)
            assert answer.status_code == status
            assert ("kv_prefix_len" in answer.text) == (status == 400)
