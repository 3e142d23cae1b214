"""Requests through the official client, and what a server shows of them."""

import random
import time
from typing import Any

import httpx


def words(length: int, seed: int = 0) -> str:
    """A prompt of so many tokens."""
    chooser = random.Random(seed * 10_000 + length)
    return " ".join(f"w{chooser.randrange(8, 500)}" for _ in range(length))


def complete(client, prompt, max_tokens=12, fields=None, **settings):
    settings = {"temperature": 0, **settings}
    extra = {"ignore_eos": True, "vllm_xargs": fields or {}, **settings.pop("extra_body", {})}
    return client.completions.create(
        model=client.models.list().data[0].id,
        prompt=prompt,
        max_tokens=max_tokens,
        extra_body=extra,
        **settings,
    )


def post(server, path: str, body: dict[str, Any], status: int = 200) -> Any:
    """What a server answers to a request, which it must with this status: text if that is no success."""
    settings = {"model": server.model, "temperature": 0}
    answer = httpx.post(f"{server.url}{path}", json={**settings, **body}, timeout=240)
    assert answer.status_code == status, (path, answer.text)
    return answer.json() if status == 200 else answer.text


def text_of(*args, **settings) -> str:
    return complete(*args, **settings).choices[0].text


def eventually(condition, patience=30.0):
    """Metrics follow the answer they belong to a step later."""
    deadline = time.monotonic() + patience
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return result


def evictions(server, count, start):
    """What the server wrote of so many evictions after the first ``start``."""
    eventually(lambda: len(server.evictions) >= start + count)
    lines = server.evictions[start:]
    assert len(lines) == count
    return lines


def idle(server) -> bool:
    """Whether the server holds nothing but cached prefixes."""
    seen = server.snapshot()
    return seen.request_pages == seen.logical_entries == seen.kv_usage == 0
