"""Prompts and decode steps with entries in 8 bits beside the model's dtype, where everything fits.

Two engines that evict, each in a process of its own, serve the same requests in turns. The ratio is the time in the
model's dtype over that in 8 bits: of the steps that read prompts, and of those that only decode.
"""

import argparse
from collections.abc import Sequence

from rich.progress import track

from benchmarks.harness.load import INT8
from benchmarks.harness.measure import paired_ratio
from benchmarks.harness.options import whole
from benchmarks.harness.scenarios import BLOCK, Target, model, token_bytes
from benchmarks.harness.sides import Outcome, Side, Workload, running
from benchmarks.micro.engines import CHUNK
from benchmarks.micro.loop import Found

OPTIONS = (
    ("batch", whole, 8, "requests"),
    ("context", whole, 2048, "tokens of each prompt"),
    ("output", whole, 128, "tokens of each answer"),
    ("rounds", whole, 7, "runs of each engine"),
    ("threads", whole, 1, "of each engine"),
)
BOUNDS = {"prefill_seconds": 0.95, "decode_seconds": 1.0}
"""What the ratio should be, by kind of steps."""


def make_side(arguments: argparse.Namespace, kv_dtype: str) -> Side:
    """An engine with room for all requests, whole."""
    longest = arguments.context + arguments.output
    return Side(
        f"quantised {kv_dtype}",
        model(longest),
        arguments.threads,
        dtype=arguments.dtype,
        kv_cache_dtype=kv_dtype,
        max_model_len=longest,
        max_num_batched_tokens=CHUNK,
        kv_cache_memory_bytes=(1 + arguments.batch) * (longest + BLOCK) * token_bytes(arguments.dtype),
        kv_eviction="ada-snapkv",
        kv_budget=0.2,
    )


def measure(arguments: argparse.Namespace) -> Found:
    """Both engines in turns, on other prompts in each round; the first round does not count."""
    sizes = arguments.batch, arguments.context, arguments.output
    sides = [make_side(arguments, kv_dtype) for kv_dtype in ("auto", INT8)]
    runs: list[list[Outcome]] = [[], []]
    with running(*sides):
        for number in track(range(arguments.rounds + 1), "rounds"):
            for side, of in [*zip(sides, runs, strict=True)][:: 1 if number % 2 else -1]:
                of.append(side.run(Workload(*sizes, seed=number)))
    return summary([of[1:] for of in runs])


def summary(runs: Sequence[Sequence[Outcome]]) -> Found:
    """What was found for both kinds of steps, from the runs in the model's dtype and those in 8 bits."""
    seconds = {kind: [[getattr(run, kind) for run in of] for of in runs] for kind in BOUNDS}
    targets = [
        Target(f"{kind} in the model's dtype, over those in 8 bits", paired_ratio(*seconds[kind]), bound)
        for kind, bound in BOUNDS.items()
    ]
    return Found({"seconds": seconds}, [], targets=targets)
