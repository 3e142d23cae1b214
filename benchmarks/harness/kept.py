"""The demo's tables: what evictions kept, and servers side by side."""

from collections.abc import Callable, Sequence
from statistics import median

from rich.table import Table
from rich.text import Text

from benchmarks.harness.load import Run
from benchmarks.harness.scenarios import Round
from benchmarks.harness.tables import table
from vllm_kvevict.schedules.reports import EvictionRecord


def kept_table(eviction: EvictionRecord) -> Table:
    """Entries kept by each layer and KV head of one request."""
    heads_of_layer = max((len(heads) for heads in eviction.heads), default=0)
    columns = ["layer", *(f"KV head {head}" for head in range(heads_of_layer)), "layer kept"]
    title = f"What one request kept of its {eviction.tokens:,} prompt tokens ({eviction.policy})"
    shown = table(title, [], columns)
    shown.caption = f"{eviction.kept:,} of {eviction.stored:,} entries; {eviction.freed_pages:,} pages freed"
    most = max((max(heads) for heads in eviction.heads), default=1)
    for layer, heads in enumerate(eviction.heads):
        share = sum(heads) / (eviction.tokens * len(heads))
        shown.add_row(str(layer), *(_cell(kept, most) for kept in heads), f"{share:.1%}")
    return shown


def _cell(kept: int, most: int) -> Text:
    """A count and a small bar, full at the largest count."""
    blocks = "▏▎▍▌▋▊▉█"
    eighths = round(kept / most * 32)
    bar = "█" * (eighths // 8) + (blocks[eighths % 8 - 1] if eighths % 8 else "")
    return Text.assemble(f"{kept:,} ", (f"{bar:<4}", "cyan"))


def comparison_table(title: str, rounds: Sequence[Round], pool_bytes: int) -> Table:
    """The sides next to each other, the first one as the reference: medians of their rounds.

    Args:
        pool_bytes: KV memory of each server.
    """
    shown = table(title, [""], [*rounds[0], ""])
    shown.caption = "memory: at the peak; seconds: the median of rounds in turns"

    def row(label: str, figure: Callable[[Run], float], form: str, ratio: bool = True) -> None:
        values = [median(figure(one[side]) for one in rounds) for side in rounds[0]]
        change = f"{values[-1] / values[0]:.1f}x" if ratio and values[0] else ""
        shown.add_row(label, *(form.format(value) for value in values), change)

    row(
        "KV memory per running request, MiB",
        lambda run: run.physical_bytes / 2**20 / max(1, run.peak_running),
        "{:.1f}",
    )
    row("most requests running at once", lambda run: run.peak_running, "{:.0f}")
    row("most KV memory in use", lambda run: 100 * run.physical_bytes / pool_bytes, "{:.0f} %", ratio=False)
    row("preemptions", lambda run: run.preemptions, "{:.0f}", ratio=False)
    row("evictions", lambda run: run.evictions, "{:.0f}", ratio=False)
    row("seconds until all were answered", lambda run: run.wall, "{:.1f}")
    row("output tokens per second", lambda run: run.tokens_per_second, "{:.1f}")
    return shown
