"""What all names of ``micro`` share: their options, sides in turns, cells of two sides, and the record."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.harness.measure import (
    RESULTS,
    Estimate,
    Times,
    paired_ratio,
    record,
    record_name,
    save,
    warn_if_busy,
)
from benchmarks.harness.options import Option, add, add_dtype
from benchmarks.harness.plots import Panel, plot

WIDTH = 140
T = TypeVar("T")


@dataclass
class Found:
    """What was measured.

    Attributes:
        results: for the record, besides the settings.
        tables: to print.
        panels: to draw.
    """

    results: dict[str, Any]
    tables: Sequence[Table]
    panels: Sequence[Panel] = field(default_factory=list)


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


def in_turns(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What the sides return when each is called once a round, every other round from the last to the first.

    A first round warms up and does not count.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            value = sides[name]()
            if number:
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


def run(name: str, module: Any, argv: Sequence[str] | None) -> int:
    """Measure one name, print it, draw it and save it; the exit code."""
    arguments, console = parse(name, module, argv), Console(width=WIDTH)
    load = warn_if_busy(console)
    found: Found = module.measure(arguments)
    for shown in found.tables:
        console.print(shown)
    settings = {key: getattr(value, "name", value) for key, value in vars(arguments).items()}
    content = {"settings": settings, "load_average_at_start": load, **found.results}
    own = record_name(name, arguments.dtype) if hasattr(arguments, "dtype") else name
    written = [save(own, record(getattr(module, "COMMAND", "micro"), content))]
    if found.panels:
        written.append(plot(RESULTS / f"{own}.png", found.panels))
    console.print(f"written to {' and '.join(map(str, written))}", highlight=False)
    return 0
