"""Chats that are compressed turn by turn, over HTTP: a turn reads what is new, and answers as if it had read it all."""

import re

import pytest

from tests.engine.support.clients import complete, evictions, post, words
from tests.engine.support.serving import ForkedServer, log_evictions
from tests.engine.support.turn_templates import answer as answered
from tests.engine.support.turn_templates import result, user
from vllm_kvevict.engine.request_options import RENDERED

pytestmark = pytest.mark.engine

LEAST = 32
SYSTEM = {"role": "system", "content": words(200)}
QUESTIONS = [words(60, 1), words(45, 2), words(50, 3), words(40, 4)]


@pytest.fixture(scope="module", params=["ada-snapkv", "kvzip"])
def server(request, models, tmp_path_factory):
    flags = ["--kv-eviction", request.param, "--kv-budget", "0.25", "--kv-eviction-config.scope", "turns"]
    flags += ["--kv-eviction-config.min_prompt", "64", "--kv-eviction-config.min_turn", str(LEAST)]
    flags += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    flags += ["--enable-prompt-tokens-details", "--enable-scale-out", "--trust-request-chat-template"]
    log = tmp_path_factory.mktemp("server") / "log"
    env = {"VLLM_KVEVICT_CHECK": "1"}
    with ForkedServer(models("llama"), log, *flags, *log_evictions(log), env=env) as server:
        yield server


def chat_body(messages, **settings):
    return {"messages": messages, "max_tokens": 12, "ignore_eos": True, **settings}


def say(server, messages, **settings):
    """The answer to a chat, and how many of its tokens were found."""
    answer = post(server, "/v1/chat/completions", chat_body(messages, **settings))
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["message"]["content"], details.get("cached_tokens") or 0


def rendered(server, messages):
    """The request with which a chat is sent once it is rendered, and the ends of its turns."""
    found = post(server, "/v1/chat/completions/render", chat_body(messages))
    return found, found["sampling_params"]["extra_args"]["kv_turns"]


def say_as_tokens(server, client, request, salt):
    """The answer to a rendered chat of which nothing is found: a completion's, unless words of a repeat go along."""
    fields = request["sampling_params"]["extra_args"]
    if RENDERED in fields:
        more = {"cache_salt": salt, "output_mode": "text"}
        answer = post(server, "/inference/v1/generate", request | more)
        return answer["choices"][0]["text"]
    assert fields.keys() == {"kv_turns"}
    answer = complete(client, request["token_ids"], fields=fields, extra_body={"cache_salt": salt})
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    return answer.choices[0].text


def kept_whole(server):
    """Chats that the server has kept whole, by reason."""
    metrics = server.metrics()
    return {
        reason: metrics[f'chats_kept_whole_total{{reason="{reason}"}}'] for reason in ("short", "changes")
    }


def test_a_turn_reads_and_evicts_what_is_new(server, client):
    chat, last, kept, counted = [SYSTEM], 0, 0, kept_whole(server)
    for turn, question in enumerate(QUESTIONS):
        chat.append(user(question))
        request, ends = rendered(server, chat)
        start = len(server.evictions)
        answer, found = say(server, chat)
        # The end before this question is the one that is new; what is found behind the one before is not evicted yet.
        *_, before, end = [0, *ends]
        assert last == before <= found < end and before <= end - LEAST
        (line,) = evictions(server, 1, start)
        kept += 8 * int(0.25 * (end - before))
        assert (line["tokens"], line["kept"]) == (end, kept)
        assert say_as_tokens(server, client, request, f"turn {turn}") == answer
        evictions(server, 2 + turn, start)
        chat.append(answered(answer))
        last = end
    assert kept_whole(server) == counted


def test_retries_and_branches_begin_with_what_they_have_in_common(server):
    chat = [SYSTEM, user(QUESTIONS[0]), answered(words(40, 5))]
    first = [*chat, user(words(30, 6))]
    answer, _ = say(server, first)
    _, ends = rendered(server, first)
    start = len(server.evictions)
    again, found = say(server, first)
    assert again == answer and found >= ends[-1]
    assert say(server, [*chat, user(words(35, 7))])[1] >= ends[-1]
    evictions(server, 0, start)
    edited = [SYSTEM, user(words(61, 8)), *first[2:]]
    assert say(server, edited)[1] == ends[0]
    evictions(server, 1, start)


def test_a_template_that_drops_thoughts_is_named_once(server):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.last and messages[-1].role == 'tool' %}w9 "
        "{% endif %}{{ m.content }} {% endfor %}"
    )
    chat = [SYSTEM, user(words(40)), answered(words(9)), result(words(50))]
    for _ in range(2):
        post(server, "/v1/chat/completions", chat_body(chat, chat_template=template))
    assert len(re.findall("compressed again when the user asks the next question", server.log)) == 1
