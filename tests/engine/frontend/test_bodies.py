"""Fields of requests that vLLM would drop or misread are answered with a sentence, whatever the endpoint."""

import asyncio
import json

import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.testclient import TestClient

from vllm_kvevict.engine.frontend.bodies import BodyCheck, check_body, fault_of
from vllm_kvevict.engine.request_options import REQUEST_FIELDS


@pytest.mark.parametrize("name", REQUEST_FIELDS)
def test_a_field_in_the_wrong_place(name):
    said = fault_of({"model": "m", "prompt": "p", name: 3})
    assert said.startswith(f"{name} is a field of vllm_xargs, not of the request itself: ")
    assert f'extra_body={{"vllm_xargs": {{"{name}": ...}}}}' in said
    said = fault_of({"token_ids": [1], "sampling_params": {}, name: 3})
    assert said == f"{name} is a field of sampling_params.extra_args, not of the request itself: put it there"


@pytest.mark.parametrize("name", REQUEST_FIELDS)
@pytest.mark.parametrize("value", [True, False])
def test_true_and_false(name, value):
    """They would arrive as 1 and 0, and a budget of 1 keeps everything."""
    said = fault_of({"vllm_xargs": {name: value}})
    assert said == f"{name} must not be true or false, got {json.dumps(value)}"


def escaped(name: str, *places: int, upper: bool = False) -> str:
    """The name in JSON, some of its letters escaped."""
    spell = "\\u{:04X}" if upper else "\\u{:04x}"
    return "".join(spell.format(ord(x)) if i in places else x for i, x in enumerate(name))


WRITTEN = {
    "plain": "kv_turns",
    "k": escaped("kv_turns", 0),
    "v": escaped("kv_turns", 1),
    "_": escaped("kv_turns", 2, upper=True),
    "all": escaped("kv_turns", *range(8), upper=True),
    "end": escaped("kv_turns", 7),
}
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", WRITTEN.values(), ids=WRITTEN)
def test_a_name_however_it_is_written(name, encoding, client):
    """What the server reads as a field of ours is one; so, too, if it stands there twice."""
    text = f'{{"prompt": "p", "{name}": [3], "{name}": [4]}}'
    assert json.loads(text.encode(encoding)) == {"prompt": "p", "kv_turns": [4]}
    answer = client.post("/echo", content=text.encode(encoding), headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["detail"].startswith(
        "kv_turns is a field of vllm_xargs"
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"vllm_xargs": {"kv_eviction": "snapkv", "kv_budget": 1, "other": true}}',
        b'{"kv_transfer_params": {"kv_eviction": true}}',
        b'{"messages": [{"role": "user", "content": "say \\"kv_eviction\\": true"}]}',
        b'["kv_eviction"]',
        b'{"kv_eviction": ',
        b'"kv_' + b"[" * 100_000,
        b'\xff"kv_eviction"',
        b'\xff\xfe"',
        b"\x00",
        ("[" * 100_000).encode("utf-16"),
        b'{"\\u006bv_turns": ' + b"9" * 5000 + b"}",
        '{"\ud800kv_turns": 1}'.encode("utf-16", "surrogatepass"),
    ],
)
def test_other_bodies_are_left_to_vllm(body):
    check_body(body)


@pytest.fixture
def client():
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: dict, raw: Request) -> dict:
        return {"request": request, "bytes": len(await raw.body())}

    app.add_middleware(BodyCheck)
    with TestClient(app) as client:
        yield client


def test_an_application_gets_everything_else(client):
    body = {"prompt": "x" * 1_000_000, "vllm_xargs": {"kv_budget": 0.5}}
    assert client.post("/echo", json=body).json()["request"] == body


def test_a_body_in_pieces():
    pieces = [b'{"kv_bud', b'get": 0.5}', b""]
    messages = [
        {"type": "http.request", "body": piece, "more_body": index < 2} for index, piece in enumerate(pieces)
    ]

    async def receive():
        return messages.pop(0)

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass

    with pytest.raises(HTTPException) as error:
        asyncio.run(BodyCheck(app)({"type": "http"}, receive, None))
    assert error.value.status_code == 400 and not messages
