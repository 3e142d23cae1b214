"""KV that one answer holds while it is written: kept whole, and evicted again and again, in the demo."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.harness.documents import ask, http_client
from benchmarks.harness.server import Server, Snapshot


@dataclass(frozen=True)
class Growth:
    """What an answer held.

    Attributes:
        name: how it was kept.
        seconds: from the question to the end of the answer.
        tokens: of the answer.
        held: tokens of the answer, and pages of prompt and answer, as they were seen meanwhile.
        evictions: of the answer.
    """

    name: str
    seconds: float
    tokens: int
    held: list[tuple[int, int]]
    evictions: int

    @property
    def most(self) -> int:
        """Pages."""
        return max(pages for _, pages in self.held)

    @property
    def last(self) -> int:
        """Pages when it was seen last."""
        return self.held[-1][1]


async def watch(
    name: str,
    server: Server,
    prompt: Sequence[int],
    tokens: int,
    budget: int,
    poll: float,
    on_progress: Callable[[Snapshot], None],
) -> Growth:
    """Ask for an answer of so many tokens, and look at ``/metrics`` until it is there.

    Args:
        budget: ``kv_decode_budget`` of the request.
        poll: seconds between two looks.
    """
    before, held, loop = await server.snapshot(), [(0, 0)], asyncio.get_running_loop()
    started = loop.time()
    async with http_client(server) as client:
        fields = {"kv_decode_budget": budget}
        task = asyncio.create_task(ask(client, server, prompt, None, tokens, fields))
        try:
            while not task.done():
                await asyncio.wait([task], timeout=poll)
                server.check()
                now = await server.snapshot()
                if now.running:
                    held.append((now.output_tokens - before.output_tokens, now.request_pages))
                on_progress(now)
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    seconds = loop.time() - started
    evictions = (await server.snapshot()).answer_evictions - before.answer_evictions
    return Growth(name, seconds, tokens, held, evictions)


def growth_table(found: Sequence[Growth], prompt_len: int, page_bytes: int) -> Table:
    """The ways of keeping the answer side by side."""
    table = Table(title=f"One answer of {found[0].tokens:,} tokens to a prompt of {prompt_len:,}")
    table.add_column("")
    for one in found:
        table.add_column(one.name, justify="right")
    table.add_row("KV held, at most, MiB", *(_mib(one.most, page_bytes) for one in found))
    table.add_row("KV held near the end, MiB", *(_mib(one.last, page_bytes) for one in found))
    table.add_row("evictions", *(f"{one.evictions:,}" for one in found))
    table.add_row("output tokens per second", *(f"{one.tokens / one.seconds:.1f}" for one in found))
    return table


def _mib(pages: int, page_bytes: int) -> str:
    """On a busy machine an answer can end before anybody has seen what it holds."""
    return f"{pages * page_bytes / 2**20:.2f}" if pages else "not seen"
