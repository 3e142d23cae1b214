"""Decode attention over part of the KV compared with all of it.

The project's own cache and batch layout, 8 layers of 8 query and 4 KV heads of 64, no engine.
One side holds the whole context and attends with vLLM's op. The others hold, in every layer and head, a random number
of entries whose mean is the given share; one attends with vLLM's op, one with our kernel. All sides decode in turn.
"""

import argparse

import torch
from rich.progress import track
from vllm.platforms import current_platform

from benchmarks.harness.measure import kind, timed
from benchmarks.harness.options import positive, whole
from benchmarks.harness.plots import Panel
from benchmarks.micro.holding import KERNEL, OP, Holding
from benchmarks.micro.loop import Cell, Found, compared, in_turns

OPTIONS = (
    ("batch", whole, 8, "requests"),
    ("pairs", whole, 9, "runs of each side"),
    ("contexts", whole, [2048, 4096, 8192, 16384], "tokens of each request"),
    ("shares", positive, [0.1, 0.2, 0.4, 1.0], "shares of the KV held"),
)


def refuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    return "--shares must be in (0, 1]" if max(arguments.shares) > 1 else None


def compare(batch: int, context: int, share: float, pairs: int, dtype: str) -> list[Cell]:
    """All KV with vLLM's op beside a share with OP and with KERNEL, in turns."""
    sides = {"all": Holding(batch, context, 1.0, OP, 0, dtype)}
    sides |= {way: Holding(batch, context, share, way, 1, dtype) for way in (OP, KERNEL)}
    repeats = max(1, 65536 // context)
    calls = {name: lambda side=side: timed(side.decode, repeats) for name, side in sides.items()}
    times = in_turns(calls, pairs)
    return [
        Cell(
            {"context": context, "share": share, "attention": way},
            [*zip(times["all"], times[way], strict=True)],
        )
        for way in (OP, KERNEL)
    ]


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
    return Found(results, [shown], [panel])
