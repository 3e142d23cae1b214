"""Policy parameters: name, default and accepted values, shared by every policy that has them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real

ParamValue = int | float | str

DEFAULTS = ("measured", "paper")
"""Whose values parameters take that are not given: those that were measured to be better here, or the paper's."""

MILLION = 1_000_000
"""More than any request needs, and far from where numbers overflow."""


@dataclass(frozen=True)
class Parameter:
    """One tunable of a policy.

    `convert` returns the canonical value, or None for a value that is not acceptable; `expects` says
    in words what is, and ends up in error messages and help texts. `unless` are other parameters with values at which
    this one is not used: a configuration with one of them does not have it. `paper` is the paper's default, None where
    that is `default` too. `by_request` says whether a single request may set it, and `most_by_request` is the largest
    number that it may give, None where there is no limit: clients must not be able to make a server allocate or
    compute without end.
    """

    name: str
    default: ParamValue
    expects: str
    convert: Callable[[object], ParamValue | None]
    unless: tuple[tuple[str, ParamValue], ...] = ()
    paper: ParamValue | None = None
    by_request: bool = True
    most_by_request: int | None = None

    def default_of(self, defaults: str) -> ParamValue:
        """The default, "measured" or of the "paper"."""
        return self.paper if defaults == "paper" and self.paper is not None else self.default

    @property
    def setting(self) -> str:
        """NAME=DEFAULT, with the paper's default behind it where that is another one."""
        paper = "" if self.paper in (None, self.default) else f" (paper: {self.paper})"
        return f"{self.name}={self.default}{paper}"

    def parse(self, value: object) -> ParamValue:
        """The canonical value. Raises ValueError naming the parameter and what it accepts."""
        result = self.convert(value)
        if result is None:
            raise ValueError(f"{self.name} must be {self.expects}, not {value!r}")
        return result

    def parse_of_request(self, value: object) -> ParamValue:
        """The canonical value that one request gives. Raises ValueError as `parse`, and for what it may not set."""
        if not self.by_request:
            raise ValueError(f"{self.name} can be set for the server only")
        result, most = self.parse(value), self.most_by_request
        if most is not None and isinstance(result, int | float) and result > most:
            raise ValueError(f"{self.name} must be at most {most} in a request, not {result}")
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
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


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
    return _number(name, default, "in [0, 1]", lambda number: 0 <= number <= 1)


def real(name: str, default: float, *, positive: bool = False) -> Parameter:
    """A parameter that takes finite numbers >= 0, or > 0."""
    if positive:
        return _number(name, default, "> 0", lambda number: number > 0)
    return _number(name, default, ">= 0", lambda number: number >= 0)


def _number(name: str, default: float, which: str, accepts: Callable[[float], bool]) -> Parameter:
    def convert(value: object) -> float | None:
        number = to_float(value)
        return number if number is not None and accepts(number) else None

    return Parameter(name, default, f"a number {which}", convert)


def or_auto(parameter: Parameter) -> Parameter:
    """The same parameter, which also takes "auto", its default."""

    def convert(value: object) -> ParamValue | None:
        return "auto" if value == "auto" else parameter.convert(value)

    return replace(parameter, default="auto", expects=f"auto or {parameter.expects}", convert=convert)


def unless(parameter: Parameter, **values: ParamValue) -> Parameter:
    """The same parameter, which is not used where one of the named ones has the given value either."""
    return replace(parameter, unless=(*parameter.unless, *values.items()))


def measured(parameter: Parameter, default: ParamValue) -> Parameter:
    """The same parameter with a default that was measured to be better; the paper's stays."""
    return replace(parameter, default=parameter.parse(default), paper=parameter.default_of("paper"))


def server_only(parameter: Parameter) -> Parameter:
    """The same parameter, which no request may set."""
    return replace(parameter, by_request=False)


def limited(parameter: Parameter, most: int) -> Parameter:
    """The same parameter, of which a request may give no larger number."""
    return replace(parameter, most_by_request=most)


def kernel_width(default: int) -> Parameter:
    """The width of the pooling."""
    return limited(integer("kernel", default, 1, odd=True), 255)


