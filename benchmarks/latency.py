"""Latencies under Poisson arrivals: ``vllm serve`` without and with eviction, in the same KV memory and in turns.

First stock vLLM shows how many requests per second it completes when all arrive at once. Then every round sends both
sides the same requests at several rates, given as multiples of that.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.harness.bench import LEAST_ROUNDS, WIDTH, Bench, as_record, estimates
from benchmarks.harness.load import PERCENTILES
from benchmarks.harness.measure import (
    RESULTS,
    USUAL,
    Estimate,
    Kind,
    kind,
    record,
    record_name,
    save,
    warn_if_busy,
)
from benchmarks.harness.options import (
    LOAD,
    add_budgets,
    add_options,
    changed,
    positive,
    require_room,
    with_budgets,
)
from benchmarks.harness.plots import Panel, plot
from benchmarks.harness.scenarios import STOCK, Round, Scenario, Target, compare, show_targets
from benchmarks.harness.server import run_benchmark

BASE = Scenario("Poisson arrivals, memory for 4 requests", *(24, 1024, 128), pool=4, spread=0.3, rounds=3)
RATES = (0.25, 0.5, 0.75, 1.0)
TARGETS: dict[Kind, dict[tuple[float, str, str], float]] = {
    USUAL: {(0.25, "ttft", "p50"): 1.0, (1.0, "ttft", "p50"): 0.6, (1.0, "tpot", "p90"): 1.05}
}
"""What latencies over stock's may be at most, by multiple of stock's capacity, latency and percentile."""
STATISTICS = [f"p{percentile}" for percentile in PERCENTILES]
FIELDS = {name: field for name, field in LOAD.items() if name != "rate"}


@dataclass(frozen=True)
class AtRate:
    """The rounds at one rate.

    Attributes:
        multiple: of what stock vLLM completes.
        rate: requests per second.
        rounds: a run of each side.
    """

    multiple: float
    rate: float
    rounds: list[Round]

    def ratios(self, side: str) -> dict[str, dict[str, Estimate]]:
        """The side's latencies over stock's, by latency and percentile; below 1 the side is faster.

        Without those that the answers have not: an answer of one token has no time between tokens.
        """
        return {
            name: {statistic: self._ratio(side, name, statistic) for statistic in STATISTICS}
            for name in self.rounds[0][STOCK].latency
        }

    def _ratio(self, side: str, name: str, statistic: str) -> Estimate:
        return compare(
            self.rounds,
            lambda runs: runs[side].latency[name][statistic],
            lambda runs: runs[STOCK].latency[name][statistic],
        )

    def seconds(self, side: str, name: str, statistic: str) -> float:
        """Median over the rounds."""
        return median(runs[side].latency[name][statistic] for runs in self.rounds)


def targets(scenario: Scenario, results: Sequence[AtRate]) -> list[Target]:
    """What the benchmark's own load should reach on this processor, however often it runs."""
    usual = replace(scenario, requests=BASE.requests, rounds=BASE.rounds, dtype=BASE.dtype) == BASE
    if not usual or scenario.requests < BASE.requests or scenario.rounds < LEAST_ROUNDS:
        return []
    bounds = TARGETS.get(kind(scenario.dtype), {})
    return [
        Target(
            f"{side}: {name} {statistic} at {at.multiple:g}x, over stock",
            at.ratios(side)[name][statistic],
            bound,
            True,
        )
        for at in results
        for side in scenario.evicting
        for (multiple, name, statistic), bound in bounds.items()
        if multiple == at.multiple
    ]


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Scenario]:
    """Read the command line: the options and the scenario with its changes."""
    # Else --rate would pass for --rates.
    parser = argparse.ArgumentParser("python -m benchmarks.latency", description=__doc__, allow_abbrev=False)
    add_budgets(parser)
    add_options(parser, FIELDS, "latency")
    about = "multiples of the requests per second that stock vLLM completes when all arrive at once"
    own = f"{about} (default: %(default)s)"
    parser.add_argument("--rates", type=positive, nargs="+", default=RATES, metavar="X", help=own)
    arguments = parser.parse_args(argv)
    scenario = with_budgets(arguments, changed(parser, arguments, BASE, FIELDS))
    require_room(parser, scenario)
    return arguments, scenario


