"""Every route of vLLM that lets an engine answer, over HTTP and in every scope: it is served, or refused by name."""

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from benchmarks.harness.models import make_model
from tests.contract.test_routes import GENERATES, RENDERS
from tests.engine.support.chats import QUESTION, VOCAB, ask, save_byte_tokenizer
from tests.engine.support.clients import evictions, post
from tests.engine.support.serving import ForkedServer, RenderServer, log_evictions
from vllm_kvevict.engine.request_options import SCOPE_FIELDS

pytestmark = pytest.mark.engine

Body = dict[str, Any]

FLAGS = ["--kv-eviction", "kvzip", "--kv-eviction-config.min_prompt", "64", "--kv-eviction-config.scope"]
NOT_RENDERED = "the server has not rendered this prompt as a chat"
COHERE = "/cohere/v2/chat"

SAME = ("policy", "tokens", "kept", "stored", "heads")
"""What is logged of an eviction, but not of its request."""


def document(name: str) -> str:
    """A text of about 600 tokens that only the tests of this name send, so that it has to be compressed."""
    return "".join(f"In {year} the harbour of {name} moved {year * 7 % 467} tonnes. " for year in range(40))


def chat(name: str) -> list[Body]:
    return [ask(document(name)), {"role": "assistant", "content": "I have read it."}, ask()]


CHATS: dict[str, Callable[[list[Body]], Body]] = {
    "/v1/chat/completions": lambda messages: {"messages": messages, "max_tokens": 8},
    "/v1/chat/completions/batch": lambda messages: {"messages": [messages] * 2, "max_tokens": 8},
    "/invocations": lambda messages: {"messages": messages, "max_tokens": 8},
    "/v1/messages": lambda messages: {"messages": messages, "max_tokens": 8},
    "/v1/responses": lambda messages: {"input": messages, "max_output_tokens": 8},
    COHERE: lambda messages: {"messages": messages, "max_tokens": 8},
    "/v1/systemone": lambda messages: {
        "instructions": messages[0]["content"],
        "state": "",
        "questions": {"largest": {"type": "noul", "instructions": messages[-1]["content"]}},
    },
}
"""Routes that render chats, and how they take one."""

RENDERED: dict[str, Callable[[Any], str]] = {
    "/v1/chat/completions": lambda answer: answer["choices"][0]["message"]["content"],
    "/v1/messages": lambda answer: answer["content"][0]["text"],
    "/v1/responses": lambda answer: answer["output"][0]["content"][0]["text"],
    COHERE: lambda answer: answer["message"]["content"][0]["text"],
}
"""Those of them that answer with the prompt, too, below ``/render``, and the text of an answer."""

PROMPTS: dict[str, Callable[[list[int], Body], Body]] = {
    "/v1/completions": lambda ids, fields: {"prompt": ids, "max_tokens": 8, "vllm_xargs": fields},
    "/v1/completions/render": lambda ids, fields: {"prompt": ids, "max_tokens": 8, "vllm_xargs": fields},
    "/inference/v1/generate": lambda ids, fields: {
        "token_ids": ids,
        "sampling_params": {"max_tokens": 8, "temperature": 0, "extra_args": fields},
    },
}
"""Routes that take any prompt."""

OF_OTHER_MODELS = {"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"}
"""Routes that a server has only with a model that hears."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Of an architecture that makes decisions, whose labels are tokens."""
    path = tmp_path_factory.mktemp("models") / "bytes"
    make_model(path, "qwen3", layers=2, vocab=VOCAB)
    save_byte_tokenizer(path, "\nyes\nno\n" * 100)
    return path


@pytest.fixture(scope="module", params=["prompt", *SCOPE_FIELDS])
def scope(request):
    return request.param


def sentence(scope: str, reason: str) -> str:
    return f"{SCOPE_FIELDS[scope][0]} is required with --kv-eviction-config.scope {scope}: {reason}"


