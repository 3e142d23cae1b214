"""The command of a benchmark that runs scenarios with servers side by side: its options, and its records."""

import argparse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console

from benchmarks.harness.bench import LEAST_ROUNDS, WIDTH, Bench
from benchmarks.harness.measure import RESULTS, record, record_name, save, warn_if_busy
from benchmarks.harness.options import add_dtype, add_start_patience, whole


class Scenario(Protocol):
    """What all scenarios have."""

    @property
    def about(self) -> str:
        """Shown in help and results."""

    @property
    def rounds(self) -> int:
        """How often every side runs."""

    @property
    def dtype(self) -> str:
        """In which the servers compute and keep the KV."""


S = TypeVar("S", bound=Scenario)
R = TypeVar("R")


def parse(
    name: str,
    about: str | None,
    scenarios: Mapping[str, S],
    sizes: Mapping[str, str],
    argv: Sequence[str] | None,
    threads: int | None = 1,
    add: Callable[[argparse.ArgumentParser], None] | None = None,
) -> tuple[argparse.Namespace, dict[str, S]]:
    """Read a command line.

    Args:
        name: of the benchmark's module.
        about: what its help begins with.
        scenarios: all that there are, by name.
        sizes: what of a scenario can be changed, with a help text for each.
        threads: of each server unless the command line says otherwise; None: as vLLM places them.
        add: adds options of the benchmark's own.

    Returns:
        The options, and the scenarios to run, by name.
    """
    epilog = " ".join(f"{key}: {scenario.about}." for key, scenario in scenarios.items())
    epilog += f" Targets are judged at the scenario's own sizes, from {LEAST_ROUNDS} rounds on."
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about, epilog=epilog)
    parser.add_argument("scenario", nargs="*", help=f"one or more of {', '.join(scenarios)} (default: all)")
    for size, text in sizes.items():
        flag = f"--{size.replace('_', '-')}"
        parser.add_argument(flag, type=whole, metavar="N", help=f"{text} (default: the scenario's)")
    add_dtype(parser)
    add_start_patience(parser)
    placed = "vLLM's own placement" if threads is None else f"{threads}"
    text = f"OpenMP threads of each server (default: {placed})"
    parser.add_argument("--threads", type=whole, default=threads, metavar="N", help=text)
    parser.add_argument(
        "--name", help=f"name of the records, followed by the scenario's name (default: {name})"
    )
    if add is not None:
        add(parser)
    arguments = parser.parse_args(argv)
    unknown = [given for given in arguments.scenario if given not in scenarios]
    if unknown:
        parser.error(f"there is no scenario {unknown[0]}: choose from {', '.join(scenarios)}")
    given = {size: getattr(arguments, size) for size in (*sizes, "dtype")}
    changes: dict[str, Any] = {size: value for size, value in given.items() if value is not None}
    chosen = arguments.scenario or list(scenarios)
    return arguments, {key: replace(scenarios[key], **changes) for key in chosen}  # type: ignore[type-var]


def is_judged(scenario: S, own: S, rounds: Sequence[object]) -> bool:
    """Whether a scenario ran at its own sizes, and often enough to be held against its targets."""
    as_it_ran = replace(scenario, rounds=own.rounds, dtype=own.dtype)  # type: ignore[type-var]
    return as_it_ran == own and len(rounds) >= LEAST_ROUNDS


async def measure(
    name: str,
    arguments: argparse.Namespace,
    scenarios: Mapping[str, S],
    runs: int,
    run_rounds: Callable[[Bench, str, S], Awaitable[list[R]]],
    summary: Callable[[str, S, list[R], Console], dict[str, Any]],
    folder: Path = RESULTS,
) -> None:
    """Run scenarios; print and save each as soon as it is done.

    Args:
        name: of the benchmark's module.
        runs: of all sides in all rounds.
        run_rounds: runs all rounds of a scenario.
        summary: prints what it showed, and returns what its record says.
        folder: for the records.
    """
    console = Console(width=WIDTH)
    load_average = warn_if_busy(console)
    bench = Bench(arguments.threads, runs)
    with bench.bar:
        for key, scenario in scenarios.items():
            rounds = await run_rounds(bench, key, scenario)
            content = {
                "threads": arguments.threads,
                "load_average_at_start": load_average,
                "scenarios": {key: summary(key, scenario, rounds, console)},
            }
            own = (
                f"{arguments.name}-{key}" if arguments.name else record_name(f"{name}-{key}", arguments.dtype)
            )
            console.print(f"written to {save(own, record(name, content), folder)}")
        bench.say("done")
