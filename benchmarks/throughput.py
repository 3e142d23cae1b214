"""Requests against ``vllm serve`` without and with eviction, in the same KV memory and in turns.

A scenario is one load with targets; a sweep varies one size of a load. The servers of a comparison get requests in
turns; while one is measured, the others are paused. Threads are where vLLM places them, as users get them.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.baseline import installed
from benchmarks.harness.bench import LEAST_ROUNDS, WIDTH, Bench, as_record
from benchmarks.harness.measure import record, record_name, save, warn_if_busy
from benchmarks.harness.options import add_options, budget, changed, placement_name, require_room, whole
from benchmarks.harness.runs import runs_table, span, typical
from benchmarks.harness.scenarios import (
    KV_HEADS,
    LAYERS,
    PER_CPU,
    SCENARIOS,
    SPEED,
    STOCK,
    Round,
    Scenario,
    ratios,
    show_targets,
    targets,
)
from benchmarks.harness.server import run_benchmark

SWEEP_BASE = Scenario("one thing varied", *(12, 1024, 128), pool=3, rounds=3)
SWEEPS: dict[str, tuple[str, ...]] = {
    "pool": ("2", "3", "4", "6", "9", "12"),
    "budget": ("0.05", "0.1", "0.2", "0.4", "0.7", "1.0"),
    "context": ("256", "512", "1024", "2048", "4096"),
    "parallel": ("1x1", "2x1", "1x2", "2x2"),
    "load": tuple(
        f"{prompt}x{answer}@{pool}"
        for pool in (3, 12)
        for prompt in (512, 2048, 8192)
        for answer in (32, 256, 1024)
    ),
}
"""What can be varied, and its values: full requests in the KV memory, budgets, prompt tokens, TPxPP; or prompt tokens x
answer tokens @ full requests in the KV memory."""
SWEPT = {
    "pool": ("pool",),
    "budget": ("budgets",),
    "context": ("input_len",),
    "load": ("input_len", "output_len", "pool"),
}
"""The scenario's fields that a sweep sets, which no option may set then."""

Results = dict[str, tuple[Scenario, list[Round]]]
"""Scenarios and their rounds by the value of a sweep."""


