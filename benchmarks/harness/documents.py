"""Questions about documents and in chats: how long each waits for its first token, and how much of it was cached."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from benchmarks.harness.load import SETTLE_SECONDS
from benchmarks.harness.server import Server, ServerError, cpu_environment


@dataclass(frozen=True)
class Answer:
    """What a question brought.

    Attributes:
        first_token: seconds until the first token.
        tokens: ids of the answer.
        cached: tokens of the prompt that were found in the prefix cache.
        prompt: tokens of it.
    """

    first_token: float
    tokens: list[int]
    cached: int
    prompt: int = 0


@dataclass(frozen=True)
class Run:
    """What a load took on one side.

    Attributes:
        wall: seconds from the first request to the end of the last answer.
        first_token: seconds until the first token of each request, in the order of the answers.
        computed, cached: prompt tokens that were not found in the prefix cache, and that were.
        hits: requests of which some were found.
        output_tokens: of all answers.
        preemptions: requests that lost their KV.
        held, uncompressed: pages of compressed and of uncompressed prefixes that are cached at the end; 0 for stock.
        held_by_each: of these, a compressed prefix's, on average.
        most_running: most requests seen running at once, where somebody looked.
    """

    wall: float
    first_token: list[float]
    computed: int = 0
    cached: int = 0
    hits: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    held: int = 0
    uncompressed: int = 0
    held_by_each: float = 0.0
    most_running: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.wall

    def summary(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


def environment(threads: int | None) -> dict[str, str]:
    """Of servers that offer to reset their cache, which those in the mode for developers do."""
    return cpu_environment(threads, 1) | {"VLLM_SERVER_DEV_MODE": "1"}


async def measured(
    server: Server, send: Callable[[httpx.AsyncClient], Awaitable[Sequence[Answer]]], reset: bool = False
) -> Run:
    """Send a load and wait until the server rests.

    Args:
        send: sends the requests.
        reset: whether the server begins with nothing cached.
    """
    before = await server.snapshot()
    async with http_client(server) as client:
        if reset:
            (await client.post("/reset_prefix_cache")).raise_for_status()
        started = time.perf_counter()
        answers = await send(client)
    wall = time.perf_counter() - started
    server.check()
    after = await server.snapshot()
    await asyncio.sleep(SETTLE_SECONDS)
    return Run(
        wall,
        [answer.first_token for answer in answers],
        computed=sum(answer.prompt - answer.cached for answer in answers),
        cached=sum(answer.cached for answer in answers),
        hits=sum(answer.cached > 0 for answer in answers),
        output_tokens=sum(len(answer.tokens) for answer in answers),
        preemptions=after.preemptions - before.preemptions,
        held=after.cached_pages,
        uncompressed=after.uncompressed_pages,
        held_by_each=after.cached_pages / max(after.cached_prefixes, 1),
    )


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
    return Answer(first, tokens, details.get("cached_tokens") or 0, len(prompt))
