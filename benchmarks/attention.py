"""Decode attention over part of the KV compared with all of it: ``python -m benchmarks.attention``.

The project's own cache and batch layout, 8 layers of 8 query and 4 KV heads of 64, no engine.
One side holds the whole context and attends with vLLM's op. The others hold, in every layer and head, a random number
of entries whose mean is the given share; one attends with vLLM's op, one with our kernel. All sides decode in turn.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from vllm.platforms import current_platform

from benchmarks.harness.holding import KERNEL, OP, Holding
from benchmarks.harness.measure import (
    RESULTS,
    USUAL,
    Estimate,
    Times,
    estimate,
    full_name,
    kind,
    paired_ratio,
    record,
    save,
    timed,
)
from benchmarks.harness.options import add_counts, add_dtype, positive, whole
from benchmarks.harness.scenarios import Target, show_targets

BATCH, TARGET_CONTEXT = 8, 8192
TARGETS = {
    USUAL: {0.2: 8.5, 1.0: 1.7},
    ("avx2", "bfloat16"): {0.2: 6.0, 1.0: 1.2},
    ("avx2", "float32"): {0.2: 5.0, 1.0: 1.2},
}
"""How much faster our kernel should be than vLLM's op over all KV: by level and dtype, by share of the KV held.

The low end of the interval counts, at the sizes above.
"""


@dataclass
class Cell:
    """One way to attend to a share of one context's KV.

    Attributes:
        context: tokens of each request.
        share: of the KV held.
        attention: OP or KERNEL.
        pairs: times of all KV with OP, and of this, in each round.
    """

    context: int
    share: float
    attention: str
    pairs: list[tuple[Times, Times]]

    def ratio(self, what: int) -> Estimate:
        """Speed-up: 0 wall seconds, 1 CPU seconds."""
        return paired_ratio([whole[what] for whole, _ in self.pairs], [part[what] for _, part in self.pairs])

    @property
    def whole_ms(self) -> float:
        """Wall milliseconds of a step over all KV."""
        return estimate([whole[0] * 1e3 for whole, _ in self.pairs]).median

    def summary(self) -> dict[str, Any]:
        """For the record."""
        return {**asdict(self), "wall": asdict(self.ratio(0)), "cpu": asdict(self.ratio(1))}


def compare(batch: int, context: int, share: float, pairs: int, dtype: str) -> list[Cell]:
    """All KV with vLLM's op beside a share with OP and with KERNEL, in turns."""
    ways = (OP, KERNEL)
    sides = {
        "all": Holding(batch, context, 1.0, OP, 0, dtype),
        **{attention: Holding(batch, context, share, attention, 1, dtype) for attention in ways},
    }
    repeats = max(1, 65536 // context)
    for side in sides.values():
        timed(side.decode, repeats)
    raw: dict[str, list[Times]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in list(sides)[:: 1 if pair % 2 == 0 else -1]:
            raw[name].append(timed(sides[name].decode, repeats))
    return [Cell(context, share, way, list(zip(raw["all"], raw[way], strict=True))) for way in ways]


def targets(arguments: argparse.Namespace, cells: Sequence[Cell]) -> list[Target]:
    """What our kernel should reach on this processor, in this dtype and at the default sizes."""
    bounds = TARGETS.get(kind(arguments.dtype), {}) if arguments.batch == BATCH else {}
    return [
        Target(
            f"decode attention of {BATCH} x {cell.context}, {cell.share:.0%} of the KV, {KERNEL} over all KV with {OP}",
            cell.ratio(0),
            bounds[cell.share],
        )
        for cell in cells
        if (cell.context, cell.attention) == (TARGET_CONTEXT, KERNEL) and cell.share in bounds
    ]


def show(arguments: argparse.Namespace, cells: Sequence[Cell]) -> Table:
    """The results as a table."""
    title = f"decode attention, {arguments.batch} requests, {' '.join(kind(arguments.dtype))}"
    table = Table(title=f"{title}: speed-up over all KV with {OP}")
    for column in ("context", "share", "attention", "wall [95 %]", "CPU [95 %]", "ms per step, all KV"):
        table.add_column(column, no_wrap=True, justify="right")
    for cell in cells:
        ratios = (str(cell.ratio(what)) for what in (0, 1))
        table.add_row(str(cell.context), f"{cell.share:g}", cell.attention, *ratios, f"{cell.whole_ms:.1f}")
    return table


def plot(cells: Sequence[Cell], name: str) -> str:
    """Speed-up over context, one line per share, in a file of this name."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for share, attention in sorted({(cell.share, cell.attention) for cell in cells}):
        line = sorted(
            (cell.context, cell.ratio(0).median)
            for cell in cells
            if (cell.share, cell.attention) == (share, attention)
        )
        style = "o-" if attention == KERNEL else "o--"
        axes.plot(*zip(*line, strict=True), style, label=f"{share:.0%} of the KV, {attention}")
    axes.set(xscale="log", xlabel="context, tokens", ylabel=f"speed-up over all KV with {OP}")
    axes.set_xticks(contexts := sorted({cell.context for cell in cells}), [str(c) for c in contexts])
    axes.minorticks_off()
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.legend()
    figure.tight_layout()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_counts(parser, ("batch", BATCH, "requests"), ("pairs", 9, "runs of each side"))
    for name, kind_of, default, text in (
        ("contexts", whole, [2048, 4096, TARGET_CONTEXT, 16384], "tokens of each request"),
        ("shares", positive, [0.1, 0.2, 0.4, 1.0], "shares of the KV held"),
    ):
        about = f"{text} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=kind_of, nargs="+", default=default, metavar="X", help=about)
    add_dtype(parser)
    arguments = parser.parse_args(argv)
    if max(arguments.shares) > 1:
        parser.error("--shares must be in (0, 1]")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    current_platform.import_kernels()
    console = Console(width=110)
    sizes = [(context, share) for context in arguments.contexts for share in arguments.shares]
    cells = [
        cell
        for context, share in track(sizes, "cells")
        for cell in compare(arguments.batch, context, share, arguments.pairs, arguments.dtype)
    ]
    console.print(show(arguments, cells))
    content = {
        "batch": arguments.batch,
        "threads": torch.get_num_threads(),
        "dtype": arguments.dtype,
        "cells": [cell.summary() for cell in cells],
        "targets": show_targets(console, targets(arguments, cells)),
    }
    name = full_name("attention", arguments.dtype)
    print(f"written to {save(name, record('attention', content))} and {plot(cells, name)}")


if __name__ == "__main__":
    main()
