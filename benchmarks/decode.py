"""A step of pure decode at long context, stock vLLM compared with eviction: ``python -m benchmarks.decode``.

Two engines, each in its own process, first read the same prompts at the same time. Then they decode in turns, a block
of steps each; timed steps compute no prompt tokens. The ratio is stock's time over ours.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.harness.measure import (
    RESULTS,
    USUAL,
    Estimate,
    estimate,
    kind,
    paired_ratio,
    record,
    record_name,
    save,
    warn_if_busy,
)
from benchmarks.harness.options import add_dtype, budget, whole
from benchmarks.harness.scenarios import BLOCK, LAYERS, Target, model, show_targets, token_bytes
from benchmarks.harness.sides import Engine, Side, Workload, running
from benchmarks.harness.steps import CHUNK, admit, drop, output_len, prefill
from vllm_kvevict.policies import available

BATCH, CONTEXT, BUDGET, POLICY = 16, 16384, 0.2, "ada-snapkv"
TARGETS = {USUAL: 3.5}
"""How much faster the low end of the interval should be, at the sizes above, by level and dtype."""
PIECE = 2.0
"""Seconds after which an engine that reads prompts says how far it is."""
WARM_UP = 2
"""Decode steps before the first block that counts."""

Block = tuple[float, float]
"""Wall and CPU seconds of one step, from one block of steps."""


# What the engines' processes do.


def decode(engine: Engine, steps: int, batch: int) -> Block:
    """Time some steps.

    Raises:
        RuntimeError: a step was not a decode step of the whole batch.
    """
    engine.probe.reset()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        engine.llm.llm_engine.step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    check_steps(engine.probe.steps, steps, batch)
    return wall / steps, cpu / steps


def check_steps(seen: Sequence[tuple[float, int, int]], steps: int, batch: int) -> None:
    """Raise RuntimeError unless these ``Outcome.steps`` are ``steps`` decode steps of ``batch`` requests."""
    for number, (_, prompt, scheduled) in enumerate(seen):
        if prompt or scheduled != batch:
            raise RuntimeError(
                f"timed step {number} had {scheduled} of {batch} requests and {prompt} prompt tokens, so it is "
                "not pure decode"
            )
    if len(seen) != steps:
        raise RuntimeError(f"{len(seen)} steps ran where {steps} were timed")


# What the parent does.


@dataclass
class Cell:
    """Decode of one batch at one context.

    Attributes:
        layers: of the model.
        context: prompt tokens of each request.
        stock, ours: seconds of a step in each block.
    """

    layers: int
    context: int
    stock: list[Block]
    ours: list[Block]

    def ratio(self, what: int) -> Estimate:
        """Stock over ours: 0 wall seconds, 1 CPU seconds."""
        return paired_ratio([block[what] for block in self.stock], [block[what] for block in self.ours])

    def milliseconds(self, side: str) -> Estimate:
        """Wall milliseconds of a step of ``stock`` or ``ours``."""
        return estimate([wall * 1e3 for wall, _ in getattr(self, side)])

    def summary(self) -> dict[str, Any]:
        """For the record."""
        return {
            **asdict(self),
            "stock_ms": asdict(self.milliseconds("stock")),
            "ours_ms": asdict(self.milliseconds("ours")),
            "wall_ratio": asdict(self.ratio(0)),
            "cpu_ratio": asdict(self.ratio(1)),
        }


def make_sides(arguments: argparse.Namespace, layers: int) -> tuple[Side, Side]:
    """Stock vLLM and eviction, in KV memory for all full requests."""
    longest = max(arguments.contexts)
    steps = WARM_UP + arguments.pairs * arguments.steps
    max_len = longest + output_len(arguments.batch, longest, steps)
    blocks = arguments.batch * -(-max_len // BLOCK) + 1  # vLLM keeps one for itself
    path = model(max_len, layers)
    settings: dict[str, Any] = {
        "max_model_len": max_len,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": arguments.batch,
        "kv_cache_memory_bytes": blocks * BLOCK * token_bytes(arguments.dtype, layers),
        "dtype": arguments.dtype,
    }
    stock = Side("stock vLLM", path, arguments.threads, **settings)
    name = f"{arguments.policy} {arguments.budget:g}"
    eviction = {"kv_eviction": arguments.policy, "kv_budget": arguments.budget}
    return stock, Side(name, path, arguments.threads, **settings, **eviction)


def measure(
    arguments: argparse.Namespace, layers: int, context: int, sides: Sequence[Side], bar: Progress
) -> Cell:
    """Prompts first, then blocks of decode steps in turns."""
    pairs, steps, batch = arguments.pairs, arguments.steps, arguments.batch
    workload = Workload(batch, context, output_len(batch, context, WARM_UP + pairs * steps), seed=context)
    reading = {
        side: bar.add_task(f"{side.name}: prompts of {context}", total=side.call(admit, workload))
        for side in sides
    }
    while not bar.finished:
        busy = [side for side in sides if not bar.tasks[reading[side]].finished]
        for side in busy:
            side.send(prefill, PIECE)
        for side in busy:
            bar.update(reading[side], completed=side.receive())
    for side in sides:
        side.call(decode, WARM_UP, batch)
    task = bar.add_task(f"decode at {context}, in turns", total=pairs)
    blocks: dict[Side, list[Block]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side in sides if pair % 2 == 0 else sides[::-1]:
            blocks[side].append(side.call(decode, steps, batch))
        bar.advance(task)
    for side in sides:
        side.call(drop)
    return Cell(layers, context, *blocks.values())


def targets(arguments: argparse.Namespace, cells: Sequence[Cell]) -> list[Target]:
    """What the cell of the default sizes should reach; none of the others has a target."""
    bound = TARGETS.get(kind(arguments.dtype))
    if bound is None or (arguments.batch, arguments.budget, arguments.policy) != (BATCH, BUDGET, POLICY):
        return []
    name = f"a decode step of {BATCH} x {CONTEXT}, stock's time over ours"
    return [
        Target(name, cell.ratio(0), bound)
        for cell in cells
        if (cell.layers, cell.context) == (LAYERS, CONTEXT)
    ]


def show(arguments: argparse.Namespace, cells: Sequence[Cell]) -> Table:
    """The results as a table."""
    name = f"{arguments.policy} {arguments.budget:g}"
    what = f"a decode step of {arguments.batch} requests in {arguments.dtype}"
    table = Table(title=f"{what}, {arguments.threads} thread(s) a side: medians [95 %]")
    for column in ("layers", "context", "stock ms", f"{name} ms", "wall ratio", "CPU ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for cell in cells:
        times = (str(cell.milliseconds(side)) for side in ("stock", "ours"))
        table.add_row(str(cell.layers), str(cell.context), *times, str(cell.ratio(0)), str(cell.ratio(1)))
    return table


def plot(arguments: argparse.Namespace, cells: Sequence[Cell]) -> str:
    """Milliseconds of a step over context, and stock's over ours."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    names = {"stock": "stock vLLM", "ours": f"{arguments.policy} {arguments.budget:g}"}
    for layers in dict.fromkeys(cell.layers for cell in cells):
        line = sorted((cell for cell in cells if cell.layers == layers), key=lambda cell: cell.context)
        contexts = [cell.context for cell in line]
        for side, name in names.items():
            times = [cell.milliseconds(side) for cell in line]
            left.errorbar(contexts, *_spans(times), marker="o", capsize=3, label=f"{name}, {layers} layers")
        ratios = [cell.ratio(0) for cell in line]
        right.errorbar(contexts, *_spans(ratios), marker="o", capsize=3, label=f"{layers} layers")
    left.set(ylabel="ms per step", ylim=(0, None))
    right.set(ylabel="stock's time over ours", ylim=(0, None))
    right.axhline(1, color="grey", linewidth=0.8)
    for axes in (left, right):
        axes.set(xlabel=f"context of each of {arguments.batch} requests, tokens")
        axes.legend()
    figure.tight_layout()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{record_name('decode', arguments.dtype)}.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)


