"""The command of a benchmark that runs scenarios with servers side by side: its options, rounds and records."""

import argparse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness.bench import LEAST_ROUNDS, WIDTH, Bench
from benchmarks.harness.measure import RESULTS, record, record_name, save, warn_if_busy
from benchmarks.harness.options import add_options, changed, whole
from benchmarks.harness.scenarios import Target, show_targets
from benchmarks.harness.server import Server, alone, run_benchmark

Round = dict[str, dict[str, Any]]
"""What every side did, by phase and side."""


def one_phase(name: str, scenario: Any) -> dict[str, Sequence[str]]:
    """All sides, once a round."""
    return {"": scenario.sides}


@dataclass(frozen=True)
class Benchmark:
    """What is particular about one benchmark.

    Attributes:
        name, about: of its module; what its help begins with.
        scenarios: all that there are, by name; each has about, sides, rounds, dtype and ``kv_bytes``.
        sizes: what of a scenario can be changed, with a help text for each.
        server: makes a side's server, not started yet, of the scenario's name, the scenario, the side and threads.
        first: a small scenario to warm up with.
        drive: sends a round's load to a server, of the server, the scenario, its side and the round's number.
        table: medians over the rounds, of a title, the scenario and its rounds.
        figures: what a scenario should reach, and what it did, of its name, itself and its rounds.
        phases: of a round, by name the sides that take part.
    """

    name: str
    about: str | None
    scenarios: Mapping[str, Any]
    sizes: Mapping[str, str]
    server: Callable[[str, Any, str, int | None], Server]
    first: Callable[[Any], Any]
    drive: Callable[[Server, Any, str, int], Awaitable[Any]]
    table: Callable[[str, Any, Sequence[Round]], Table]
    figures: Callable[[str, Any, Sequence[Round]], list[Target]]
    phases: Callable[[str, Any], Mapping[str, Sequence[str]]] = one_phase


def parse(
    benchmark: Benchmark, argv: Sequence[str] | None = None
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Read a command line: the options, and the scenarios to run, by name."""
    scenarios = benchmark.scenarios
    epilog = " ".join(f"{key}: {scenario.about}." for key, scenario in scenarios.items())
    epilog += f" Targets are judged at the scenario's own sizes, from {LEAST_ROUNDS} rounds on."
    program = f"python -m benchmarks.{benchmark.name}"
    parser = argparse.ArgumentParser(prog=program, description=benchmark.about, epilog=epilog)
    parser.add_argument("scenario", nargs="*", help=f"one or more of {', '.join(scenarios)} (default: all)")
    fields = {size: (whole, text) for size, text in benchmark.sizes.items()}
    add_options(parser, fields, f"{benchmark.name} and the scenario's", threads=1)
    arguments = parser.parse_args(argv)
    unknown = [given for given in arguments.scenario if given not in scenarios]
    if unknown:
        parser.error(f"there is no scenario {unknown[0]}: choose from {', '.join(scenarios)}")
    chosen = arguments.scenario or list(scenarios)
    return arguments, {key: changed(parser, arguments, scenarios[key], fields) for key in chosen}


def is_judged(scenario: Any, own: Any, rounds: Sequence[object]) -> bool:
    """Whether a scenario ran at its own sizes, and often enough to be held against its targets."""
    as_it_ran = replace(scenario, rounds=own.rounds, dtype=own.dtype)
    return as_it_ran == own and len(rounds) >= LEAST_ROUNDS


async def run_rounds(benchmark: Benchmark, bench: Bench, name: str, scenario: Any) -> list[Round]:
    """All rounds: what every side did, by phase. Another side begins each round."""
    rounds = []
    phases = benchmark.phases(name, scenario)
    async with AsyncExitStack() as stack:
        servers = {}
        for side in scenario.sides:
            bench.say(f"{name}, {side}: starting")
            server = benchmark.server(name, scenario, side, bench.threads)
            servers[side] = await stack.enter_async_context(server)
            await benchmark.drive(servers[side], benchmark.first(scenario), side, -1)
        for number in range(scenario.rounds):
            found: Round = {phase: {} for phase in phases}
            for phase, sides in phases.items():
                first = number % len(sides)
                for side in [*sides[first:], *sides[:first]]:
                    bench.say(f"{name}, round {number + 1}, {phase}, {side}")
                    with alone(servers[side], servers.values()):
                        found[phase][side] = await benchmark.drive(servers[side], scenario, side, number)
                    bench.bar.advance(bench.task)
            rounds.append(found)
    return rounds


def summary(
    benchmark: Benchmark, name: str, scenario: Any, rounds: Sequence[Round], console: Console
) -> dict[str, Any]:
    """Print what a scenario showed; what its record says."""
    console.print(benchmark.table(f"{name}: {scenario.about}", scenario, rounds))
    judged = is_judged(scenario, benchmark.scenarios[name], rounds)
    targets = benchmark.figures(name, scenario, rounds) if judged else []
    seen = [
        {phase: {side: asdict(run) for side, run in sides.items()} for phase, sides in one.items()}
        for one in rounds
    ]
    return {
        "scenario": asdict(scenario) | {"kv_bytes": scenario.kv_bytes()},
        # Without the name of the phase where there is one only.
        "rounds": [next(iter(one.values())) if list(one) == [""] else one for one in seen],
        "targets": show_targets(console, targets),
    }


async def measure(benchmark: Benchmark, arguments: argparse.Namespace, scenarios: Mapping[str, Any]) -> None:
    """Run scenarios; print and save each as soon as it is done."""
    console = Console(width=WIDTH)
    load_average = warn_if_busy(console)
    runs = [
        scenario.rounds * sum(map(len, benchmark.phases(name, scenario).values()))
        for name, scenario in scenarios.items()
    ]
    bench = Bench(arguments.threads, sum(runs))
    with bench.bar:
        for key, scenario in scenarios.items():
            rounds = await run_rounds(benchmark, bench, key, scenario)
            content = {
                "threads": arguments.threads,
                "load_average_at_start": load_average,
                "scenarios": {key: summary(benchmark, key, scenario, rounds, console)},
            }
            own = record_name(f"{benchmark.name}-{key}", arguments.dtype)
            name = f"{arguments.name}-{key}" if arguments.name else own
            console.print(f"written to {save(name, record(benchmark.name, content), RESULTS)}")
        bench.say("done")


def main(benchmark: Benchmark) -> int:
    """Run the scenarios of this process's command line; the exit code."""
    return run_benchmark(measure(benchmark, *parse(benchmark)))
