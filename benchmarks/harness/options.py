"""Command line options that the serving benchmarks share."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from benchmarks.harness.load import NUMBER_BYTES
from benchmarks.harness.scenarios import Scenario
from benchmarks.harness.server import Server
from vllm_kvevict.kernels import processor
from vllm_kvevict.policies import available

S = TypeVar("S")


def whole(text: str) -> int:
    """A positive integer of the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def positive(text: str) -> float:
    """A positive, finite number of the command line."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def budget(text: str) -> float:
    """A budget of the command line, by the rule of ``--kv-budget``."""
    value = positive(text)
    if value > 1 and not value.is_integer():
        raise argparse.ArgumentTypeError(f"must be in (0, 1], or a whole number above 1, got {text}")
    return value


def policy_name(text: str) -> str:
    """A policy of the command line that evicts, or the one that does not."""
    if text not in available():
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(available())}, got {text}")
    return text


Option = tuple[str, Callable[[str], Any], Any, str]
"""Name, type, default and help; one whose default is a list takes several values."""


def add(parser: argparse._ActionsContainer, *options: Option) -> None:
    """Options that take values."""
    for name, kind, default, text in options:
        about = text if default is None else f"{text} (default: %(default)s)"
        many: Any = {"nargs": "+"} if isinstance(default, list) else {}
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="X", help=about, **many)


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """The option that says what a CPU benchmark computes in."""
    parser.add_argument(
        "--dtype",
        choices=list(NUMBER_BYTES),
        default=processor.fast_dtype(),
        help="type of weights, activations and KV (default: what this processor computes fast, here %(default)s)",
    )


class _Patience(argparse.Action):
    """Tells every server of this process how long it may take to start."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        Server.patience = values
        setattr(namespace, self.dest, values)


def add_start_patience(parser: argparse._ActionsContainer) -> None:
    """The option of every benchmark that starts servers."""
    parser.add_argument(
        "--start-patience",
        type=positive,
        default=Server.patience,
        action=_Patience,
        metavar="S",
        help="seconds that a server may take to start (default: %(default)g)",
    )


Fields = Mapping[str, tuple[Callable[[str], Any], str]]
"""What of a scenario can be changed by options: type and help of each field."""

LOAD: Fields = {
    "policy": (policy_name, "of the sides with eviction"),
    "requests": (whole, "requests of each run"),
    "input_len": (whole, "tokens of each prompt"),
    "output_len": (whole, "tokens of each answer"),
    "pool": (whole, "requests that the KV memory holds without eviction"),
    "rounds": (whole, "runs of each side"),
}


def add_options(parser: argparse.ArgumentParser, fields: Fields, name: str) -> None:
    """Options that change a scenario's fields, and those of every benchmark that starts servers.

    Args:
        name: what records are called by default.
    """
    for field, (kind, text) in fields.items():
        flag = f"--{field.replace('_', '-')}"
        parser.add_argument(flag, type=kind, metavar="X", help=f"{text} (default: the scenario's)")
    add_dtype(parser)
    add_start_patience(parser)
    about = "OpenMP threads of each rank (default: as vLLM places them)"
    parser.add_argument("--threads", type=whole, metavar="N", help=about)
    parser.add_argument("--name", help=f"of the file in benchmarks/results/ (default: {name})")


def changed(arguments: argparse.Namespace, base: S, fields: Fields) -> S:
    """The scenario with the options that were given."""
    given = {name: getattr(arguments, name) for name in (*fields, "dtype")}
    return replace(base, **{name: value for name, value in given.items() if value is not None})  # type: ignore[type-var]


def add_budgets(parser: argparse.ArgumentParser) -> None:
    """The budgets and lookaheads of a scenario, a side for each two of them."""
    about = "budgets to compare (default: the scenario's)"
    parser.add_argument("--budget", type=budget, nargs="+", metavar="X", dest="budgets", help=about)
    about = "tokens of each answer that are written before its prompt is evicted, to compare (default: 0)"
    parser.add_argument("--lookahead", type=int, nargs="+", metavar="N", dest="lookaheads", help=about)


def with_budgets(arguments: argparse.Namespace, scenario: Scenario) -> Scenario:
    """The scenario with the budgets and lookaheads that were given."""
    budgets, lookaheads = arguments.budgets or scenario.budgets, arguments.lookaheads or scenario.lookaheads
    return replace(
        scenario, budgets=tuple(dict.fromkeys(budgets)), lookaheads=tuple(dict.fromkeys(lookaheads))
    )
