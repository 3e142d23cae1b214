"""Requests as clients send them: through the official client, and over plain HTTP where it has no such endpoint."""

import json
import random
import re
import time

import httpx
import openai


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


def chat(client, fields, stream=False):
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": words(400)}],
        max_tokens=12,
        temperature=0,
        stream=stream,
        extra_body={"ignore_eos": True, "vllm_xargs": fields},
    )
    if not stream:
        return answer.choices[0].message.content
    return "".join(event.choices[0].delta.content or "" for event in answer if event.choices)


def responses(client, fields, stream=False):
    answer = client.responses.create(
        model=client.models.list().data[0].id,
        input=words(400),
        max_output_tokens=12,
        temperature=0,
        stream=stream,
        extra_body={"ignore_eos": True, "vllm_xargs": fields},
    )
    if not stream:
        return answer.output_text
    return "".join(event.delta for event in answer if event.type == "response.output_text.delta")


def messages(client, fields, stream=False):
    body = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": words(400)}],
        "max_tokens": 12,
        "temperature": 0,
        "stream": stream,
        "vllm_xargs": fields,
    }
    answer = httpx.post(f"{str(client.base_url).rstrip('/')}/messages", json=body, timeout=120)
    if answer.status_code != 200:
        raise openai.BadRequestError(answer.json()["error"]["message"], response=answer, body=answer.json())
    if not stream:
        return answer.json()["content"][0]["text"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(
        event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"
    )


def completions(client, fields, stream=False):
    answer = complete(client, words(400), fields=fields, stream=stream)
    if not stream:
        return answer.choices[0].text
    return "".join(event.choices[0].text for event in answer if event.choices)


ENDPOINTS = [completions, chat, responses, messages]
"""Each sends a prompt of 400 tokens, or a few more, with fields of ours, as a stream or not, and returns the text."""
