"""The least time that an operation can take on this machine: its bytes and its arithmetic at measured rates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mode
from typing import Any

import torch

from benchmarks.harness.measure import Estimate, estimate, paired_ratio, timed
from benchmarks.micro.loop import in_turns

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
        reading, _ = timed(self._read, 1)
        multiplying, _ = timed(self._multiply, 1)
        return Rates(READ_BYTES / reading, 2 * MATMUL_SIZE**3 / multiplying)

    def _read(self) -> None:
        self._buffer.sum()

    def _multiply(self) -> None:
        torch.mm(*self._factors)


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
        return timed(self.run, self.repeats)[0]


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
    floor_ms = estimate([value * 1e3 for value in floors]).median
    bound = mode(work.bound(rate) for rate in rates)
    return Timing(name, estimate(raw), floor_ms, paired_ratio(times, floors), bound, raw)


def measure(
    operations: Sequence[Operation], machine: Machine, rounds: int
) -> tuple[list[Timing], list[Rates]]:
    """Time the operations and the machine's rates in turns."""
    calls: dict[str, Callable[[], Any]] = {"rates": machine.measure}
    calls |= {operation.name: operation.seconds for operation in operations}
    times = in_turns(calls, rounds)
    rates = times.pop("rates")
    return [summarise(one.name, one.work, times[one.name], rates) for one in operations], rates
