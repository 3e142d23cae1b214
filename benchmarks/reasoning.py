"""Long answers: stock vLLM, and answers that are evicted while they are written, in the same KV memory.

Prompts are kept whole. All servers of a scenario run at once, and get requests in turns. A further turn of each side
computes the prompts alone, so that evictions of answers are held against the time of decoding.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from benchmarks.harness import command, scenarios
from benchmarks.harness.bench import Bench, as_record
from benchmarks.harness.measure import RESULTS, USUAL, Estimate, estimate, kind
from benchmarks.harness.runs import runs_table
from benchmarks.harness.scenarios import (
    SCRATCH,
    SPEED,
    STOCK,
    Round,
    Target,
    Turn,
    decode_seconds,
    prefill,
    ratios,
    show_targets,
)
from benchmarks.harness.server import run_benchmark
from vllm_kvevict.policies.registry import decoding_policies

POLICY = "ada-snapkv"
"""Whose side is held against the targets."""
EVICTING = "share of decoding spent on evicting answers"


@dataclass(frozen=True)
class Scenario(scenarios.Scenario):
    """See the throughput benchmark's; prompts are kept whole.

    Attributes:
        decode_budget: entries of an answer that each KV head keeps on average.
        decode_interval: tokens from one eviction to the next.
        policies: that evict answers, a side each.
    """

    budgets: tuple[float, ...] = (1.0,)
    decode_budget: int = 448
    decode_interval: int = 128
    policies: tuple[str, ...] = (POLICY,)

    @property
    def evicting(self) -> dict[str, float]:
        """Name of the sides with eviction, and the budget of their prompts."""
        return dict.fromkeys(self.policies, self.budgets[0])

    @property
    def evicts(self) -> bool:
        """Whether answers are long enough to be evicted; an answer's last token is not stored."""
        return self.output_len > self.decode_budget + self.decode_interval

    def flags(self, side: str) -> list[str]:
        """What a side's server is told that no other is."""
        if side == STOCK:
            return []
        return [
            *super().flags(side),
            *("--kv-decode-budget", str(self.decode_budget)),
            *("--kv-eviction-config.decode_interval", str(self.decode_interval)),
            *("--kv-eviction-config.decode_policy", side),
        ]

    def turns(self) -> list[Turn]:
        """The runs of one round, in order."""
        alone = [Turn(prefill(side), side, self.input_len, 1) for side in self.evicting if self.evicts]
        return [*super().turns(), *alone]


SCENARIOS = {
    "long": Scenario(
        "answers of 4,096 tokens, memory for 3 of 24 requests", *(24, 512, 4096), pool=3, rounds=3
    ),
    "fits": Scenario(
        "everything fits and no answer is evicted: what being able to costs", *(8, 512, 576), pool=8
    ),
}
SMALL: dict[str, Any] = {"decode_budget": 48, "decode_interval": 32, "rounds": 1}
QUICK = {
    "long": replace(SCENARIOS["long"], requests=4, input_len=64, output_len=320, pool=2, **SMALL),
    "fits": replace(SCENARIOS["fits"], requests=2, input_len=64, output_len=80, pool=2, **SMALL),
}
"""Sizes that only show that everything works."""

SPEEDS, USUAL_SPEED = {USUAL: 2.4}, 2.0
"""Output tokens/s of ``long`` over stock's, by level and dtype, and elsewhere."""
FITS_SPEED = 0.97
AT_ONCE, MOST_EVICTING = 12, 0.08
"""Requests at once in every run of ``long``, and the share of decoding that evictions may take."""


def evicting_share(side: str, rounds: Sequence[Round]) -> Estimate:
    """Seconds of choosing and moving what is kept of answers, over those that decoding took."""
    return estimate([one[side].answer_seconds / decode_seconds(side, one) for one in rounds])


