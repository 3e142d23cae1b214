"""Documents with many questions: stock vLLM with its prefix cache, eviction without one, eviction with one.

All sides have the same KV memory and take turns. The document is evicted without a question in view
(``kv_prefix_len``); stock vLLM keeps it whole. The scenario ``compressed`` compares a policy that loses little without
the question with stock vLLM without its prefix cache. In the scenarios ``exact`` and ``unrelated`` prompts are
evicted with their question in view, so that only uncompressed prefixes can be found.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import command
from benchmarks.harness.bench import Bench
from benchmarks.harness.documents import ask, http_client
from benchmarks.harness.load import PAGE, SETTLE_SECONDS
from benchmarks.harness.measure import Estimate, paired_ratio
from benchmarks.harness.scenarios import (
    BLOCK,
    KV_HEADS,
    LAYERS,
    SCRATCH,
    STOCK,
    Target,
    model,
    show_targets,
    token_bytes,
)
from benchmarks.harness.server import Server, cpu_environment, run_benchmark
from benchmarks.harness.sides import FIRST_WORD, VOCAB

WITHOUT, WITH = "without cache", "with cache"
STOCK_WITHOUT = "stock without cache"
SIDES = (STOCK, WITHOUT, WITH)
REPEAT_ROOM = 1024
"""Tokens that a policy which reads a document again needs beside it, and more."""


@dataclass(frozen=True)
class Scenario:
    """A load and the memory it runs in.

    Attributes:
        about: shown in help and results.
        documents, document_len: how many, and tokens of each.
        questions: about each document.
        question_len, output_len: tokens.
        pool: how many whole documents with a question and its answer the KV memory holds.
        at_once: whether all questions come together; else one after the other, of each document in turn.
        budget: share of a document that is kept.
        step: ``--max-num-batched-tokens``; None for vLLM's default.
        rounds: how often every side runs.
        sides: that run.
        policy: of the sides that evict.
        room: tokens that a request may be longer than its prompt and its answer, as the policy needs them.
        sees_question: whether the whole prompt is evicted, with its question in view.
    """

    about: str
    documents: int
    document_len: int
    questions: int
    question_len: int
    output_len: int
    pool: int
    at_once: bool
    budget: float = 0.2
    step: int | None = None
    rounds: int = 3
    sides: tuple[str, ...] = SIDES
    policy: str = "ada-snapkv"
    room: int = 0
    sees_question: bool = False
    dtype: str = "bfloat16"

    @property
    def max_len(self) -> int:
        """Tokens of a request."""
        return self.document_len + self.question_len + self.output_len + self.room

    def kv_bytes(self) -> int:
        """KV memory, with the one block that vLLM keeps for itself."""
        return (self.pool * -(-self.max_len // BLOCK) + 1) * BLOCK * token_bytes(self.dtype)

    def prompts(self, seed: int) -> list[list[int]]:
        """The prompts in the order in which they are sent; other seeds have other documents."""
        choose = random.Random(f"{self} {seed}")
        documents = [self._tokens(choose, self.document_len) for _ in range(self.documents)]
        return [
            documents[number] + self._tokens(choose, self.question_len)
            for _ in range(self.questions)
            for number in range(self.documents)
        ]

    def _tokens(self, choose: random.Random, count: int) -> list[int]:
        return choose.choices(range(FIRST_WORD, VOCAB), k=count)


SCENARIOS = {
    "document": Scenario(
        "sixteen questions about one document at once",
        documents=1,
        document_len=8192,
        questions=16,
        question_len=32,
        output_len=256,
        pool=2,
        at_once=True,
    ),
    "documents": Scenario(
        "sixteen documents, asked in turns, in memory for four of them whole",
        documents=16,
        document_len=4096,
        questions=3,
        question_len=32,
        output_len=16,
        pool=4,
        at_once=False,
        step=8192,
    ),
    "unique": Scenario(
        "no document is asked twice, in memory for four",
        documents=24,
        document_len=2016,
        questions=1,
        question_len=32,
        output_len=256,
        pool=4,
        at_once=True,
        rounds=12,
        # What eviction is worth beside stock vLLM under this load is measured by throughput pool-bound.
        sides=(WITHOUT, WITH),
    ),
    "exact": Scenario(
        "sixteen questions about one document, one after the other, each in view when its prompt is evicted",
        documents=1,
        document_len=8192,
        questions=16,
        question_len=32,
        output_len=16,
        pool=3,
        at_once=False,
        sees_question=True,
    ),
    "unrelated": Scenario(
        "prompts that share nothing, evicted with their question in view, in memory for four",
        documents=24,
        document_len=2016,
        questions=1,
        question_len=32,
        output_len=256,
        pool=4,
        at_once=True,
        rounds=12,
        sides=(WITHOUT, WITH),
        sees_question=True,
    ),
    "compressed": Scenario(
        "sixteen questions about one document, one after the other, on what kvzip keeps of it",
        documents=1,
        document_len=8192,
        questions=16,
        question_len=32,
        output_len=16,
        pool=2,
        at_once=False,
        sides=(STOCK_WITHOUT, WITH),
        policy="kvzip",
        room=REPEAT_ROOM,
    ),
}


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
            await drive(servers[side], scenario, scenario.prompts(seed=-1)[:2])
        for number in range(scenario.rounds):
            prompts = scenario.prompts(number)
            round_: dict[str, Round] = {phase: {} for phase in phases(name, scenario)}
            for phase, sides in phases(name, scenario).items():
                for side in sides[number % 2 :] + sides[: number % 2]:
                    bench.say(f"{name}, round {number + 1}, {phase}, {side}")
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


def of_compressed(scenario: Scenario, cold: list[Round]) -> list[Target]:
    """What a document that kvzip has compressed should be worth, and was."""
    whole = -(-scenario.document_len // PAGE) * LAYERS * KV_HEADS

    def after_the_first(run: Run) -> float:
        return median(run.first_token[scenario.documents :])

    pages = max(one[WITH].cached_pages for one in cold) / whole
    first = "time to first token after the first question, over stock without cache"
    return [
        Target(first, _ratio(cold, after_the_first, WITH, STOCK_WITHOUT), 0.02, True),
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
