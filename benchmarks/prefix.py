"""Documents with many questions: stock vLLM with its prefix cache, eviction without one, eviction with one.

All sides have the same KV memory and take turns. The document is evicted without a question in view
(``kv_prefix_len``); stock vLLM keeps it whole. The scenarios ``long`` and ``compressed``, whose policy loses little
without the question, compare with stock vLLM without its prefix cache. In the scenarios ``exact`` and ``unrelated``
prompts are evicted with their question in view, so that only uncompressed prefixes can be found.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

import httpx
from rich.table import Table

from benchmarks.harness import command, documents
from benchmarks.harness.command import Benchmark, Round
from benchmarks.harness.documents import Answer, Run, ask
from benchmarks.harness.load import PAGE
from benchmarks.harness.measure import Estimate, paired_ratio
from benchmarks.harness.questions import SCENARIOS, STOCK_WITHOUT, WITH, WITHOUT, Scenario
from benchmarks.harness.scenarios import KV_HEADS, LAYERS, STOCK, Target
from benchmarks.harness.server import Server
from benchmarks.harness.tables import typical

LONGEST_FIRST = 8192
"""Tokens of a document with which a server is tried before it is measured."""


Runs = dict[str, Run]
"""By side."""


def make_server(name: str, scenario: Scenario, side: str, threads: int | None) -> Server:
    """The server of a side, not started yet."""
    flags = [] if scenario.step is None else ["--max-num-batched-tokens", str(scenario.step)]
    if side in (WITHOUT, WITH):
        flags += ["--kv-eviction", scenario.policy, "--kv-budget", f"{scenario.budget:g}"]
    if side in (STOCK_WITHOUT, WITHOUT):
        flags += ["--no-enable-prefix-caching"]
    return documents.make_server(f"prefix-{side.replace(' ', '-')}", scenario, flags, threads)


async def drive(server: Server, scenario: Scenario, side: str, number: int) -> Run:
    """Send a round's load to one side, two prompts to warm up."""
    prompts = scenario.prompts(number)[: 2 if number < 0 else None]
    lengths = None if scenario.sees_question else scenario.document_len, scenario.output_len

    async def send(client: httpx.AsyncClient) -> list[Answer]:
        questions = [ask(client, server, prompt, *lengths) for prompt in prompts]
        return await asyncio.gather(*questions) if scenario.at_once else [await one for one in questions]

    return await documents.measured(server, send)


def phases(name: str, scenario: Scenario) -> dict[str, tuple[str, ...]]:
    """The phases of a round of this scenario, and the sides that take part.

    Warm, the sides that cache are asked once more what they were just asked.
    """
    return {"cold": scenario.sides} | ({"warm": (STOCK, WITH)} if name == "document" else {})


def first(scenario: Scenario) -> Scenario:
    """What a server is tried with before it is measured."""
    return replace(scenario, document_len=min(scenario.document_len, LONGEST_FIRST))


def _ratio(rounds: Sequence[Runs], what: Any, ours: str, theirs: str) -> Estimate:
    return paired_ratio([what(one[ours]) for one in rounds], [what(one[theirs]) for one in rounds])


def _mean_wait(run: Run) -> float:
    return mean(run.first_token)


def _speed(run: Run) -> float:
    return run.tokens_per_second


def of_document(scenario: Scenario, cold: list[Runs], rounds: Sequence[Round]) -> list[Target]:
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


def of_documents(scenario: Scenario, cold: list[Runs]) -> list[Target]:
    """What questions about documents in turns should reach, and did."""
    again = scenario.documents * (scenario.questions - 1)

    def later(run: Run) -> float:
        return median(run.first_token[scenario.documents :])

    return [
        Target("requests that hit after the first pass", min(one[WITH].hits for one in cold) / again, 0.95),
        Target("the same of stock", max(one[STOCK].hits for one in cold) / again, 0.05, True),
        Target("time to first token after that, over stock", _ratio(cold, later, WITH, STOCK), 0.06, True),
    ]


def of_unique(cold: list[Runs]) -> list[Target]:
    """What the cache may cost where it is of no use, and did."""
    more = max(one[WITH].preemptions - one[WITHOUT].preemptions for one in cold)
    return [
        Target("output tokens/s, over without cache", _ratio(cold, _speed, WITH, WITHOUT), 0.98),
        Target("preemptions beyond those without cache", more, 0, True),
    ]


def after_the_first(scenario: Scenario, cold: list[Runs], base: str, bound: float) -> Target:
    """What a document that was read before should be worth to the questions after the first, and was."""

    def wait(run: Run) -> float:
        return median(run.first_token[scenario.documents :])

    over = "without cache" if base == WITHOUT else base
    name = f"time to first token after the first question, over {over}"
    return Target(name, _ratio(cold, wait, WITH, base), bound, True)


def of_compressed(scenario: Scenario, cold: list[Runs]) -> list[Target]:
    """What a document that kvzip has compressed should be worth, and was."""
    whole = -(-scenario.document_len // PAGE) * LAYERS * KV_HEADS
    pages = max(one[WITH].held_by_each for one in cold) / whole
    return [
        after_the_first(scenario, cold, STOCK_WITHOUT, 0.02),
        Target("pages of the compressed document, over the whole one's", pages, 0.25, True),
    ]


def figures(name: str, scenario: Scenario, rounds: Sequence[Round]) -> list[Target]:
    """What the scenario should reach, and what it did."""
    cold = [one["cold"] for one in rounds]
    if name == "document":
        return of_document(scenario, cold, rounds)
    if name == "documents":
        return of_documents(scenario, cold)
    if name == "exact":
        return [after_the_first(scenario, cold, WITHOUT, 0.06)]
    if name == "long":
        return [after_the_first(scenario, cold, STOCK_WITHOUT, 0.02)]
    return of_compressed(scenario, cold) if name == "compressed" else of_unique(cold)


def table(title: str, scenario: Scenario, rounds: Sequence[Round]) -> Table:
    """Medians over the rounds."""
    sides = {
        f"{side}, {phase}": [one[phase][side] for one in rounds]
        for phase in rounds[0]
        for side in rounds[0][phase]
    }
    columns = {
        "seconds": (lambda run: run.wall, ".1f"),
        "tokens/s": (_speed, ".1f"),
        "first token, mean s": (_mean_wait, ".3f"),
        "slowest": (lambda run: max(run.first_token), ".3f"),
        "computed": (lambda run: run.computed, ".0f"),
        "hits": (lambda run: run.hits, ".0f"),
        "preempted": (lambda run: run.preemptions, ".0f"),
    }
    return typical(f"{title}, {scenario.policy}, budget {scenario.budget:g}", sides, columns)


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


BENCHMARK = Benchmark("prefix", __doc__, SCENARIOS, SIZES, make_server, first, drive, table, figures, phases)

if __name__ == "__main__":
    sys.exit(command.main(BENCHMARK))
