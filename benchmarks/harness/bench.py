"""Comparisons of servers in turns: the rounds with their progress, and what is printed and recorded of them."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness.measure import record, record_name, save, warn_if_busy
from benchmarks.harness.options import add_options, changed, whole
from benchmarks.harness.scenarios import LEAST_ROUNDS, Comparison, Round, show_targets
from benchmarks.harness.server import Server, alone
from benchmarks.harness.tables import typical

WIDTH = 130


class Bench:
    """A progress bar and the servers of one comparison at a time.

    Args:
        threads: OpenMP threads of each rank, None: as vLLM places them.
        runs: how many turns the whole invocation has.
    """

    def __init__(self, threads: int | None, runs: int):
        self.threads = threads
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Not on stdout: that is redirected while vLLM's client is at work.
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.task = self.bar.add_task("starting", total=runs)

    def say(self, text: str) -> None:
        """Show what is going on."""
        self.bar.update(self.task, description=text)

    async def start(self, stack: AsyncExitStack, scenario: Comparison, prefix: str = "") -> dict[str, Server]:
        """Start the sides' servers and warm them up; the stack ends them."""
        servers = {}
        for side in scenario.sides:
            self.say(f"{prefix}{side}: starting")
            servers[side] = await stack.enter_async_context(scenario.server(side, self.threads))
            self.say(f"{prefix}{side}: warming up")
            await scenario.first().send(servers[side], side, 0)
        return servers

    async def round(
        self, scenario: Comparison, servers: Mapping[str, Server], number: int, prefix: str = ""
    ) -> Round:
        """Let the sides take their turns, each alone; the number decides on the prompts and who begins."""
        runs = {}
        for turn, side in scenario.schedule(number).items():
            self.say(f"{prefix}round {number}, {turn}")
            with alone(servers[side], servers.values()):
                runs[turn] = await scenario.send(servers[side], turn, number)
            self.bar.advance(self.task)
        return {turn: runs[turn] for turn in scenario.schedule()}

    async def run(self, scenario: Comparison, prefix: str = "") -> list[Round]:
        """All rounds of a scenario, on servers of its own."""
        async with AsyncExitStack() as stack:
            servers = await self.start(stack, scenario, prefix)
            return [
                await self.round(scenario, servers, number, prefix)
                for number in range(1, scenario.rounds + 1)
            ]


def parse(
    command: str,
    description: str | None,
    scenarios: Mapping[str, Any],
    sizes: Mapping[str, str],
    argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Read the command line of a command that runs scenarios, all by default.

    Args:
        description: what its help begins with.
        sizes: fields of a scenario that options change, with their help.

    Returns:
        The options, and the scenarios to run, by name.
    """
    epilog = " ".join(f"{key}: {scenario.about}." for key, scenario in scenarios.items())
    epilog += f" Targets are judged at the scenario's own sizes, from {LEAST_ROUNDS} rounds on."
    program = f"python -m benchmarks.{command}"
    parser = argparse.ArgumentParser(prog=program, description=description, epilog=epilog)
    parser.add_argument("scenario", nargs="*", help=f"one or more of {', '.join(scenarios)} (default: all)")
    fields = {size: (whole, text) for size, text in sizes.items()}
    add_options(parser, fields, f"{command} and the scenario's")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.scenario).difference(scenarios):
        parser.error(f"there is no scenario {', '.join(unknown)}: choose from {', '.join(scenarios)}")
    chosen = arguments.scenario or list(scenarios)
    return arguments, {key: changed(arguments, scenarios[key], fields) for key in chosen}


async def measure(
    command: str,
    arguments: argparse.Namespace,
    chosen: Mapping[str, Comparison],
    own: Mapping[str, Comparison],
    sweep: str | None = None,
) -> None:
    """Run scenarios; print and save each as soon as it is done, so that what is stopped keeps what it has.

    Args:
        command: its name, with which records begin.
        chosen: what to run, by name; of a sweep by value.
        own: the command's scenarios as they are, which have targets.
        sweep: what is varied; all values go into one record.
    """
    console = Console(width=WIDTH)
    common = {"threads": arguments.threads, "load_average_at_start": warn_if_busy(console)}
    bench = Bench(arguments.threads, sum(one.rounds * len(one.schedule()) for one in chosen.values()))
    values: list[dict[str, Any]] = []
    with bench.bar:
        for key, scenario in chosen.items():
            rounds = await bench.run(scenario, f"{key}, ")
            shown = summary(console, key, scenario, own.get(key), rounds)
            values.append({"value": key, **shown})
            content = {"sweep": sweep, **common, "values": values} if sweep else common | shown
            name = name_of(command, arguments, f"sweep-{sweep}" if sweep else key, len(chosen) == 1 or sweep)
            console.print(f"written to {save(name, record(command, content))}", highlight=False)
        bench.say("done")


def name_of(command: str, arguments: argparse.Namespace, key: str, is_only: object) -> str:
    """The record's: the one that was given, which several records share with their own ends."""
    if arguments.name:
        return arguments.name if is_only else f"{arguments.name}-{key}"
    compared = "-over-baseline" if getattr(arguments, "baseline", None) else ""
    return record_name(f"{command}-{key}{compared}", arguments.dtype)


def summary(
    console: Console, name: str, scenario: Comparison, own: Comparison | None, rounds: Sequence[Round]
) -> dict[str, Any]:
    """Print the table, ratios and targets of a scenario or of a sweep's value; what goes into its record."""
    turns = {turn: [one[turn] for one in rounds] for turn in rounds[0]}
    console.print(typical(f"{name}: {scenario.title}", turns, scenario.columns()))
    for side, reached in scenario.ratios(rounds).items():
        for figure, ratio in reached.items():
            console.print(f"{side}: {figure}: {ratio}", highlight=False)
    is_judged = own is not None and scenario.is_judged(own, rounds)
    targets = show_targets(console, scenario.targets(name, rounds) if is_judged else [])
    return as_record(scenario, rounds) | {"targets": targets}


def as_record(scenario: Comparison, rounds: Sequence[Round]) -> dict[str, Any]:
    """Everything about one comparison: the raw runs and their ratios."""
    return {
        "scenario": asdict(scenario) | {"kv_bytes": scenario.kv_bytes()},
        "rounds": [{turn: run.summary() for turn, run in runs.items()} for runs in rounds],
        "ratios": scenario.ratios(rounds),
    }
