"""Command line options that the serving benchmarks share."""

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.harness.load import NUMBER_BYTES
from benchmarks.harness.scenarios import Scenario
from benchmarks.harness.server import Server
from vllm_kvevict.kernels import processor
from vllm_kvevict.policies import available


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


def share(text: str) -> float:
    """A number in [0, 1) of the command line."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text}")
    return value


def add_counts(parser: argparse.ArgumentParser, *counts: tuple[str, int, str]) -> None:
    """Options that are positive integers: name, default and help of each."""
    for name, default, text in counts:
        parser.add_argument(
            f"--{name}", type=whole, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )


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


AUTO = "auto"
"""Threads as vLLM places them, which is how users get them."""


def placement(text: str) -> int | None:
    """OpenMP threads of each rank, None: as vLLM places them."""
    return None if text == AUTO else whole(text)


def placement_name(threads: int | None) -> str:
    """For tables and records."""
    if threads is None:
        return "vLLM's own placement of threads"
    return f"{threads} bound thread{'s' * (threads > 1)}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that change a scenario, and those of every serving benchmark."""
    own = "default: the scenario's"
    parser.add_argument("--policy", choices=available(), help=own)
    parser.add_argument(
        "--budget", type=budget, nargs="+", metavar="X", dest="budgets", help=f"budgets to compare ({own})"
    )
    for name, kind, text in (
        ("requests", whole, "requests of each run"),
        ("input-len", whole, "tokens of each prompt"),
        ("output-len", whole, "tokens of each answer"),
        ("spread", share, "lengths vary uniformly by up to this share"),
        ("rate", positive, "requests per second, Poisson"),
        ("concurrency", whole, "most requests that the client has in flight"),
        ("pool", whole, "requests that the KV memory holds without eviction"),
        ("rounds", whole, "runs of each side"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=f"{text} ({own})")
    add_dtype(parser)
    add_start_patience(parser)
    parser.add_argument(
        "--threads",
        type=placement,
        metavar="N",
        help=f"OpenMP threads of each rank, or {AUTO}: as vLLM places them (default: {AUTO})",
    )
    parser.add_argument(
        "--name", help="name of the file in benchmarks/results/ (default: by what is measured)"
    )


def changed(arguments: argparse.Namespace, base: Scenario) -> Scenario:
    """The scenario with the options that were given."""
    names = (
        "policy",
        "budgets",
        "requests",
        "input_len",
        "output_len",
        "spread",
        "rate",
        "concurrency",
        "pool",
        "dtype",
    )
    given = {name: getattr(arguments, name) for name in (*names, "rounds")}
    changes = {name: value for name, value in given.items() if value is not None}
    if "budgets" in changes:
        changes["budgets"] = tuple(dict.fromkeys(changes["budgets"]))
    return replace(base, **changes)


def require_room(parser: argparse.ArgumentParser, scenario: Scenario) -> None:
    """End the program unless the KV memory holds the longest request, as vLLM demands."""
    if scenario.max_len > scenario.pool * (scenario.input_len + scenario.output_len):
        parser.error(
            f"--pool {scenario.pool} does not hold the longest request of --spread {scenario.spread:g}"
        )
