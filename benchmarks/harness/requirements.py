"""What a server must not do under any load, as figures with bounds, and what every soak counts for them."""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console


def tracebacks(log: str) -> int:
    """How many a server's log has, apart from those of bodies that FastAPI refuses.

    A server that offers to reset its cache logs these, though it answers them as any other does.
    """
    parts = log.split("Traceback (most recent call last)")[1:]
    return sum("JSONDecodeError" not in part and "RequestValidationError" not in part for part in parts)


@dataclass(frozen=True)
class Requirement:
    """A figure and the bound that it must not exceed, or must reach."""

    name: str
    value: float
    bound: float = 0
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def as_record(self) -> dict[str, Any]:
        """As the other benchmarks record their targets."""
        return asdict(self) | {"met": self.met}


class SoakRun:
    """One run of a load against a server, held against requirements.

    Args:
        arguments: of the soak.
        flags: of the server, but for its ranks.

    Attributes:
        ranks: of the server.
        tally: how often what became of a request of which kind.
        failures: details of the first requests that went wrong.
        server_errors: answers 5xx.
        requirements: known at the end.
    """

    def __init__(self, arguments: argparse.Namespace, flags: Sequence[str]):
        self.arguments = arguments
        tensor, stages = arguments.tensor_parallel_size, arguments.pipeline_parallel_size
        self.ranks: int = tensor * stages
        self.flags = [*flags, "--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(stages)]
        self.console = Console(width=110)
        self.tally: Counter[tuple[str, str]] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.server_errors = 0
        self.requirements: list[Requirement] = []

    @property
    def answered(self) -> int:
        return sum(self.tally.values())

    @property
    def passed(self) -> bool:
        return bool(self.requirements) and all(requirement.met for requirement in self.requirements)