async def measure(arguments: argparse.Namespace, scenario: Scenario) -> None:
    """Run everything, print it, draw it and save it."""
    console = Console(width=WIDTH)
    load_average = warn_if_busy(console)
    bench = Bench(arguments.threads, len(scenario.sides) * (1 + scenario.rounds * len(arguments.rates)))
    with bench.bar:
        saturation, results = await run_rates(bench, scenario, arguments.rates)
        bench.say("done")
    console.print(latency_table(scenario, results))
    content = {
        "threads": arguments.threads,
        "load_average_at_start": load_average,
        "targets": show_targets(console, targets(scenario, results)),
        "saturation": {side: run.summary() for side, run in saturation.items()},
        "rates": [
            {
                "multiple": at.multiple,
                **as_record(replace(scenario, rate=at.rate), at.rounds),
                "latency_ratios": estimates({side: at.ratios(side) for side in scenario.evicting}),
            }
            for at in results
        ],
    }
    name = arguments.name or record_name("latency", arguments.dtype)
    path = save(name, record("latency", content))
    console.print(f"written to {path} and {plot(RESULTS / f'{name}.png', panels(scenario, results))}")


async def run_rates(
    bench: Bench, scenario: Scenario, multiples: Sequence[float]
) -> tuple[Round, list[AtRate]]:
    """One run of each side at saturation, then the rounds; in each the sides take turns at every rate."""
    async with AsyncExitStack() as stack:
        servers = await bench.start(stack, scenario)
        saturation = await bench.round(scenario, servers, number=0, prefix="all at once, ")
        stock = saturation[STOCK].requests_per_second
        results = [AtRate(multiple, multiple * stock, []) for multiple in multiples]
        for number in range(1, scenario.rounds + 1):
            for at in results:
                prefix = f"{at.rate:.2g} requests/s, "
                runs = await bench.round(replace(scenario, rate=at.rate), servers, number, prefix)
                at.rounds.append(runs)
    return saturation, results


def latency_table(scenario: Scenario, results: Sequence[AtRate]) -> Table:
    """One row for each rate, side and latency, in milliseconds."""
    about = f"the 99th of {scenario.requests} is about the slowest"
    table = Table(title=f"milliseconds, {scenario.policy}, {scenario.dtype}; {about}")
    for column in ("requests/s", "side", "latency"):
        table.add_column(column)
    for statistic in ("p50", "p99"):
        for column in (f"stock's {statistic}", statistic, "ratio [95 %]"):
            table.add_column(column, justify="right")
    for at in results:
        for side in scenario.evicting:
            for name, reached in at.ratios(side).items():
                cells = []
                for statistic in ("p50", "p99"):
                    cells += [f"{at.seconds(of, name, statistic) * 1e3:.1f}" for of in (STOCK, side)]
                    cells.append(str(reached[statistic]))
                table.add_row(f"{at.rate:.3g} ({at.multiple:g}x)", side, name, *cells)
    return table


def panels(scenario: Scenario, results: Sequence[AtRate]) -> list[Panel]:
    """Time to the first token and per further token over the rate."""
    titles = {"ttft": "time to the first token, s", "tpot": "time per further token, s"}
    return [
        Panel(
            "requests per second",
            title,
            {
                f"{side}, {statistic}": [(at.rate, at.seconds(side, name, statistic)) for at in results]
                for side in scenario.sides
                for statistic in ("p50", "p99")
            },
        )
        for name, title in titles.items()
        if name in results[0].rounds[0][STOCK].latency
    ]


def main() -> int:
    """Measure; the exit code."""
    return run_benchmark(measure(*parse_arguments()))


if __name__ == "__main__":
    sys.exit(main())
