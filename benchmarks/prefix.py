"""Documents with many questions: stock vLLM with its prefix cache, eviction without one, eviction with one.

All sides have the same KV memory and take turns. The document is evicted without a question in view
(``kv_prefix_len``); stock vLLM keeps it whole. The scenarios ``long`` and ``compressed``, whose policy loses little
without the question, compare with stock vLLM without its prefix cache. In the scenarios ``exact`` and ``unrelated``
prompts are evicted with their question in view, so that only uncompressed prefixes can be found.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import command
from benchmarks.harness.bench import Bench
from benchmarks.harness.documents import ask, http_client
from benchmarks.harness.load import PAGE, SETTLE_SECONDS
from benchmarks.harness.measure import Estimate, paired_ratio
from benchmarks.harness.questions import SCENARIOS, STOCK_WITHOUT, WITH, WITHOUT, Scenario
from benchmarks.harness.scenarios import KV_HEADS, LAYERS, SCRATCH, STOCK, Target, model, show_targets
from benchmarks.harness.server import Server, alone, cpu_environment, run_benchmark

LONGEST_FIRST = 8192
"""Tokens of a document with which a server is tried before it is measured."""


@dataclass(frozen=True)
class Run:
    """What a load took on one side.

    Attributes:
        wall: seconds from the first request to the end of the last answer.
        first_token: seconds until the first token of each request, in the order of the prompts.
        computed: prompt tokens that were not found in the prefix cache.
        hits: requests whose document was.
        preemptions: requests that lost their KV.
        output_tokens: of all answers.
        cached_pages: pages that a compressed prefix in the cache has, on average; 0 where none is.
    """

    wall: float
    first_token: list[float]
    computed: int
    hits: int
    preemptions: int
    output_tokens: int
    cached_pages: float

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.wall


Round = dict[str, Run]


def make_server(scenario: Scenario, side: str, threads: int | None) -> Server:
    """The server of a side, not started yet."""
    flags = [
        *("--max-model-len", str(scenario.max_len), "--dtype", scenario.dtype),
        *("--kv-cache-memory-bytes", str(scenario.kv_bytes()), "--enable-prompt-tokens-details"),
        "--disable-uvicorn-access-log",
    ]
    if scenario.step is not None:
        flags += ["--max-num-batched-tokens", str(scenario.step)]
    if side in (WITHOUT, WITH):
        flags += ["--kv-eviction", scenario.policy, "--kv-budget", f"{scenario.budget:g}"]
    if side in (STOCK_WITHOUT, WITHOUT):
        flags += ["--no-enable-prefix-caching"]
    log = SCRATCH / f"prefix-{side.replace(' ', '-')}.log"
    return Server(model(max(4096, scenario.max_len)), log, flags, cpu_environment(threads, 1))


async def drive(server: Server, scenario: Scenario, prompts: Sequence[list[int]]) -> Run:
    """Send a load to one side and wait until it has come to rest."""
    before = await server.snapshot()
    lengths = None if scenario.sees_question else scenario.document_len, scenario.output_len
    async with http_client(server) as client:
        started = time.perf_counter()
        questions = [ask(client, server, prompt, *lengths) for prompt in prompts]
        if scenario.at_once:
            answers = await asyncio.gather(*questions)
        else:
            answers = [await question for question in questions]
        wall = time.perf_counter() - started
    server.check()
    after = await server.snapshot()
    await asyncio.sleep(SETTLE_SECONDS)
    return Run(
        wall,
        [answer.first_token for answer in answers],
        sum(map(len, prompts)) - sum(answer.cached for answer in answers),
        sum(answer.cached > 0 for answer in answers),
        after.preemptions - before.preemptions,
        sum(len(answer.tokens) for answer in answers),
        after.cached_pages / max(after.cached_prefixes, 1),
    )


def phases(name: str, scenario: Scenario) -> dict[str, tuple[str, ...]]:
    """The phases of a round of this scenario, and the sides that take part."""
    return {"cold": scenario.sides} | ({"warm": (STOCK, WITH)} if name == "document" else {})


async def run_rounds(bench: Bench, name: str, scenario: Scenario) -> list[dict[str, Round]]:
    """All rounds; of each the runs of every phase by side.

    Warm, the sides that cache are asked once more what they were just asked.
    """
    rounds = []
    async with AsyncExitStack() as stack:
        servers = {}
        for side in scenario.sides:
            bench.say(f"{name}, {side}: starting")
            servers[side] = await stack.enter_async_context(make_server(scenario, side, bench.threads))
            first = replace(scenario, document_len=min(scenario.document_len, LONGEST_FIRST))
            await drive(servers[side], first, first.prompts(seed=-1)[:2])
        for number in range(scenario.rounds):
            prompts = scenario.prompts(number)
            round_: dict[str, Round] = {phase: {} for phase in phases(name, scenario)}
            for phase, sides in phases(name, scenario).items():
                for side in sides[number % 2 :] + sides[: number % 2]:
                    bench.say(f"{name}, round {number + 1}, {phase}, {side}")
                    with alone(servers[side], servers.values()):
                        round_[phase][side] = await drive(servers[side], scenario, prompts)
                    bench.bar.advance(bench.task)
            rounds.append(round_)
    return rounds


def _ratio(rounds: Sequence[Round], what: Any, ours: str, theirs: str) -> Estimate:
    return paired_ratio([what(one[ours]) for one in rounds], [what(one[theirs]) for one in rounds])


def _mean_wait(run: Run) -> float:
    return mean(run.first_token)


def _speed(run: Run) -> float:
    return run.tokens_per_second


def of_document(scenario: Scenario, cold: list[Round], rounds: Sequence[dict[str, Round]]) -> list[Target]:
    """What sixteen questions at once should reach, and did."""
    warm = [{WITH: one["warm"][WITH], WITHOUT: one["cold"][WITHOUT]} for one in rounds]
    least = scenario.document_len + scenario.questions * scenario.question_len
    first = "time to first token, mean"
    return [
        Target(f"{first}, over without cache", _ratio(cold, _mean_wait, WITH, WITHOUT), 0.15, True),
        Target(f"{first}, over stock", _ratio(cold, _mean_wait, WITH, STOCK), 1.1, True),
        Target(f"{first}, warm, over without cache", _ratio(warm, _mean_wait, WITH, WITHOUT), 0.02, True),
        Target("output tokens/s, over stock", _ratio(cold, _speed, WITH, STOCK), 1.5),
        Target("prompt tokens computed", max(one[WITH].computed for one in cold), least, True),
    ]


def of_documents(scenario: Scenario, cold: list[Round]) -> list[Target]:
    """What questions about documents in turns should reach, and did."""
    again = scenario.documents * (scenario.questions - 1)

    def later(run: Run) -> float:
        return median(run.first_token[scenario.documents :])

    return [
        Target("requests that hit after the first pass", min(one[WITH].hits for one in cold) / again, 0.95),
        Target("the same of stock", max(one[STOCK].hits for one in cold) / again, 0.05, True),
        Target("time to first token after that, over stock", _ratio(cold, later, WITH, STOCK), 0.06, True),
    ]


def of_unique(cold: list[Round]) -> list[Target]:
    """What the cache may cost where it is of no use, and did."""
    more = max(one[WITH].preemptions - one[WITHOUT].preemptions for one in cold)
    return [
        Target("output tokens/s, over without cache", _ratio(cold, _speed, WITH, WITHOUT), 0.98),
        Target("preemptions beyond those without cache", more, 0, True),
    ]


def of_exact(scenario: Scenario, cold: list[Round]) -> list[Target]:
    """What a document that was read before should be worth to prompts that are evicted whole, and was."""

    def after_the_first(run: Run) -> float:
        return median(run.first_token[scenario.documents :])

    first = "time to first token after the first question, over without cache"
    return [Target(first, _ratio(cold, after_the_first, WITH, WITHOUT), 0.06, True)]


def of_long(scenario: Scenario, cold: list[Round]) -> list[Target]:
    """What a long document that is cached should be worth, and was."""

    def after_the_first(run: Run) -> float:
        return median(run.first_token[scenario.documents :])

    first = "time to first token after the first question, over stock without cache"
    return [Target(first, _ratio(cold, after_the_first, WITH, STOCK_WITHOUT), 0.02, True)]


def of_compressed(scenario: Scenario, cold: list[Round]) -> list[Target]:
    """What a document that kvzip has compressed should be worth, and was."""
    whole = -(-scenario.document_len // PAGE) * LAYERS * KV_HEADS
    pages = max(one[WITH].cached_pages for one in cold) / whole
    return [
        *of_long(scenario, cold),
        Target("pages of the compressed document, over the whole one's", pages, 0.25, True),
    ]


def figures(name: str, scenario: Scenario, rounds: Sequence[dict[str, Round]]) -> list[Target]:
    """What the scenario should reach, and what it did."""
    cold = [one["cold"] for one in rounds]
    if name == "document":
        return of_document(scenario, cold, rounds)
    if name == "documents":
        return of_documents(scenario, cold)
    if name == "exact":
        return of_exact(scenario, cold)
    if name == "long":
        return of_long(scenario, cold)
    return of_compressed(scenario, cold) if name == "compressed" else of_unique(cold)


def table(name: str, rounds: Sequence[dict[str, Round]]) -> Table:
    """Medians over the rounds."""
    result = Table(title=name)
    columns = ("", "seconds", "tokens/s", "first token, mean s", "slowest", "computed", "hits", "preempted")
    for column in columns:
        result.add_column(column, justify="right" if column else "left")
    for phase in rounds[0]:
        for side in rounds[0][phase]:
            runs = [one[phase][side] for one in rounds]
            result.add_row(
                f"{side}, {phase}",
                f"{median(run.wall for run in runs):.1f}",
                f"{median(run.tokens_per_second for run in runs):.1f}",
                f"{median(map(_mean_wait, runs)):.3f}",
                f"{median(max(run.first_token) for run in runs):.3f}",
                f"{median(run.computed for run in runs):.0f}",
                f"{median(run.hits for run in runs):.0f}",
                f"{median(run.preemptions for run in runs):.0f}",
            )
    return result


SIZES = {
    "documents": "how many",
    "document_len": "tokens of each",
    "questions": "about each document",
    "question_len": "tokens of each",
    "output_len": "tokens of each answer",
    "pool": "whole documents, each with a question and its answer, that the KV memory holds",
    "rounds": "how often every side runs",
}
"""What of a scenario can be changed."""


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, dict[str, Scenario]]:
    """Read the command line: the options, and what to run by name."""
    return command.parse("prefix", __doc__, SCENARIOS, SIZES, argv)


def summary(
    name: str, scenario: Scenario, rounds: list[dict[str, Round]], console: Console
) -> dict[str, Any]:
    """Print what a scenario showed; what its record says."""
    own = SCENARIOS[name]
    title = f"{name}: {scenario.about}, {scenario.policy}, budget {scenario.budget:g}"
    console.print(table(title, rounds))
    targets = figures(name, scenario, rounds) if command.is_judged(scenario, own, rounds) else []
    return {
        "scenario": asdict(scenario) | {"kv_bytes": scenario.kv_bytes()},
        "rounds": [
            {phase: {side: asdict(run) for side, run in by_side.items()} for phase, by_side in one.items()}
            for one in rounds
        ],
        "targets": show_targets(console, targets),
    }


def main() -> int:
    """Run the scenarios; the exit code."""
    arguments, scenarios = parse_arguments()
    turns = {name: sum(map(len, phases(name, scenario).values())) for name, scenario in scenarios.items()}
    runs = sum(turns[name] * scenario.rounds for name, scenario in scenarios.items())
    return run_benchmark(command.measure("prefix", arguments, scenarios, runs, run_rounds, summary))


if __name__ == "__main__":
    sys.exit(main())
