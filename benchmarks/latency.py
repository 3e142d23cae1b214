"""Latencies under Poisson arrivals: ``vllm serve`` without and with eviction, in the same KV memory and in turns.

First stock vLLM shows how many requests per second it completes when all arrive at once. Then every round sends both
sides the same requests at several rates, given as multiples of that.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from statistics import median

from rich.console import Console

from benchmarks.harness.bench import WIDTH, Bench, as_record
from benchmarks.harness.load import PERCENTILES, Run
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
    with_budgets,
)
from benchmarks.harness.plots import Panel, plot
from benchmarks.harness.scenarios import STOCK, Round, Scenario, Target, over, show_targets
from benchmarks.harness.server import run_benchmark
from benchmarks.harness.tables import Columns, typical

BASE = Scenario("Poisson arrivals, memory for 4 requests", *(24, 1024, 128), pool=4, spread=0.3)
RATES = (0.25, 0.5, 0.75, 1.0)
TARGETS: dict[Kind, dict[tuple[float, str, str], float]] = {
    USUAL: {(0.25, "ttft", "p50"): 1.0, (1.0, "ttft", "p50"): 0.6, (1.0, "tpot", "p90"): 1.05}
}
"""What latencies over stock's may be at most, by multiple of stock's capacity, latency and percentile."""
STATISTICS = [f"p{percentile}" for percentile in PERCENTILES]


def seconds(name: str, statistic: str) -> Callable[[Run], float]:
    """A latency of a run."""
    return lambda run: run.latency[name][statistic]


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

    @property
    def latencies(self) -> list[str]:
        """Without those that the answers have not: an answer of one token has no time between tokens."""
        return list(self.rounds[0][STOCK].latency)

    def ratios(self, side: str) -> dict[str, dict[str, Estimate]]:
        """The side's latencies over stock's, by latency and percentile; below 1 the side is faster."""
        return {
            name: {of: over(self.rounds, seconds(name, of), side, STOCK) for of in STATISTICS}
            for name in self.latencies
        }


def targets(scenario: Scenario, results: Sequence[AtRate]) -> list[Target]:
    """What the benchmark's own load should reach on this processor."""
    if not scenario.is_judged(BASE, results[0].rounds):
        return []
    return [
        Target(f"{side}: {name} {of} at {at.multiple:g}x, over stock", at.ratios(side)[name][of], bound, True)
        for at in results
        for side in scenario.evicting
        for (multiple, name, of), bound in TARGETS.get(kind(scenario.dtype), {}).items()
        if multiple == at.multiple
    ]


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Scenario]:
    """Read the command line: the options and the scenario with its changes."""
    parser = argparse.ArgumentParser("python -m benchmarks.latency", description=__doc__)
    add_budgets(parser)
    add_options(parser, LOAD, "latency")
    about = "multiples of the requests per second that stock vLLM completes when all arrive at once"
    own = f"{about} (default: %(default)s)"
    parser.add_argument("--rates", type=positive, nargs="+", default=RATES, metavar="X", help=own)
    arguments = parser.parse_args(argv)
    scenario = with_budgets(arguments, changed(arguments, BASE, LOAD))
    return arguments, scenario


async def measure(arguments: argparse.Namespace, scenario: Scenario) -> None:
    """Run everything, print it, draw it and save it."""
    console = Console(width=WIDTH)
    load_average = warn_if_busy(console)
    bench = Bench(arguments.threads, len(scenario.sides) * (1 + scenario.rounds * len(arguments.rates)))
    with bench.bar:
        saturation, results = await run_rates(bench, scenario, arguments.rates)
        bench.say("done")
    for at in results:
        show(console, scenario, at)
    content = {
        "threads": arguments.threads,
        "load_average_at_start": load_average,
        "targets": show_targets(console, targets(scenario, results)),
        "saturation": {side: run.summary() for side, run in saturation.items()},
        "rates": [
            {
                "multiple": at.multiple,
                **as_record(replace(scenario, rate=at.rate), at.rounds),
                "latency_ratios": {side: at.ratios(side) for side in scenario.evicting},
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


def show(console: Console, scenario: Scenario, at: AtRate) -> None:
    """Print the latencies at one rate, and what they are over stock's."""
    columns: Columns = {
        f"{name} {of}, s": (seconds(name, of), ".3f") for name in at.latencies for of in ("p50", "p99")
    }
    sides = {side: [one[side] for one in at.rounds] for side in scenario.sides}
    console.print(typical(f"{at.rate:.3g} requests/s ({at.multiple:g}x), {scenario.title}", sides, columns))
    for side in scenario.evicting:
        for name, reached in at.ratios(side).items():
            ratios = ", ".join(f"{of} {ratio}" for of, ratio in reached.items())
            console.print(f"{side}: {name} over stock's: {ratios}", highlight=False)


def panels(scenario: Scenario, results: Sequence[AtRate]) -> list[Panel]:
    """Time to the first token and per further token over the rate."""
    titles = {"ttft": "time to the first token, s", "tpot": "time per further token, s"}

    def points(side: str, name: str, of: str) -> list[tuple[float, float]]:
        return [(at.rate, median(map(seconds(name, of), (one[side] for one in at.rounds)))) for at in results]

    return [
        Panel(
            "requests per second",
            title,
            {f"{side}, {of}": points(side, name, of) for side in scenario.sides for of in ("p50", "p99")},
        )
        for name, title in titles.items()
        if name in results[0].latencies
    ]


def main() -> int:
    """Measure; the exit code."""
    return run_benchmark(measure(*parse_arguments()))


if __name__ == "__main__":
    sys.exit(main())
