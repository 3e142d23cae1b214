"""Requests through the official client, and what a server shows of them."""

import random
import re
import time

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
    numbers = server.metrics()
    usage = re.search(r"^vllm:kv_cache_usage_perc.* (\S+)$", httpx.get(f"{server.url}/metrics").text, re.M)
    cached = numbers['cached_pages{rank="0"}'] + numbers['cached_uncompressed_pages{rank="0"}']
    held = numbers['physical_pages{rank="0"}'] - cached
    return held == numbers['logical_kv_tokens{rank="0"}'] == float(usage[1]) == 0
