"""Requests against ``vllm serve`` without and with eviction, in the same KV memory and in turns.

A scenario is one load with targets; a sweep varies one size of a load. The servers of a comparison get requests in
turns; while one is measured, the others are paused. Threads are where vLLM places them, as users get them.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import reasoning, scenarios, speculation
from benchmarks.harness.baseline import installed
from benchmarks.harness.bench import WIDTH, Bench, as_record
from benchmarks.harness.command import is_judged
from benchmarks.harness.measure import record, record_name, save, warn_if_busy
from benchmarks.harness.options import (
    LOAD,
    add_budgets,
    add_options,
    budget,
    changed,
    placement_name,
    require_room,
    whole,
    with_budgets,
)
from benchmarks.harness.scenarios import KV_HEADS, LAYERS, Round, Scenario, ratios, show_targets
from benchmarks.harness.server import run_benchmark
from benchmarks.harness.tables import typical
from vllm_kvevict.policies.registry import decoding_policies

SCENARIOS: dict[str, Scenario] = {**scenarios.SCENARIOS, **reasoning.SCENARIOS, **speculation.SCENARIOS}
FIELDS = {
    **LOAD,
    "decode_budget": (whole, "reasoning: entries of an answer that each KV head keeps on average"),
    "decode_interval": (whole, "reasoning: tokens from one eviction of an answer to the next"),
    "every": (whole, "speculation: tokens between two mistakes in a prompt, on average"),
}
SWEEP_BASE = Scenario("one thing varied", *(12, 1024, 128), pool=3, rounds=3)


def ranks(value: str) -> dict[str, int]:
    """Tensor and pipeline ranks of TPxPP.

    Raises:
        ValueError: for a value that is something else, or that the model does not allow.
    """
    if not (found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", value)):
        raise ValueError("expected TPxPP, such as 2x1")
    tensor, pipeline = int(found[1]), int(found[2])
    if KV_HEADS % tensor or LAYERS % pipeline:
        raise ValueError(f"the model has {KV_HEADS} KV heads and {LAYERS} layers to divide")
    return {"tensor": tensor, "pipeline": pipeline}


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
    add_options(parser, FIELDS, "by what is measured")
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
    scenario = with_budgets(arguments, changed(parser, arguments, SCENARIOS[name], FIELDS))
    scenario = replace(scenario, baseline=arguments.baseline)
    if isinstance(scenario, reasoning.LongAnswers) and scenario.policy not in decoding_policies():
        parser.error(f"--policy must evict answers: one of {', '.join(decoding_policies())}")
    if arguments.baseline and name == "speculation-copy":
        parser.error("--baseline belongs to other scenarios")
    require_room(parser, scenario)
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
    base = with_budgets(arguments, changed(parser, arguments, SWEEP_BASE, FIELDS))
    found = {}
    for value in arguments.values or values:
        try:
            found[value] = replace(base, **fields_of(value))
        except (ValueError, argparse.ArgumentTypeError) as error:
            parser.error(f"--values {value}: {error}")
        require_room(parser, found[value])
    return found


def runs_table(title: str, rounds: Sequence[Round]) -> Table:
    """Medians of every turn over the rounds."""
    columns = {
        "seconds": (lambda run: run.wall, ".2f"),
        "CPU s": (lambda run: run.cpu, ".2f"),
        "tokens/s": (lambda run: run.tokens_per_second, ".1f"),
        "at once": (lambda run: run.peak_running, "g"),
        "preempted": (lambda run: run.preemptions, "g"),
        "KV MiB": (lambda run: run.physical_bytes / 2**20, ".1f"),
        "live MiB": (lambda run: nan if run.logical_bytes is None else run.logical_bytes / 2**20, ".1f"),
        "evicting": (lambda run: nan if run.logical_bytes is None else run.evict_share, ".1%"),
        "accepted": (lambda run: run.accepted, "g"),
    }
    return typical(title, {turn: [one[turn] for one in rounds] for turn in rounds[0]}, columns)


def count_runs(scenario: Scenario) -> int:
    """How many runs all rounds of a scenario have."""
    return scenario.rounds * len(scenario.turns())


async def measure(arguments: argparse.Namespace, chosen: dict[str, Scenario]) -> None:
    """Run everything; print and save each scenario or value, so that a sweep that is stopped keeps what it has."""
    console = Console(width=WIDTH)
    common = {"threads": arguments.threads, "load_average_at_start": warn_if_busy(console)}
    bench = Bench(arguments.threads, sum(map(count_runs, chosen.values())))
    console.print(placement_name(arguments.threads))
    values = []
    with bench.bar:
        for key, scenario in chosen.items():
            rounds = await bench.run(scenario, f"{key}, ")
            shown = show(console, key, scenario, rounds)
            values.append({"value": key, **shown})
            content = (
                {"sweep": arguments.sweep, **common, "values": values} if arguments.sweep else common | shown
            )
            path = save(name_of(arguments, key), record("throughput", content))
        bench.say("done")
    console.print(f"written to {path}")


def name_of(arguments: argparse.Namespace, key: str) -> str:
    """The record's."""
    own = f"sweep-{arguments.sweep}" if arguments.sweep else key
    compared = "-over-baseline" if arguments.baseline else ""
    return arguments.name or record_name(f"throughput-{own}{compared}", arguments.dtype)


def show(console: Console, key: str, scenario: Scenario, rounds: list[Round]) -> dict[str, Any]:
    """Print the table, ratios and targets of a scenario or of a sweep's value; what goes into its record."""
    title = (
        f"{key}: {scenario.requests} x ({scenario.input_len} in, {scenario.output_len} out), "
        f"KV memory for {scenario.pool}, {scenario.policy}, {scenario.dtype}"
    )
    console.print(runs_table(title, rounds))
    for side, reached in ratios(scenario, rounds).items():
        for measure, ratio in reached.items():
            console.print(f"{side}: {measure}: {ratio}", highlight=False)
    # They hold for the scenario's own sizes.
    own = SCENARIOS.get(key)
    judged = own and is_judged(replace(scenario, baseline=None), own, rounds)
    wanted = scenario.targets(key, rounds) if judged else []
    content = as_record(scenario, rounds)
    return content | {"targets": show_targets(console, wanted)} if own else content


def main() -> int:
    """Run one scenario or sweep; the exit code."""
    return run_benchmark(measure(*parse_arguments()))


if __name__ == "__main__":
    sys.exit(main())