@pytest.fixture(scope="module")
def server(scope, model, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    flags = [*FLAGS, scope, "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    flags += ["--enable-scale-out"]
    env = {"VLLM_KVEVICT_CHECK": "1", "VLLM_ENABLE_COHERE_API": "1"}
    with ForkedServer(model, log, *flags, *log_evictions(log), env=env) as server:
        yield server


@pytest.fixture(scope="module")
def ids_of(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def test_every_route_is_asked() -> None:
    asked = {*CHATS, *PROMPTS, "/generative_scoring", *(f"{path}/render" for path in RENDERED)}
    assert asked | OF_OTHER_MODELS == {*GENERATES, *RENDERS} - {"/v1/decisions"}


@pytest.mark.parametrize("path", CHATS)
def test_chats(path, scope, server, ids_of):
    start = len(server.evictions)
    answer = post(server, path, CHATS[path](chat(path)))
    text = document(path)
    before = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\nI have read it.<|im_end|>\n"
    if path == "/v1/systemone":
        before = f"<|im_start|>system\n{text}<|im_end|>\n"
    prefix_len = len(ids_of(before + "<|im_start|>"))
    count = 2 if path.endswith("batch") else 1
    # Two chats with the same prefix compress it once. A decision is the token that ends the prompt's step.
    expected_lines = 1 if scope in SCOPE_FIELDS else 0 if path == "/v1/systemone" else count
    lines = evictions(server, expected_lines, start)
    found = re.search(r"'(?:prompt|input)_tokens': (\d+)", str(answer))
    assert found
    expected = prefix_len if scope in SCOPE_FIELDS else int(found[1]) // count
    assert all((line["tokens"], line["policy"]) == (expected, "kvzip") for line in lines)
    assert prefix_len < int(found[1]) // count


@pytest.mark.parametrize("path", RENDERED)
def test_a_chat_may_be_rendered_first(path, scope, server):
    """The documents are compressed once: all that tells a prefix apart arrives, the words of the repeat as well."""
    body, start = CHATS[path](chat(f"{path} twice")), len(server.evictions)
    direct = RENDERED[path](post(server, path, body))
    rendered = post(server, f"{path}/render", body)
    answer = post(server, "/inference/v1/generate", {**rendered, "output_mode": "text"})
    assert answer["choices"][0]["text"] == direct
    first, *second = evictions(server, 1 if scope in SCOPE_FIELDS else 2, start)
    for line in second:
        assert {name: line[name] for name in SAME} == {name: first[name] for name in SAME}


def test_a_chat_whose_question_is_not_found_is_not_rendered(scope, server):
    body = {**CHATS["/v1/chat/completions"](chat("cut")), "truncate_prompt_tokens": 100}
    status = 400 if scope in SCOPE_FIELDS else 200
    for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
        answer = post(server, path, body, status)
        assert status == 200 or sentence(scope, "the chat may have been cut") in answer


@pytest.mark.parametrize("scope", SCOPE_FIELDS, indirect=True)
def test_a_server_that_only_renders(scope, server, model, tmp_path):
    """It has the same flags, and no engine."""
    body, start = CHATS["/v1/chat/completions"](chat("another server")), len(server.evictions)
    with RenderServer(model, tmp_path / "log", *FLAGS, scope) as renders:
        rendered = post(renders, "/v1/chat/completions/render", body)
    fields = post(server, "/v1/chat/completions/render", body)["sampling_params"]["extra_args"]
    assert rendered["sampling_params"]["extra_args"] == fields
    assert fields.keys() == {SCOPE_FIELDS[scope][0], "kv_rendered"}
    rendered["model"] = server.model
    direct = RENDERED["/v1/chat/completions"](post(server, "/v1/chat/completions", body))
    answer = post(server, "/inference/v1/generate", {**rendered, "output_mode": "text"})
    assert answer["choices"][0]["text"] == direct
    evictions(server, 1, start)


@pytest.mark.parametrize("path", PROMPTS)
def test_prompts(path, scope, server, ids_of):
    def send(fields: Body, status: int = 200) -> Any:
        body = PROMPTS[path](ids_of(document(path)), fields)
        if not path.endswith("render"):
            return post(server, path, body, status)
        (rendered,) = post(server, path, body)
        return post(server, "/inference/v1/generate", rendered, status)

    start = len(server.evictions)
    send({"kv_prefix_len": 200})
    if scope in SCOPE_FIELDS:
        assert sentence(scope, NOT_RENDERED) in send({}, 400)
    else:
        send({})
    count = len(ids_of(document(path)))
    expected = [200] if scope in SCOPE_FIELDS else [200, count]
    assert [line["tokens"] for line in evictions(server, len(expected), start)] == expected
    beams = {"prompt": QUESTION, "max_tokens": 8, "use_beam_search": True, "n": 2}
    assert "beam search cannot be used" in post(server, "/v1/completions", beams, 400)


AHEAD = 7
"""Tokens of an answer that are written before its prompt is evicted: the last of eight is not stored."""
SERVER = [
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    "2048",
    "--enable-prompt-tokens-details",
]
SERVER += ["--enable-scale-out", "--stream-interval", "64"]
STREAMED = {path for path in (*CHATS, *PROMPTS) if not path.endswith(("batch", "systemone", "render"))}


def test_answers_that_end_before_an_eviction_are_stocks(model, ids_of, tmp_path):
    """Whole bodies, what they say of usage as well, from every route."""
    ours = ["--kv-eviction", "ada-snapkv", "--kv-budget", "0.1", "--kv-eviction-config.lookahead", str(AHEAD)]
    env = {"VLLM_ENABLE_COHERE_API": "1"}
    with (
        ForkedServer(model, tmp_path / "stock", *SERVER, env=env) as stock,
        ForkedServer(model, tmp_path / "ours", *SERVER, *ours, env=env) as server,
    ):

        def same(path: str, **more: Any) -> bool:
            made = CHATS[path](chat(path)) if path in CHATS else PROMPTS[path](ids_of(document(path)), {})
            body = {"model": stock.model, "temperature": 0, "ignore_eos": True, **made, **more}
            answers = [httpx.post(f"{one.url}{path}", json=body, timeout=240) for one in (stock, server)]
            assert {answer.status_code for answer in answers} == {200}, (path, answers[1].text)
            expected, found = (_without_names(answer.text) for answer in answers)
            return expected == found

        others = [path for path in (*CHATS, *PROMPTS) if not same(path)]
        for path in STREAMED:
            # A stream's parts are joined where its client is slow, of stock as well.
            if not any(same(path, stream=True) for _ in range(3)):
                others.append(f"{path}, streamed")
        assert not others
        # The control: behind them answers differ.
        assert not same("/v1/completions", max_tokens=60)


def _without_names(text: str) -> str:
    """A body without what tells two equal answers apart: names that are made up, and times."""
    text = re.sub(r"[0-9a-f]{16,}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "NAME", text)
    return re.sub(r'"(created|\w+_at|system_fingerprint)": ?("[^"]*"|[\d.]+)', "TIME", text)


def test_scoring(scope, server):
    body = {"query": document("scores"), "items": [QUESTION, "no"], "label_token_ids": [7, 8]}
    start = len(server.evictions)
    assert len(post(server, "/generative_scoring", body)["data"]) == 2
    assert scope == "prompt" or not evictions(server, 0, start)


def test_routes_of_other_models_are_not_there(server):
    for path in OF_OTHER_MODELS:
        assert httpx.post(f"{server.url}{path}", json={}, timeout=60).status_code == 404
