"""Tables: empty ones with headings, and medians of runs over the rounds."""

from collections.abc import Callable, Mapping, Sequence
from math import nan
from statistics import median
from typing import Any

from rich.table import Table

Columns = Mapping[str, tuple[Callable[[Any], float], str]]
"""By heading, the figure of a run, and the format of its median."""


def typical(title: str, sides: Mapping[str, Sequence[Any]], columns: Columns) -> Table:
    """A row for each side: medians of its runs; dashes where it has none, or where the figure is a NaN."""
    result = table(title, ["median of a run"], [*columns])
    for side, runs in sides.items():
        medians = ((median(map(figure, runs)) if runs else nan, form) for figure, form in columns.values())
        result.add_row(side, *(format(value, form) if value == value else "-" for value, form in medians))
    return result


def table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table with columns of words, then of figures."""
    result = Table(title=title)
    for columns, justify in ((left, "left"), (right, "right")):
        for column in columns:
            result.add_column(column, no_wrap=True, justify=justify)  # type: ignore[arg-type]
    return result
