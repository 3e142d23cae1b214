"""What ``micro``, ``gpu`` and ``kvpress`` share: options, sides in turns, cells of two sides, and the record."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.harness.measure import (
    RESULTS,
    Estimate,
    Times,
    estimate,
    paired_ratio,
    record,
    record_name,
    save,
    warn_if_busy,
)
from benchmarks.harness.options import Option, add, add_dtype
from benchmarks.harness.plots import Panel, plot
from benchmarks.harness.scenarios import Target, show_targets
from benchmarks.harness.tables import table

WIDTH = 160
T = TypeVar("T")


@dataclass
class Found:
    """What was measured.

    Attributes:
        results: for the record, besides the settings.
        tables: to print.
        panels: to draw.
        targets: to judge.
        notes: sentences to print.
        card: the GPU, for the record.
    """

    results: dict[str, Any]
    tables: Sequence[Table]
    panels: Sequence[Panel] = ()
    targets: Sequence[Target] = ()
    notes: Sequence[str] = ()
    card: dict[str, Any] | None = None


@dataclass
class Cell:
    """Two sides at one size.

    Attributes:
        of: the size, by its names in the record.
        pairs: wall and CPU seconds of both sides, by round.
        over: which of a pair is divided by which.
    """

    of: dict[str, Any]
    pairs: list[tuple[Times, Times]]
    over: tuple[int, int] = (0, 1)

    def ratio(self, what: int = 0) -> Estimate:
        """One side over the other: 0 wall seconds, 1 CPU seconds."""
        one, other = self.over
        return paired_ratio(
            [pair[one][what] for pair in self.pairs], [pair[other][what] for pair in self.pairs]
        )

    def summary(self) -> dict[str, Any]:
        """For the record."""
        return {**self.of, "pairs": self.pairs, "wall": asdict(self.ratio(0)), "cpu": asdict(self.ratio(1))}


def compared(title: str, cells: Sequence[Cell], sides: Sequence[str]) -> Table:
    """A row for each cell: its size, the milliseconds of both sides, and their ratios."""
    columns = [f"{side}, ms" for side in sides] + ["wall ratio", "CPU ratio"]
    shown = table(f"{title}: medians [95 %]", [*cells[0].of], columns)
    for cell in cells:
        ms = (estimate([1e3 * wall for wall, _ in side]) for side in zip(*cell.pairs, strict=True))
        shown.add_row(*map(str, (*cell.of.values(), *ms, cell.ratio(0), cell.ratio(1))))
    return shown


def in_turns(sides: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1) -> dict[str, list[T]]:
    """What the sides return when each is called once a round, every other round from the last to the first.

    Args:
        warm_up: first rounds, which do not count.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(warm_up + rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            value = sides[name]()
            if number >= warm_up:
                found[name].append(value)
    return found


def parse(name: str, module: Any, argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line of a name.

    Args:
        module: has OPTIONS; and may have COMMAND, where it is none of ``micro``, HAS_DTYPE = False, and ``refuse``,
            which says what is wrong with the arguments and may fill in what depends on others.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{getattr(module, 'COMMAND', f'micro {name}')}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options: Sequence[Option] = module.OPTIONS
    add(parser, *options)
    if getattr(module, "HAS_DTYPE", True):
        add_dtype(parser)
    arguments = parser.parse_args(argv)
    threads, cores = getattr(arguments, "threads", 1), len(os.sched_getaffinity(0))
    if isinstance(threads, int) and threads > cores:
        parser.error(f"--threads must be at most {cores}, the number of cores")
    if hasattr(module, "refuse") and (wrong := module.refuse(arguments)):
        parser.error(wrong)
    return arguments


def run(name: str, module: Any, argv: Sequence[str] | None = None) -> int:
    """Measure one name, print it, draw it and save it; the exit code."""
    arguments, console = parse(name, module, argv), Console(width=WIDTH)
    load = warn_if_busy(console)
    found: Found = module.measure(arguments)
    for shown in (*found.tables, *found.notes):
        console.print(shown)
    settings = {key: getattr(value, "name", value) for key, value in vars(arguments).items()}
    judged = {"targets": show_targets(console, found.targets)}
    content = {"settings": settings, "load_average_at_start": load, **found.results, **judged}
    own = record_name(name, arguments.dtype) if hasattr(arguments, "dtype") else name
    about = {"card": found.card} if found.card else {}
    written = [save(own, record(getattr(module, "COMMAND", "micro"), content) | about)]
    if found.panels:
        written.append(plot(RESULTS / f"{own}.png", found.panels))
    console.print(f"written to {' and '.join(map(str, written))}", highlight=False)
    return 0
