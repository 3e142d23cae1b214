"""KV that one answer holds while it is written: kept whole, and evicted again and again, in the demo."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.harness.documents import ask, http_client
from benchmarks.harness.server import Server, Snapshot

WIDTH, HEIGHT = 56, 8
"""Of the plot, in characters."""


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

    def columns(self, width: int) -> list[int]:
        """Pages in so many equal parts of the answer: the most that were seen, or as many as before."""
        found = [0] * width
        for tokens, pages in self.held:
            column = min(width * tokens // self.tokens, width - 1)
            found[column] = max(found[column], pages)
        for column in range(1, width):
            found[column] = found[column] or found[column - 1]
        return found


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


def growth_shown(found: Sequence[Growth], prompt_len: int, page_bytes: int) -> Group:
    """The ways of keeping the answer side by side: a table, and the plot."""
    table = Table(title=f"One answer of {found[0].tokens:,} tokens to a prompt of {prompt_len:,}")
    table.add_column("")
    for one in found:
        table.add_column(one.name, justify="right")
    table.add_row("KV held, at most, MiB", *(_mib(one.most, page_bytes) for one in found))
    table.add_row("KV held near the end, MiB", *(_mib(one.last, page_bytes) for one in found))
    table.add_row("evictions", *(f"{one.evictions:,}" for one in found))
    table.add_row("output tokens per second", *(f"{one.tokens / one.seconds:.1f}" for one in found))
    return Group(table, plot(found, page_bytes))


def _mib(pages: int, page_bytes: int) -> str:
    """On a busy machine an answer can end before anybody has seen what it holds."""
    return f"{pages * page_bytes / 2**20:.2f}" if pages else "not seen"


def plot(found: Sequence[Growth], page_bytes: int) -> Text:
    """KV held over the tokens written; what holds less stands before what holds more."""
    lines = sorted(found, key=lambda one: one.most, reverse=True)
    most = max(1, lines[0].most)
    marks = dict(zip((one.name for one in lines), "░█", strict=True))
    heights = {one.name: [round(HEIGHT * x / most) for x in one.columns(WIDTH)] for one in lines}
    top, text = f"{most * page_bytes / 2**20:.1f} MiB", Text(no_wrap=True, overflow="crop")
    for level in range(HEIGHT, 0, -1):
        text.append(f"{top if level == HEIGHT else '':>9} │")
        for column in range(WIDTH):
            shown = [marks[one.name] for one in lines if heights[one.name][column] >= level]
            text.append(shown[-1] if shown else " ", "cyan" if shown[-1:] == ["█"] else "")
        text.append("\n")
    end = f"{lines[0].tokens:,} tokens"
    text.append(f"{'0':>9} └{'─' * WIDTH}\n{'':>11}0{end:>{WIDTH - 1}}\n")
    text.append("   ".join(f"{mark} {name}" for name, mark in marks.items()))
    return text
