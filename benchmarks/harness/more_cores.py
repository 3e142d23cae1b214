"""What more cores would make of an engine step, by Amdahl's law from the parts of a step on one thread."""

from collections.abc import Iterable, Mapping

from rich.table import Table

CORES = (1, 2, 4, 8, 16)
DIVIDED = (
    *("attention", "model without attention"),
    *("eviction: scoring", "eviction: selection", "eviction: compaction"),
)
"""Parts that OpenMP threads divide among themselves; Python and what it waits for is not divided."""


def on_cores(milliseconds: Mapping[str, float], cores: int) -> float:
    """The time of a step on so many cores, in milliseconds.

    An upper bound of what cores bring: memory that all cores share sets another bound, which this does not know.

    Args:
        milliseconds: of each part, on one thread.
        cores: that compute.
    """
    return sum(time / cores if part in DIVIDED else time for part, time in milliseconds.items())


def cores_table(title: str, steps: Iterable[tuple[str, Mapping[str, float]]]) -> Table:
    """The times of steps by their names, a row for each number of cores."""
    steps = list(steps)
    table = Table(title=title)
    table.add_column("cores", justify="right")
    for name, _ in steps:
        table.add_column(name, justify="right")
    for cores in CORES:
        table.add_row(str(cores), *(f"{on_cores(parts, cores):.2f}" for _, parts in steps))
    return table