def targets(name: str, scenario: Scenario, rounds: Sequence[Round]) -> list[Target]:
    """What a scenario should reach on this processor and in its dtype."""
    if POLICY not in scenario.policies:
        return []
    speed = ratios(scenario, rounds)[POLICY][SPEED]
    if name == "fits":
        return [Target(f"{POLICY}: {SPEED}", speed, FITS_SPEED)]
    runs = [one[POLICY] for one in rounds]
    return [
        Target(f"{POLICY}: {SPEED}", speed, SPEEDS.get(kind(scenario.dtype), USUAL_SPEED)),
        Target("requests running at once", min(run.peak_running for run in runs), AT_ONCE),
        Target("preemptions", max(run.preemptions for run in runs), 0, at_most=True),
        Target(EVICTING, evicting_share(POLICY, rounds), MOST_EVICTING, at_most=True),
    ]


def show_figures(scenario: Scenario, rounds: Sequence[Round], console: Console) -> dict[str, Any]:
    """Print the ratios, and what evictions of answers took; what the record says of the latter."""
    found = {}
    for side, reached in ratios(scenario, rounds).items():
        for measure, ratio in reached.items():
            console.print(f"{side}: {measure}: {ratio}", highlight=False)
        if not scenario.evicts:
            continue
        share = evicting_share(side, rounds)
        each = estimate(
            [1e3 * one[side].answer_seconds / max(1, one[side].answer_evictions) for one in rounds]
        )
        count = rounds[0][side].answer_evictions
        console.print(f"{side}: {EVICTING}: {share}; {count} evictions of {each} ms", highlight=False)
        found[side] = {"share": vars(share), "milliseconds": vars(each), "evictions": count}
    return found


def summary(name: str, scenario: Scenario, rounds: list[Round], console: Console) -> dict[str, Any]:
    """Print what a scenario showed; what its record says."""
    title = (
        f"{name}: {scenario.requests} x ({scenario.input_len} in, {scenario.output_len} out), KV memory for "
        f"{scenario.pool}, answers to {scenario.decode_budget} every {scenario.decode_interval}, {scenario.dtype}"
    )
    console.print(runs_table(title, rounds))
    evicting = show_figures(scenario, rounds, console)
    own = replace(SCENARIOS[name], policies=scenario.policies)
    wanted = targets(name, scenario, rounds) if command.is_judged(scenario, own, rounds) else []
    return as_record(scenario, rounds) | {"evicting": evicting, "targets": show_targets(console, wanted)}


SIZES = {
    "requests": "requests of each run",
    "input_len": "tokens of each prompt",
    "output_len": "tokens of each answer",
    "pool": "requests that the KV memory holds without eviction",
    "decode_budget": "entries of an answer that each KV head keeps on average",
    "decode_interval": "tokens from one eviction to the next",
    "rounds": "runs of each side",
}
"""What of a scenario can be changed."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument(
        "--policy",
        nargs="+",
        choices=decoding_policies(),
        default=[POLICY],
        help=f"policies that evict answers, a side each (default: {POLICY})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes that only show that everything works; the record goes to benchmarks/out",
    )


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, dict[str, Scenario]]:
    """Read the command line: the options, and what to run by name."""

    def parse(known: dict[str, Scenario]) -> tuple[argparse.Namespace, dict[str, Scenario]]:
        return command.parse("reasoning", __doc__, known, SIZES, argv, threads=None, add=add_options)

    arguments, chosen = parse(SCENARIOS)
    if arguments.quick:
        arguments, chosen = parse(QUICK)
    policies = tuple(dict.fromkeys(arguments.policy))
    return arguments, {name: replace(scenario, policies=policies) for name, scenario in chosen.items()}


async def run_rounds(bench: Bench, name: str, scenario: Scenario) -> list[Round]:
    """All rounds of a scenario."""
    return await bench.run(scenario, f"{name}, ")


def main() -> int:
    """Run the scenarios; the exit code."""
    arguments, chosen = parse_arguments()
    runs = sum(len(scenario.turns()) * scenario.rounds for scenario in chosen.values())
    folder = SCRATCH if arguments.quick else RESULTS
    return run_benchmark(command.measure("reasoning", arguments, chosen, runs, run_rounds, summary, folder))


if __name__ == "__main__":
    sys.exit(main())
