"""Policy parameters: name, default and accepted values, shared by every policy that has them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

ParamValue = int | float | str


@dataclass(frozen=True)
class Parameter:
    """One tunable of a policy.

    `convert` returns the canonical value, or None for a value that is not acceptable; `expects` says
    in words what is, and ends up in error messages and help texts.
    """

    name: str
    default: ParamValue
    expects: str
    convert: Callable[[object], ParamValue | None]

    def parse(self, value: object) -> ParamValue:
        """The canonical value. Raises ValueError naming the parameter and what it accepts."""
        result = self.convert(value)
        if result is None:
            raise ValueError(f"{self.name} must be {self.expects}, not {value!r}")
        return result


def to_int(value: object) -> int | None:
    """An integer, also if written as a float (JSON 1024.0); None for anything else, bool included."""
    if isinstance(value, bool):
        return None
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None


def to_float(value: object) -> float | None:
    """A finite number; None for anything else, bool included."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return float(value)


def integer(name: str, default: int, minimum: int, *, odd: bool = False) -> Parameter:
    """A parameter that takes (odd) integers from `minimum` upwards."""

    def convert(value: object) -> int | None:
        number = to_int(value)
        if number is None or number < minimum or (odd and number % 2 == 0):
            return None
        return number

    return Parameter(name, default, f"an {'odd ' if odd else ''}integer >= {minimum}", convert)


def unit_interval(name: str, default: float) -> Parameter:
    """A parameter that takes numbers in [0, 1]."""

    def convert(value: object) -> float | None:
        number = to_float(value)
        return number if number is not None and 0 <= number <= 1 else None

    return Parameter(name, default, "a number in [0, 1]", convert)


def choice(name: str, *values: str) -> Parameter:
    """A parameter that takes one of `values`; the first is the default."""

    def convert(value: object) -> str | None:
        return value if isinstance(value, str) and value in values else None

    return Parameter(name, values[0], f"one of {', '.join(values)}", convert)


WINDOW = integer("window", 32, 1)
KERNEL = integer("kernel", 7, 1, odd=True)
POOLING = choice("pooling", "max", "avg", "none")
GQA = choice("gqa", "mean", "max")
SINKS = integer("sinks", 4, 0)
BETA = integer("beta", 20, 1)
PYRAMID_ROUNDING = choice("pyramid_rounding", "exact", "official")
ALPHA = unit_interval("alpha", 0.2)
ADA_SAFEGUARD = choice("ada_safeguard", "interp", "paper", "guarantee")