def _spans(estimates: Sequence[Estimate]) -> tuple[list[float], list[list[float]]]:
    """Heights and error bars of some estimates."""
    below, above = [e.median - e.low for e in estimates], [e.high - e.median for e in estimates]
    return [e.median for e in estimates], [below, above]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--batch", type=whole, default=BATCH, metavar="N", help="requests (default: %(default)s)")
    add(
        "--contexts",
        type=whole,
        nargs="+",
        default=[CONTEXT],
        metavar="N",
        help="prompt tokens (default: %(default)s)",
    )
    add("--policy", choices=available(), default=POLICY, help="default: %(default)s")
    add("--budget", type=budget, default=BUDGET, metavar="X", help="--kv-budget (default: %(default)s)")
    add("--pairs", type=whole, default=9, metavar="N", help="blocks of each side (default: %(default)s)")
    add("--steps", type=whole, default=8, metavar="N", help="steps of a block (default: %(default)s)")
    cores = len(os.sched_getaffinity(0))
    add(
        "--threads",
        type=whole,
        default=cores,
        metavar="N",
        help="threads of each engine (default: all %(default)s cores)",
    )
    add("--model-layers", type=whole, nargs="+", default=[LAYERS], metavar="N", help="default: %(default)s")
    add_dtype(parser)
    arguments = parser.parse_args(argv)
    if min(arguments.contexts) < 256:
        parser.error("--contexts must be at least 256: shorter prompts are kept whole")
    if arguments.batch > CHUNK // 2:
        parser.error(f"--batch must be at most {CHUNK // 2}")
    return arguments


def main() -> int:
    """Measure all cells; the exit code."""
    arguments = parse_arguments()
    console = Console(width=120)
    load = warn_if_busy(console)
    cells = []
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    for layers in arguments.model_layers:
        sides = make_sides(arguments, layers)
        with contextlib.ExitStack() as stack:
            with console.status(f"starting two engines with {layers} layers"):
                stack.enter_context(running(*sides))
            for context in arguments.contexts:
                with Progress(*columns, console=console) as bar:
                    cells.append(measure(arguments, layers, context, sides, bar))
    console.print(show(arguments, cells))
    content = {
        "settings": vars(arguments),
        "load_average_at_start": load,
        "cells": [cell.summary() for cell in cells],
        "targets": show_targets(console, targets(arguments, cells)),
    }
    path = save(record_name("decode", arguments.dtype), record("decode", content))
    console.print(f"written to {path} and {plot(arguments, cells)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
