"""A table of runs: what every turn took and held."""

from collections.abc import Callable, Sequence
from statistics import median

from rich.table import Table

from benchmarks.harness.load import Run
from benchmarks.harness.scenarios import Round


def runs_table(title: str, rounds: Sequence[Round]) -> Table:
    """Medians of every turn over the rounds; counts from the least to the most."""
    table = Table(title=title)
    table.add_column("median of a run", no_wrap=True)
    for column in ("seconds", "CPU s", "tokens/s", "at once", "preempted", "KV MiB", "live MiB", "evicting"):
        table.add_column(column, justify="right")
    for turn in rounds[0]:
        runs = [one[turn] for one in rounds]
        table.add_row(
            turn,
            typical(runs, lambda run: run.wall, ".2f"),
            typical(runs, lambda run: run.cpu, ".2f"),
            typical(runs, lambda run: run.tokens_per_second, ".1f"),
            span([run.peak_running for run in runs]),
            span([run.preemptions for run in runs]),
            typical(runs, lambda run: run.physical_bytes / 2**20, ".1f"),
            "-" if _is_stock(runs) else typical(runs, lambda run: (run.logical_bytes or 0) / 2**20, ".1f"),
            "-" if _is_stock(runs) else typical(runs, lambda run: run.evict_share, ".1%"),
        )
    return table


def _is_stock(runs: Sequence[Run]) -> bool:
    """Whether the server knows nothing of eviction."""
    return runs[0].logical_bytes is None


def typical(runs: Sequence[Run], what: Callable[[Run], float], form: str) -> str:
    """The median of a figure."""
    return format(median(what(run) for run in runs), form)


def span(values: Sequence[int]) -> str:
    """From the least to the most."""
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"
