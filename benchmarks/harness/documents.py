"""Questions about documents: how long each waits for its first token, and how much of its prompt was cached."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.table import Table

from benchmarks.harness.server import Server, ServerError


@dataclass(frozen=True)
class Answer:
    """What a question brought.

    Attributes:
        first_token: seconds until the first token.
        tokens: ids of the answer.
        cached: tokens of the prompt that were found in the prefix cache.
    """

    first_token: float
    tokens: list[int]
    cached: int


def http_client(server: Server) -> httpx.AsyncClient:
    """For requests of any length; no connection is kept, since servers close those that are idle."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits)


async def ask(
    client: httpx.AsyncClient,
    server: Server,
    prompt: Sequence[int],
    document_len: int | None,
    output_len: int,
    fields: Mapping[str, Any] | None = None,
) -> Answer:
    """Ask a question behind a document of so many tokens, which is evicted without the question in view.

    Args:
        document_len: None where all of the prompt is evicted, with the question in view.
        fields: of ``vllm_xargs``, besides.

    Raises:
        ServerError: the answer is not complete.
    """
    body: dict[str, Any] = {"model": server.model, "prompt": list(prompt), "max_tokens": output_len}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    prefix = {} if document_len is None else {"kv_prefix_len": document_len}
    if given := {**prefix, **(fields or {})}:
        body["vllm_xargs"] = given
    started, first = time.perf_counter(), 0.0
    usage: dict[str, Any] = {}
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            first = first or time.perf_counter() - started
            for choice in event.get("choices", ()):
                tokens += choice.get("token_ids") or ()
            usage = event.get("usage") or usage
    if len(tokens) != output_len:
        raise ServerError(f"an answer has {len(tokens)} tokens, not {output_len}; see {server.log}")
    # Told only where the server was started with --enable-prompt-tokens-details.
    details = usage.get("prompt_tokens_details") or {}
    return Answer(first, tokens, details.get("cached_tokens") or 0)


def waits_table(document_len: int, answers: Sequence[Answer]) -> Table:
    """How long the questions about one document waited."""
    table = Table(
        title=f"{len(answers)} questions about one document of {document_len:,} tokens, one after the other"
    )
    for column in ("question", "first token after", "prompt tokens found in the cache"):
        table.add_column(column, justify="right")
    for number, answer in enumerate(answers, 1):
        table.add_row(f"{number}", f"{answer.first_token:.3f} s", f"{answer.cached:,}")
    return table
