"""A comparison of servers in turns, with its progress, and what goes into its record."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.harness.load import drive
from benchmarks.harness.measure import Estimate
from benchmarks.harness.scenarios import Round, Scenario, make_server, ratios
from benchmarks.harness.server import Server, alone

LEAST_ROUNDS = 3
"""Fewer give no interval that a target could be held against."""
WIDTH = 130


class Bench:
    """A progress bar and the servers of one comparison at a time.

    Args:
        threads: OpenMP threads of each rank, None: as vLLM places them.
        runs: how many runs the whole invocation has.
    """

    def __init__(self, threads: int | None, runs: int):
        self.threads = threads
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Not on stdout: that is redirected while vLLM's client is at work.
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.task: TaskID = self.bar.add_task("starting", total=runs)

    def say(self, text: str) -> None:
        """Show what is going on."""
        self.bar.update(self.task, description=text)

    async def start(self, stack: AsyncExitStack, scenario: Scenario, prefix: str = "") -> dict[str, Server]:
        """Start the sides' servers and warm them up; the stack ends them."""
        servers = {}
        for side in scenario.sides:
            self.say(f"{prefix}{side}: starting")
            servers[side] = await stack.enter_async_context(make_server(scenario, side, self.threads))
        for side, server in servers.items():
            self.say(f"{prefix}{side}: warming up")
            few = min(4, scenario.output_len)  # the servers' longest request is that of the scenario
            load = replace(scenario.load(scenario.input_len, few, seed=0), requests=2, rate=None)
            await drive(server, load, scenario.kv_bytes(), scenario.dtype)
        return servers

    async def round(
        self, scenario: Scenario, servers: dict[str, Server], number: int, prefix: str = ""
    ) -> Round:
        """Let the sides take their turns; the number decides on the prompts, which are the same for all sides."""
        runs = {}
        for turn in scenario.turns(number):
            self.say(f"{prefix}round {number}, {turn.name}")
            load = scenario.load(turn.input_len, turn.output_len, seed=number)
            server = servers[turn.side]
            with alone(server, servers.values()):
                runs[turn.name] = await drive(server, load, scenario.kv_bytes(), scenario.dtype)
            self.bar.advance(self.task)
        return {turn.name: runs[turn.name] for turn in scenario.turns()}

    async def run(self, scenario: Scenario, prefix: str = "") -> list[Round]:
        """All rounds of a scenario, on servers of its own."""
        async with AsyncExitStack() as stack:
            servers = await self.start(stack, scenario, prefix)
            return [
                await self.round(scenario, servers, number, prefix)
                for number in range(1, scenario.rounds + 1)
            ]


def as_record(scenario: Scenario, rounds: Sequence[Round]) -> dict[str, Any]:
    """Everything about one comparison: the raw runs and their ratios."""
    return {
        "scenario": asdict(scenario) | {"kv_bytes": scenario.kv_bytes()},
        "rounds": [{turn: run.summary() for turn, run in runs.items()} for runs in rounds],
        "ratios": estimates(ratios(scenario, rounds)),
    }


def estimates(nested: dict[str, Any]) -> dict[str, Any]:
    """Nested estimates as nested dictionaries."""
    return {
        name: asdict(value) if isinstance(value, Estimate) else estimates(value)
        for name, value in nested.items()
    }
