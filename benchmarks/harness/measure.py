"""What every measurement shares: intervals, the record of machine and versions, results on disk."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from vllm_kvevict import machine
from vllm_kvevict.kernels import processor

RESULTS = Path(__file__).parents[1] / "results"
SAMPLES = 10_000
Kind = tuple[str, str]
"""What figures are figures of: the processor's level and the dtype."""
USUAL: Kind = ("avx512", "bfloat16")
"""Records of this kind have plain names."""


Times = tuple[float, float]
"""Wall and CPU seconds."""


def timed(work: Callable[[], None], repeats: int) -> Times:
    """Wall and CPU seconds of one call, over some repeats."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - wall) / repeats, (time.process_time() - cpu) / repeats


@dataclass(frozen=True)
class Estimate:
    """A median and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """Three digits, without exponents."""
        median, low, high = (
            f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in (self.median, self.low, self.high)
        )
        return f"{median} [{low}, {high}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Median of the values, with the percentile interval of the medians of 10,000 resamples.

    Raises:
        ValueError: without values.
    """
    if not values:
        raise ValueError("an estimate needs at least one value")
    resampled = np.random.default_rng(0).choice(np.asarray(values), (SAMPLES, len(values)))
    low, high = np.percentile(np.median(resampled, axis=1), [2.5, 97.5])
    return Estimate(statistics.median(values), float(low), float(high))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Estimate of ours / theirs, pair by pair: what both sides of a pair suffered cancels."""
    return estimate([one / other for one, other in zip(ours, theirs, strict=True)])


def warn_if_busy(console: Console) -> float:
    """The load average; says so if others are working on this machine."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 0.5 * cores:
        console.print(
            f"The load average is {load:.1f} on {cores} cores: others are working here, so the results will be noisy.",
            style="yellow",
        )
    return load


def record(module: str, results: Any) -> dict[str, Any]:
    """The results with the command, machine, versions and date that made them."""
    command = ["python", "-m", f"benchmarks.{module}", *sys.argv[1:]]
    content = machine.record(command, results)
    if forced := os.environ.get(processor.ENVIRONMENT):
        content["command"] = f"{processor.ENVIRONMENT}={forced} {content['command']}"
    return content


def kind(dtype: str) -> Kind:
    """What is measured here in this dtype; targets hold for one kind each.

    On processors with AVX-512 that convert bfloat16 it is a dtype of its own: matrix products take four times as long.
    """
    level = processor.level()
    if (level, dtype) == USUAL and not processor.multiplies_bfloat16():
        return level, f"converted-{dtype}"
    return level, dtype


def full_name(name: str, dtype: str) -> str:
    """A record's name with its kind; other files are those of a processor whose level is a lower one than its own."""
    level, of = kind(dtype)
    return "-".join((name, level, *(["forced"] if os.environ.get(processor.ENVIRONMENT) else []), of))


def record_name(name: str, dtype: str) -> str:
    """A record's name: plain for the usual kind, so that records of other kinds lie beside it."""
    usual = kind(dtype) == USUAL and not os.environ.get(processor.ENVIRONMENT)
    return name if usual else full_name(name, dtype)


def save(name: str, content: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write a record as JSON, estimates in it as objects; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, default=asdict) + "\n")
    return path
