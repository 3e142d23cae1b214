"""The least time that an operation can take on this machine: its bytes and its arithmetic at measured rates."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track

from benchmarks.harness.measure import Estimate, estimate, paired_ratio

READ_BYTES = 256 << 20
"""Read to measure the memory: well beyond any last-level cache that a core or two can fill."""
MATMUL_SIZE = 2048
"""Rows and columns of the matrices that are multiplied to measure the arithmetic."""


@dataclass(frozen=True)
class Rates:
    """What the machine does at best: bytes read from memory, and FLOPs of a matrix product, per second."""

    memory: float
    arithmetic: float


@dataclass(frozen=True)
class Work:
    """What an operation cannot avoid.

    Attributes:
        moved: bytes that it reads or writes, each once.
        flops: additions and multiplications.
    """

    moved: int
    flops: int = 0

    def floor(self, rates: Rates) -> float:
        """Seconds that it takes at least: moving and computing may overlap, so the longer of both."""
        return max(self.moved / rates.memory, self.flops / rates.arithmetic)

    def bound(self, rates: Rates) -> str:
        """Which of both is the longer one."""
        by_memory = self.moved / rates.memory >= self.flops / rates.arithmetic
        return "memory" if by_memory else "arithmetic"


class Machine:
    """Measures the rates with the threads that torch has been given.

    Args:
        dtype: of the matrices that are multiplied.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._buffer = torch.ones(READ_BYTES // 4)
        self._factors = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE).to(dtype)

    def measure(self) -> Rates:
        """Rates of this moment."""
        reading = seconds(self._buffer.sum)
        multiplying = seconds(lambda: torch.mm(*self._factors))
        return Rates(READ_BYTES / reading, 2 * MATMUL_SIZE**3 / multiplying)


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """Wall seconds of one call, over some repeats."""
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - started) / repeats


def nbytes(*tensors: torch.Tensor) -> int:
    """Bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)


@dataclass
class Operation:
    """Something to time.

    Attributes:
        name: how the table calls it.
        run: does it once.
        work: what it cannot avoid.
        prepare: called before each round, not timed.
        repeats: calls in a round.
    """

    name: str
    run: Callable[[], Any]
    work: Work
    prepare: Callable[[], Any] = lambda: None
    repeats: int = 1

    def seconds(self) -> float:
        """Seconds of one operation, from one round."""
        self.prepare()
        return seconds(self.run, self.repeats)


@dataclass
class Timing:
    """What the rounds of an operation showed.

    Attributes:
        name: of the operation.
        ms: median of the rounds.
        floor_ms: its floor.
        times_floor: how many times its floor it takes, round by round.
        bound: what the floor is made of.
        raw: milliseconds of each round.
    """

    name: str
    ms: Estimate
    floor_ms: float
    times_floor: Estimate
    bound: str
    raw: list[float]


def summarise(name: str, work: Work, times: Sequence[float], rates: Sequence[Rates]) -> Timing:
    """What an operation took.

    Args:
        times: seconds in each round.
        rates: of the machine in each round.
    """
    raw = [value * 1e3 for value in times]
    floors = [work.floor(rate) for rate in rates]
    typical = Rates(
        estimate([r.memory for r in rates]).median, estimate([r.arithmetic for r in rates]).median
    )
    return Timing(
        name,
        estimate(raw),
        estimate([value * 1e3 for value in floors]).median,
        paired_ratio(times, floors),
        work.bound(typical),
        raw,
    )


def measure(
    operations: Sequence[Operation], machine: Machine, rounds: int
) -> tuple[list[Timing], list[Rates]]:
    """Time the operations in turns, one round of each at a time; the first, uncounted round warms up."""
    times: list[list[float]] = [[] for _ in operations]
    rates: list[Rates] = []
    for number in track(range(rounds + 1), "rounds"):
        rate = machine.measure()
        taken = [operation.seconds() for operation in operations]
        if number:
            rates.append(rate)
            for series, value in zip(times, taken, strict=True):
                series.append(value)
    timings = [summarise(o.name, o.work, series, rates) for o, series in zip(operations, times, strict=True)]
    return timings, rates
