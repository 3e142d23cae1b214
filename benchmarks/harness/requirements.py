"""What a server must not do under any load, as figures with bounds."""

from dataclasses import asdict, dataclass
from typing import Any


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
