"""A step of pure decode at long context, stock vLLM compared with eviction.

Two engines, each in its own process, first read the same prompts at the same time. Then they decode in turns, a block
of steps each; timed steps compute no prompt tokens. The ratio is stock's time over ours.
"""

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

from rich.progress import track

from benchmarks.harness.measure import Times as Block
from benchmarks.harness.options import budget, policy_name, whole
from benchmarks.harness.plots import Panel
from benchmarks.harness.scenarios import BLOCK, model, token_bytes
from benchmarks.harness.sides import Engine, Side, Workload, running
from benchmarks.micro.engines import CHUNK, admit, drop, output_len, prefill
from benchmarks.micro.loop import Cell, Found, compared, in_turns

OPTIONS = (
    ("batch", whole, 16, "requests"),
    ("contexts", whole, [16384], "prompt tokens"),
    ("policy", policy_name, "ada-snapkv", "of ours"),
    ("budget", budget, 0.2, "--kv-budget"),
    ("pairs", whole, 9, "blocks of each side"),
    ("steps", whole, 8, "steps of a block"),
    ("threads", whole, len(os.sched_getaffinity(0)), "threads of each engine"),
)


def refuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    if min(arguments.contexts) < 256:
        return "--contexts must be at least 256: shorter prompts are kept whole"
    return f"--batch must be at most {CHUNK // 2}" if arguments.batch > CHUNK // 2 else None


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
    if (found := [(prompt, scheduled) for _, prompt, scheduled in seen]) != [(0, batch)] * steps:
        raise RuntimeError(
            f"{steps} steps of {batch} requests were to be pure decode; prompt tokens and requests: {found}"
        )


# What the parent does.


def make_sides(arguments: argparse.Namespace) -> tuple[Side, Side]:
    """Stock vLLM and eviction, in KV memory for all full requests."""
    longest = max(arguments.contexts)
    max_len = longest + output_len(arguments.batch, longest, 1 + (1 + arguments.pairs) * arguments.steps)
    blocks = arguments.batch * -(-max_len // BLOCK) + 1  # vLLM keeps one for itself
    path = model(max_len)
    settings: dict[str, Any] = {
        "max_model_len": max_len,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": arguments.batch,
        "kv_cache_memory_bytes": blocks * BLOCK * token_bytes(arguments.dtype),
        "dtype": arguments.dtype,
    }
    eviction = {"kv_eviction": arguments.policy, "kv_budget": arguments.budget}
    stock = Side("stock vLLM", path, arguments.threads, **settings)
    name = f"{arguments.policy} {arguments.budget:g}"
    return stock, Side(name, path, arguments.threads, **settings, **eviction)


def measure_at(arguments: argparse.Namespace, context: int, sides: Sequence[Side]) -> Cell:
    """Prompts first, on all sides at the same time, then blocks of decode steps in turns."""
    pairs, steps, batch = arguments.pairs, arguments.steps, arguments.batch
    workload = Workload(batch, context, output_len(batch, context, 1 + (1 + pairs) * steps), seed=context)
    for side in sides:
        side.call(admit, workload)
        side.send(prefill)
    for side in sides:
        side.receive()
    calls = {side.name: lambda side=side: side.call(decode, steps, batch) for side in sides}
    blocks = in_turns(calls, pairs)
    for side in sides:
        side.call(drop)
    return Cell({"context": context}, [*zip(*blocks.values(), strict=True)])


def measure(arguments: argparse.Namespace) -> Found:
    """Every context."""
    sides = make_sides(arguments)
    with running(*sides):
        cells = [measure_at(arguments, context, sides) for context in track(arguments.contexts, "contexts")]
    title = f"a decode step of {arguments.batch} requests in {arguments.dtype}, {arguments.threads} thread(s) a side"
    shown = compared(title, cells, [side.name for side in sides])
    line = [(cell.of["context"], cell.ratio()) for cell in cells]
    panel = Panel(
        "context of each request, tokens", f"{sides[0].name}'s time over ours", {sides[1].name: line}, 1
    )
    return Found({"cells": [cell.summary() for cell in cells]}, [shown], [panel])
