"""Decode attention over part of the KV compared with all of it.

The project's own cache and batch layout, 8 layers of 8 query and 4 KV heads of 64, no engine.
One side holds the whole context and attends with vLLM's op. The others hold, in every layer and head, a random number
of entries whose mean is the given share; one attends with vLLM's op, one with our kernel, one with our kernel over
entries in 8 bits, and quantises the new ones. All sides decode in turn.
"""

import argparse
from collections.abc import Sequence

import torch
from rich.progress import track
from vllm.platforms import current_platform

from benchmarks.harness.measure import USUAL, kind, paired_ratio, timed
from benchmarks.harness.options import positive, whole
from benchmarks.harness.plots import Panel
from benchmarks.harness.scenarios import Target
from benchmarks.micro.holding import EIGHT_BITS, KERNEL, OP, Holding
from benchmarks.micro.loop import Cell, Found, compared, in_turns

OPTIONS = (
    ("batch", whole, 8, "requests"),
    ("pairs", whole, 9, "runs of each side"),
    ("contexts", whole, [2048, 4096, 8192, 16384], "tokens of each request"),
    ("shares", positive, [0.1, 0.2, 0.4, 1.0], "shares of the KV held"),
)

WAYS = (OP, KERNEL, EIGHT_BITS)
BOUNDS = {USUAL: 1.5, ("amx", "bfloat16"): 1.5, ("avx2", "bfloat16"): 0.95, ("avx2", "float32"): 1.4}
"""What our kernel's time should be over that with 8 bits."""


def refuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    return "--shares must be in (0, 1]" if max(arguments.shares) > 1 else None


def compare(batch: int, context: int, share: float, pairs: int, dtype: str) -> list[Cell]:
    """All KV with vLLM's op beside a share in all other ways, in turns."""
    sides = {"all": Holding(batch, context, 1.0, OP, 0, dtype)}
    sides |= {way: Holding(batch, context, share, way, 1, dtype) for way in WAYS}
    repeats = max(1, 65536 // context)
    calls = {name: lambda side=side: timed(side.decode, repeats) for name, side in sides.items()}
    times = in_turns(calls, pairs)
    return [
        Cell(
            {"context": context, "share": share, "attention": way},
            [*zip(times["all"], times[way], strict=True)],
        )
        for way in WAYS
    ]


def targets(cells: Sequence[Cell], dtype: str) -> list[Target]:
    """What 8 bits should reach, in the worst of all sizes."""
    times = [[mine[0] for _, mine in cell.pairs] for cell in cells]
    ratios = map(paired_ratio, times[1 :: len(WAYS)], times[2 :: len(WAYS)])
    worst, bound = min(ratios, key=lambda ratio: ratio.low), BOUNDS.get(kind(dtype))
    return [Target(f"{KERNEL}'s time over that with 8 bits, the worst", worst, bound)] if bound else []


def measure(arguments: argparse.Namespace) -> Found:
    """Every context and share."""
    current_platform.import_kernels()
    sizes = [(context, share) for context in arguments.contexts for share in arguments.shares]
    cells = [
        cell
        for context, share in track(sizes, "cells")
        for cell in compare(arguments.batch, context, share, arguments.pairs, arguments.dtype)
    ]
    title = f"decode attention, {arguments.batch} requests, {' '.join(kind(arguments.dtype))}"
    shown = compared(title, cells, (f"all KV with {OP}", "a share"))
    lines: dict[str, list] = {}
    for cell in cells:
        points = lines.setdefault(f"{cell.of['share']:.0%} of the KV, {cell.of['attention']}", [])
        points.append((str(cell.of["context"]), cell.ratio()))
    results = {"threads": torch.get_num_threads(), "cells": [cell.summary() for cell in cells]}
    panel = Panel("context, tokens", f"speed-up over all KV with {OP}", lines, 1)
    return Found(results, [shown], [panel], targets(cells, arguments.dtype))