def first_tokens(default: int) -> Parameter:
    """The number of first tokens that stay."""
    return limited(integer("sinks", default, 0), MILLION)


def check_some_stay(values: Mapping[str, ParamValue]) -> None:
    """Raise ValueError where a head could be left with nothing."""
    if values["sinks"] == values["window"] == 0:
        raise ValueError("sinks and window must not both be 0: every KV head must keep a token")


def choice(name: str, *values: str) -> Parameter:
    """A parameter that takes one of `values`; the first is the default."""

    def convert(value: object) -> str | None:
        return value if isinstance(value, str) and value in values else None

    return Parameter(name, values[0], f"one of {', '.join(values)}", convert)


WINDOW = integer("window", 32, 1)
OPTIONAL_WINDOW = integer("window", 32, 0)
"""For policies that do not score by the window's queries: 0 protects no last tokens."""
KERNEL = unless(kernel_width(7), pooling="decay")
POOLING = choice("pooling", "max", "avg", "none", "decay")
"""For scores that are not negative: "decay" takes part of them."""
COMBINED_ROWS = ("mean", "max", "recent")
ROWS = choice("rows", *COMBINED_ROWS)
GQA = choice("gqa", "mean", "max")
SINKS = first_tokens(4)
BETA = limited(integer("beta", 20, 1), MILLION)
ALPHA = unit_interval("alpha", 0.2)
ADA_SAFEGUARD = choice("ada_safeguard", "interp", "guarantee")

MEANINGS = {
    "window": "last tokens that always stay; their queries score the others (0 is allowed with h2o, knorm, keydiff, "
    "compactor, kvzip)",
    "kernel": "width of the pooling; not used with `pooling=decay`",
    "pooling": "combines neighbouring tokens: the maximum or average of `kernel` scores, or `decay`: a score also "
    "counts for the 31 tokens after it and the 7 before it, 0.95 times for each token of distance (the first token's "
    "only for itself); in kvzip for the window alone",
    "rows": "combines the window's queries, before `gqa` and `pooling`: mean, maximum, or `recent`: the maximum, where "
    "a query counts half for each 12 tokens that it lies further back",
    "gqa": "combines the query heads that share a KV head",
    "sinks": "first tokens that always stay (up to 64 per request with kvzip)",
    "beta": "the top layer gets 1/beta of the average budget; 1 is uniform",
    "alpha": "share of a head's budget that is fixed: with 0 heads compete for all, 1 is uniform",
    "ada_safeguard": "applies `alpha` as the authors' code, or as a minimum per head",
    "gamma": "weight of the variance against the mean",
    "tau1": "exponent of the layer's dispersion: 1/tau1",
    "tau2": "exponent of the layer's variance: 1/tau2",
    "h2o_norm": "`mean` divides by the number of queries that see a token",
    "skip_layers": "lowest layers that keep everything, on top of the budget",
    "first": "share of a head's budget that is filled by attention alone",
    "mass": "share of the attention that is protected",
    "leverage_chunk": "tokens whose keys are compared with one another",
    "blend": "weight of the keys' leverage against the attention among neighbours",
    "n_future": "positions after the prompt over which future queries are averaged",
    "epsilon": "added to the expected attention before multiplying by the value's norm",
    "mix": "weight of the attention against the redundancy",
    "threshold": "cosine above which two keys say the same",
    "take_chunk": "tokens of a chunk; each ends with an eviction",
    "take_probe": "last tokens of the prompt, which always stay; their queries guide every eviction",
    "take_guide": "whose queries choose: the prompt's last tokens, or each chunk's (for comparison)",
    "kvzip_chunk": "tokens that the model repeats at once",
    "kvzip_sees": "what the model sees while it repeats: all, or the first tokens and the chunk, which is cheaper",
    "take_alpha": "weight of the earlier chunks in the probe's averaged queries",
    "take_warmup_layers": "lowest layers, which keep what the last of them chooses; `auto` is half of all",
    "take_warmup_budget": "tokens per KV head there until the last chunk, if above the budget; `auto` is a quarter of "
    "the prompt, at most 10240",
}
"""What each parameter does, for tables and help texts."""
