"""The demo's tables: what evictions kept, and servers side by side."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table
from rich.text import Text

from benchmarks.harness.server import Snapshot
from vllm_kvevict.schedules.reports import EvictionRecord


def kept_table(eviction: EvictionRecord) -> Table:
    """Entries kept by each layer and KV head of one request."""
    table = Table(
        title=f"What one request kept of its {eviction.tokens:,} prompt tokens ({eviction.policy})",
        caption=f"{eviction.kept:,} of {eviction.stored:,} entries; {eviction.freed_pages:,} pages freed",
    )
    table.add_column("layer", justify="right")
    for head in range(max((len(heads) for heads in eviction.heads), default=0)):
        table.add_column(f"KV head {head}", justify="right")
    table.add_column("layer kept", justify="right")
    most = max((max(heads) for heads in eviction.heads), default=1)
    for layer, heads in enumerate(eviction.heads):
        share = sum(heads) / (eviction.tokens * len(heads))
        table.add_row(str(layer), *(_cell(kept, most) for kept in heads), f"{share:.1%}")
    return table


def _cell(kept: int, most: int) -> Text:
    """A count and a small bar, full at the largest count."""
    blocks = "▏▎▍▌▋▊▉█"
    eighths = round(kept / most * 32)
    bar = "█" * (eighths // 8) + (blocks[eighths % 8 - 1] if eighths % 8 else "")
    return Text.assemble(f"{kept:,} ", (f"{bar:<4}", "cyan"))


@dataclass(frozen=True)
class Run:
    """What one server showed.

    Attributes:
        name: of the server.
        requests, prompt_tokens, output_tokens: answered; tokens of one prompt; tokens of all answers.
        seconds: from the first request to the last answer.
        peak: the moment with the most running requests.
        peak_usage: highest share of the KV memory in use.
        final: counters at the end.
    """

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    peak: Snapshot
    peak_usage: float
    final: Snapshot

    @classmethod
    def typical(cls, runs: Sequence["Run"]) -> "Run":
        """Several runs on one server as one: the median of their seconds, the highest peaks, the last counters."""
        return replace(
            runs[-1],
            seconds=statistics.median(run.seconds for run in runs),
            peak=max((run.peak for run in runs), key=lambda peak: peak.running),
            peak_usage=max(run.peak_usage for run in runs),
        )

    @property
    def speed(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds


def pages_of_prompt(run: Run, rows: int, page_size: int) -> float:
    """Pages that a prompt holds once it has been read, on average."""
    freed = run.final.freed_pages / run.final.evictions if run.final.evictions else 0.0
    return rows * -(-run.prompt_tokens // page_size) - freed


def comparison_table(runs: Sequence[Run], pool_bytes: int, rows: int, page_size: int) -> Table:
    """The servers side by side.

    Args:
        runs: the first one is the reference.
        pool_bytes: KV memory of each server.
        rows: layers x KV heads of the model.
        page_size: tokens of one KV head in a page.
    """
    mib = pool_bytes / 2**20
    table = Table(
        title=f"The same {runs[0].requests} requests in the same {mib:.0f} MiB of KV memory",
        caption=f"a page: {page_size} tokens of one KV head (stock's blocks counted in pages); memory: at the peak; "
        "seconds: the median of rounds in turns",
    )
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    table.add_column("", justify="right")

    def row(label: str, values: Sequence[float], form: str, ratio: bool = True) -> None:
        first, last = values[0], values[-1]
        change = f"{last / first:.1f}x" if ratio and first else ""
        table.add_row(label, *(form.format(value) for value in values), change)

    pages = [pages_of_prompt(run, rows, page_size) for run in runs]
    row("pages per prompt, after reading it", pages, "{:,.0f}")
    held = [run.peak.kv_usage * mib / max(run.peak.running, 1) for run in runs]
    row("KV memory per running request, MiB", held, "{:.1f}")
    row("most requests running at once", [run.peak.running for run in runs], "{:.0f}")
    row("most KV memory in use", [100 * run.peak_usage for run in runs], "{:.0f} %", ratio=False)
    row("preemptions in all rounds", [run.final.preemptions for run in runs], "{:.0f}", ratio=False)
    row("seconds until all were answered", [run.seconds for run in runs], "{:.1f}")
    row("output tokens per second", [run.speed for run in runs], "{:.1f}")
    return table
