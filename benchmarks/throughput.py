"""Requests against ``vllm serve`` without and with eviction, in the same KV memory and in turns.

A scenario is one load with targets; a sweep varies one size of a load. The servers of a comparison get requests in
turns; while one is measured, the others are paused. Threads are where vLLM places them, as users get them.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness import quantised, reasoning, scenarios, speculation
from benchmarks.harness.baseline import installed
from benchmarks.harness.bench import measure
from benchmarks.harness.options import (
    LOAD,
    add_budgets,
    add_options,
    budget,
    changed,
    whole,
    with_budgets,
)
from benchmarks.harness.scenarios import Scenario
from benchmarks.harness.server import run_benchmark
from vllm_kvevict.policies.registry import decoding_policies

MODULES = (scenarios, reasoning, quantised, speculation)
SCENARIOS: dict[str, Scenario] = {name: one for of in MODULES for name, one in of.SCENARIOS.items()}
SWEEP_BASE = Scenario("one thing varied", *(12, 1024, 128), pool=3)


def ranks(value: str) -> dict[str, int]:
    """Tensor and pipeline ranks of TPxPP."""
    tensor, _, pipeline = value.partition("x")
    return {"tensor": whole(tensor), "pipeline": whole(pipeline)}


SWEEPS: dict[str, tuple[tuple[str, ...], Callable[[str], dict[str, Any]]]] = {
    "pool": (("2", "3", "4", "6", "9", "12"), lambda value: {"pool": whole(value)}),
    "budget": (("0.05", "0.1", "0.2", "0.4", "0.7", "1.0"), lambda value: {"budgets": (budget(value),)}),
    "context": (("256", "512", "1024", "2048", "4096"), lambda value: {"input_len": whole(value)}),
    "parallel": (("1x1", "2x1", "1x2", "2x2"), ranks),
}
"""What can be varied: full requests in the KV memory, budgets, prompt tokens, TPxPP. Each with its
values, and the fields of a scenario that a value sets."""


def make_parser() -> argparse.ArgumentParser:
    """Everything that the command line may hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description=__doc__,
        epilog=" ".join(f"{name}: {scenario.about}." for name, scenario in SCENARIOS.items()),
    )
    parser.add_argument("scenario", nargs="?", choices=SCENARIOS, help="default: pool-bound")
    add_budgets(parser)
    add_options(parser, LOAD, "by what is measured")
    parser.add_argument("--sweep", choices=SWEEPS, help="vary this instead of running a scenario")
    parser.add_argument("--values", nargs="+", metavar="V", help="values of the sweep (default: its own)")
    parser.add_argument(
        "--baseline",
        type=installed,
        metavar="ENV",
        help="Python environment with another version of this package, such as the .venv of another checkout: it "
        "serves each budget of a scenario once more, in turns with the others; this environment itself is a control",
    )
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, dict[str, Scenario]]:
    """Read the command line.

    Returns:
        The options, and what to run: the scenario by its name, or those of a sweep by their values.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.sweep:
        return arguments, swept(parser, arguments)
    if arguments.values:
        parser.error("--values belong to --sweep")
    name = arguments.scenario = arguments.scenario or "pool-bound"
    scenario = with_budgets(arguments, changed(arguments, SCENARIOS[name], LOAD))
    scenario = replace(scenario, baseline=arguments.baseline)
    if isinstance(scenario, reasoning.LongAnswers) and scenario.policy not in decoding_policies():
        parser.error(f"--policy must evict answers: one of {', '.join(decoding_policies())}")
    if arguments.baseline and isinstance(scenario, quantised.Quantised | speculation.Copying):
        parser.error("--baseline belongs to other scenarios")
    return arguments, {name: scenario}


def swept(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> dict[str, Scenario]:
    """The scenarios of a sweep by their values."""
    what = arguments.sweep
    if arguments.baseline:
        parser.error("--baseline belongs to a scenario, not to --sweep")
    if arguments.scenario:
        parser.error("--sweep has a load of its own: leave the scenario out")
    values, fields_of = SWEEPS[what]
    if any(getattr(arguments, field, None) is not None for field in fields_of(values[0])):
        parser.error(f"--sweep {what} sets that itself: give --values")
    base = with_budgets(arguments, changed(arguments, SWEEP_BASE, LOAD))
    found = {}
    for value in arguments.values or values:
        try:
            found[value] = replace(base, **fields_of(value))
        except (ValueError, argparse.ArgumentTypeError) as error:
            parser.error(f"--values {value}: {error}")
    return found


def main() -> int:
    """Run one scenario or sweep; the exit code."""
    arguments, chosen = parse_arguments()
    return run_benchmark(measure("throughput", arguments, chosen, SCENARIOS, arguments.sweep))


if __name__ == "__main__":
    sys.exit(main())