def vary(base: Scenario, what: str, value: str) -> Scenario:
    """The scenario of one value of a sweep.

    Raises:
        ValueError: for a value that does not exist or that the model does not allow.
    """
    if what == "pool":
        return replace(base, pool=whole(value))
    if what == "budget":
        return replace(base, budgets=(budget(value),))
    if what == "context":
        return replace(base, input_len=whole(value))
    if what == "load":
        if not (sizes := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)@([1-9]\d*)", value)):
            raise ValueError("expected PROMPTxANSWER@POOL, such as 2048x256@3")
        return replace(base, input_len=int(sizes[1]), output_len=int(sizes[2]), pool=int(sizes[3]))
    if not (ranks := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", value)):
        raise ValueError("expected TPxPP, such as 2x1")
    tensor, pipeline = int(ranks[1]), int(ranks[2])
    if KV_HEADS % tensor or LAYERS % pipeline:
        raise ValueError(f"the model has {KV_HEADS} KV heads and {LAYERS} layers to divide")
    return replace(base, tensor=tensor, pipeline=pipeline)


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, dict[str, Scenario]]:
    """Read the command line.

    Returns:
        The options, and what to run: the scenario by its name, or those of a sweep by their values.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description=__doc__,
        epilog=" ".join(f"{name}: {scenario.about}." for name, scenario in SCENARIOS.items()),
    )
    parser.add_argument("scenario", nargs="?", choices=SCENARIOS, help="default: pool-bound")
    add_options(parser)
    parser.add_argument("--sweep", choices=SWEEPS, help="vary this instead of running a scenario")
    parser.add_argument("--values", nargs="+", metavar="V", help="values of the sweep (default: its own)")
    parser.add_argument(
        "--baseline",
        type=installed,
        metavar="ENV",
        help="Python environment with another version of this package, such as the .venv of another checkout: it "
        "serves each budget of a scenario once more, in turns with the others; this environment itself is a control",
    )
    arguments = parser.parse_args(argv)
    if not arguments.sweep:
        if arguments.values:
            parser.error("--values belong to --sweep")
        arguments.scenario = arguments.scenario or "pool-bound"
        scenario = replace(changed(arguments, SCENARIOS[arguments.scenario]), baseline=arguments.baseline)
        require_room(parser, scenario)
        return arguments, {arguments.scenario: scenario}
    if arguments.baseline:
        parser.error("--baseline belongs to a scenario, not to --sweep")
    if arguments.scenario:
        parser.error("--sweep has a load of its own: leave the scenario out")
    if any(getattr(arguments, field) is not None for field in SWEPT.get(arguments.sweep, ())):
        parser.error(f"--sweep {arguments.sweep} sets that itself: give --values")
    base = changed(arguments, SWEEP_BASE)
    scenarios = {}
    for value in arguments.values or SWEEPS[arguments.sweep]:
        try:
            scenarios[value] = vary(base, arguments.sweep, value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            parser.error(f"--values {value}: {error}")
        require_room(parser, scenarios[value])
    return arguments, scenarios


def sweep_table(what: str, results: Results) -> Table:
    """One row for each value and side with eviction."""
    table = Table(title=f"--sweep {what}")
    for column in (
        what,
        "side",
        "tokens/s",
        "stock's",
        "ratio [95 %]",
        "per CPU s [95 %]",
        "at once",
        "stock's",
    ):
        table.add_column(column, justify="left" if column == "side" else "right")
    for value, (scenario, rounds) in results.items():
        stock = [one[STOCK] for one in rounds]
        for side, reached in ratios(scenario, rounds).items():
            runs = [one[side] for one in rounds]
            table.add_row(
                value,
                side,
                *(typical(of, lambda run: run.tokens_per_second, ".1f") for of in (runs, stock)),
                str(reached[SPEED]),
                str(reached[PER_CPU]),
                *(span([run.peak_running for run in of]) for of in (runs, stock)),
            )
    return table


def count_runs(scenario: Scenario) -> int:
    """How many runs all rounds of a scenario have."""
    return scenario.rounds * len(scenario.turns())


async def run_scenario(scenario: Scenario, threads: int | None) -> list[Round]:
    """All rounds of a scenario with so many threads."""
    bench = Bench(threads, count_runs(scenario))
    with bench.bar:
        rounds = await bench.run(scenario)
        bench.say("done")
    return rounds


async def measure(arguments: argparse.Namespace, scenarios: dict[str, Scenario]) -> None:
    """Run everything, print it and save it."""
    console = Console(width=WIDTH)
    common = {"threads": arguments.threads, "load_average_at_start": warn_if_busy(console)}
    if arguments.sweep:
        path = await measure_sweep(console, arguments, scenarios, common)
    else:
        path = await measure_scenario(console, arguments, scenarios[arguments.scenario], common)
    console.print(f"written to {path}")


async def measure_sweep(
    console: Console, arguments: argparse.Namespace, scenarios: dict[str, Scenario], common: dict[str, Any]
) -> Path:
    """Each value of a sweep; the record is written after each, so that one that is stopped keeps what it has."""
    name = arguments.name or record_name(f"throughput-sweep-{arguments.sweep}", arguments.dtype)
    bench = Bench(arguments.threads, sum(count_runs(scenario) for scenario in scenarios.values()))
    results: Results = {}
    with bench.bar:
        for value, scenario in scenarios.items():
            results[value] = (scenario, await bench.run(scenario, f"{arguments.sweep} {value}, "))
            values = [{"value": done, **as_record(*result)} for done, result in results.items()]
            content = {"sweep": arguments.sweep, **common, "values": values}
            path = save(name, record("throughput", content))
        bench.say("done")
    console.print(sweep_table(arguments.sweep, results))
    return path


async def measure_scenario(
    console: Console, arguments: argparse.Namespace, scenario: Scenario, common: dict[str, Any]
) -> Path:
    """One scenario."""
    rounds = await run_scenario(scenario, arguments.threads)
    console.print(placement_name(arguments.threads))
    content = common | show_scenario(console, arguments.scenario, scenario, rounds)
    compared = "-over-baseline" if scenario.baseline else ""
    name = arguments.name or record_name(f"throughput-{arguments.scenario}{compared}", arguments.dtype)
    return save(name, record("throughput", content))


def show_scenario(console: Console, name: str, scenario: Scenario, rounds: list[Round]) -> dict[str, Any]:
    """Print the tables and targets of a scenario; what goes into its record."""
    title = (
        f"{name}: {scenario.requests} x ({scenario.input_len} in, {scenario.output_len} out), "
        f"KV memory for {scenario.pool}, {scenario.policy}, {scenario.dtype}"
    )
    console.print(runs_table(title, rounds))
    show_ratios(console, scenario, rounds)
    # They hold for the scenario's own sizes.
    own = SCENARIOS[name]
    same = replace(scenario, rounds=own.rounds, dtype=own.dtype, baseline=None) == own
    wanted = targets(name, scenario, rounds) if same and len(rounds) >= LEAST_ROUNDS else []
    return as_record(scenario, rounds) | {"targets": show_targets(console, wanted)}


def show_ratios(console: Console, scenario: Scenario, rounds: list[Round]) -> None:
    """Print each side's, over stock."""
    for side, reached in ratios(scenario, rounds).items():
        for measure, ratio in reached.items():
            console.print(f"{side}: {measure}: {ratio}", highlight=False)


def main() -> int:
    """Run one scenario or sweep; the exit code."""
    return run_benchmark(measure(*parse_arguments()))


if __name__ == "__main__":
    sys.exit(main())
