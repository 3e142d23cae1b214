"""Documents with many questions: stock vLLM with its prefix cache, eviction without one, eviction with one.

All sides have the same KV memory and take turns. The document is evicted without a question in view
(``kv_prefix_len``); stock vLLM keeps it whole. The scenarios ``long`` and ``compressed``, whose policy loses little
without the question, compare with stock vLLM without its prefix cache. In the scenarios ``exact`` and ``unrelated``
prompts are evicted with their question in view, so that only uncompressed prefixes can be found. In ``windows`` and
``states`` only some layers are evicted, and the same is served with a model of which all are; stock vLLM cannot cache
states on CPUs.
"""

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import httpx

from benchmarks.harness.bench import measure, parse
from benchmarks.harness.documents import Answer, Run, ask, environment, measured
from benchmarks.harness.load import PAGE
from benchmarks.harness.scenarios import (
    KV_HEADS,
    LAYERS,
    STOCK,
    Comparison,
    Round,
    Target,
    over,
    speed,
)
from benchmarks.harness.server import Server, run_benchmark
from benchmarks.harness.sides import FIRST_WORD, VOCAB
from benchmarks.harness.tables import Columns

WITHOUT, WITH = "without cache", "with cache"
STOCK_WITHOUT = "stock without cache"
ALL_EVICTED = "all layers evicted"
SIDES = (STOCK, WITHOUT, WITH)
WARM = ", warm"
"""How the names of turns end that ask once more what was just asked."""
REPEAT_ROOM = 1024
"""Tokens that a policy which reads a document again needs beside it, and more."""
LONGEST_FIRST = 8192
"""Tokens of a document with which a server is tried before it is measured."""


@dataclass(frozen=True)
class Scenario(Comparison):
    """Questions about documents.

    Attributes:
        documents, document_len: how many, and tokens of each.
        questions: about each document.
        question_len, output_len: tokens.
        at_once: whether all questions come together; else one after the other, of each document in turn.
        budget: share of a document that is kept.
        step: ``--max-num-batched-tokens``; None for vLLM's default.
        sides: that run.
        policy: of the sides that evict.
        room: tokens that a request may be longer than its prompt and its answer, as the policy needs them.
        sees_question: whether the whole prompt is evicted, with its question in view.
        warm: whether the sides that cache are asked once more what they were just asked.
    """

    documents: int
    document_len: int
    questions: int
    output_len: int
    at_once: bool
    question_len: int = 32
    budget: float = 0.2
    step: int | None = None
    sides: tuple[str, ...] = SIDES
    policy: str = "ada-snapkv"
    room: int = 0
    sees_question: bool = False
    warm: bool = False

    @property
    def max_len(self) -> int:
        """Tokens of a request."""
        return self.document_len + self.question_len + self.output_len + self.room

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

    def schedule(self, number: int = 0) -> dict[str, str]:
        """All sides, then the warm ones."""
        cold = super().schedule(number)
        return cold | {f"{side}{WARM}": side for side in cold if self.warm and side in (STOCK, WITH)}

    def first(self) -> "Scenario":
        """Two questions about one document."""
        return replace(self, documents=1, questions=2, document_len=min(self.document_len, LONGEST_FIRST))

    def server(self, side: str, threads: int | None) -> Server:
        """The server of a side, not started yet."""
        flags = [] if self.step is None else ["--max-num-batched-tokens", str(self.step)]
        if side in (WITHOUT, WITH, ALL_EVICTED):
            flags += ["--kv-eviction", self.policy, "--kv-budget", f"{self.budget:g}"]
        if side in (STOCK_WITHOUT, WITHOUT):
            flags += ["--no-enable-prefix-caching"]
        served = replace(self, all_evicted=side == ALL_EVICTED)
        return served.serve(side, flags, environment(threads))

    async def send(self, server: Server, turn: str, number: int) -> Run:
        """Ask all questions."""
        lengths = None if self.sees_question else self.document_len, self.output_len

        async def ask_all(client: httpx.AsyncClient) -> list[Answer]:
            questions = [ask(client, server, prompt, *lengths) for prompt in self.prompts(number)]
            return await asyncio.gather(*questions) if self.at_once else [await one for one in questions]

        return await measured(server, ask_all)

    def columns(self) -> Columns:
        """Waits, and what was found in the cache."""
        return {
            "seconds": (lambda run: run.wall, ".1f"),
            "tokens/s": (speed, ".1f"),
            "first token, mean s": (mean_wait, ".3f"),
            "slowest": (lambda run: max(run.first_token), ".3f"),
            "computed": (lambda run: run.computed, ".0f"),
            "hits": (lambda run: run.hits, ".0f"),
            "preempted": (lambda run: run.preemptions, ".0f"),
        }

    def targets(self, name: str, rounds: Sequence[Round]) -> list[Target]:
        """What the scenario should reach, and what it did."""
        if name == "document":
            return self._of_document(rounds)
        if name == "documents":
            return self._of_documents(rounds)
        if name in ("unique", "unrelated"):
            return of_unique(rounds)
        if name in ("windows", "states"):
            return self._of_mixed_layers(rounds)
        if name == "exact":
            return [self._after_the_first(rounds, WITHOUT, 0.06)]
        found = [self._after_the_first(rounds, STOCK_WITHOUT, 0.02)]
        if name == "compressed":
            whole = -(-self.document_len // PAGE) * LAYERS * KV_HEADS
            pages = max(one[WITH].held_by_each for one in rounds) / whole
            found.append(Target("pages of the compressed document, over the whole one's", pages, 0.25, True))
        return found

    def _of_mixed_layers(self, rounds: Sequence[Round]) -> list[Target]:
        """A document that is read once, and a hit that is as fast as where all layers are evicted."""
        least = self.document_len + self.questions * self.question_len
        return [
            Target("prompt tokens computed", max(one[WITH].computed for one in rounds), least, True),
            self._after_the_first(rounds, ALL_EVICTED, 1.1),
        ]

    def _of_document(self, rounds: Sequence[Round]) -> list[Target]:
        """Sixteen questions at once."""
        least = self.document_len + self.questions * self.question_len
        first = "time to first token, mean"
        warm = over(rounds, mean_wait, WITH + WARM, WITHOUT)
        return [
            Target(f"{first}, over without cache", over(rounds, mean_wait, WITH, WITHOUT), 0.15, True),
            Target(f"{first}, over stock", over(rounds, mean_wait, WITH, STOCK), 1.1, True),
            Target(f"{first}, warm, over without cache", warm, 0.02, True),
            Target("output tokens/s, over stock", over(rounds, speed, WITH, STOCK), 1.5),
            Target("prompt tokens computed", max(one[WITH].computed for one in rounds), least, True),
        ]

    def _of_documents(self, rounds: Sequence[Round]) -> list[Target]:
        """Documents in turns."""
        again = self.documents * (self.questions - 1)
        hits, of_stock = min(one[WITH].hits for one in rounds), max(one[STOCK].hits for one in rounds)
        later = over(rounds, self._later_wait, WITH, STOCK)
        return [
            Target("requests that hit after the first pass", hits / again, 0.95),
            Target("the same of stock", of_stock / again, 0.05, True),
            Target("time to first token after that, over stock", later, 0.06, True),
        ]

    def _after_the_first(self, rounds: Sequence[Round], base: str, bound: float) -> Target:
        """What a document that was read before is worth to the questions after the first."""
        name = f"time to first token after the first question, over {base}"
        return Target(name, over(rounds, self._later_wait, WITH, base), bound, True)

    def _later_wait(self, run: Run) -> float:
        return median(run.first_token[self.documents :])


def mean_wait(run: Any) -> float:
    """Seconds until the first token."""
    return mean(run.first_token)


def of_unique(rounds: Sequence[Round]) -> list[Target]:
    """What the cache may cost where it is of no use, and did."""
    more = max(one[WITH].preemptions - one[WITHOUT].preemptions for one in rounds)
    return [
        Target("output tokens/s, over without cache", over(rounds, speed, WITH, WITHOUT), 0.98),
        Target("preemptions beyond those without cache", more, 0, True),
    ]


ONE = Scenario(
    "sixteen questions about one document at once",
    documents=1,
    document_len=8192,
    questions=16,
    output_len=256,
    pool=2,
    at_once=True,
    warm=True,
)
ONE_BY_ONE = replace(ONE, about="one after the other", output_len=16, at_once=False, warm=False)
UNIQUE = Scenario(
    "no document is asked twice, in memory for four",
    documents=24,
    document_len=2016,
    questions=1,
    output_len=256,
    pool=4,
    at_once=True,
    rounds=12,
    # What eviction is worth beside stock vLLM under this load is measured by throughput pool-bound.
    sides=(WITHOUT, WITH),
)
SCENARIOS = {
    "document": ONE,
    "documents": replace(
        ONE_BY_ONE,
        about="sixteen documents, asked in turns, in memory for four of them whole",
        documents=16,
        document_len=4096,
        questions=3,
        pool=4,
        step=8192,
    ),
    "unique": UNIQUE,
    "exact": replace(
        ONE_BY_ONE,
        about="sixteen questions about one document, one after the other, each in view when its prompt is evicted",
        pool=3,
        sees_question=True,
    ),
    "unrelated": replace(
        UNIQUE,
        about="prompts that share nothing, evicted with their question in view, in memory for four",
        sees_question=True,
    ),
    "compressed": replace(
        ONE_BY_ONE,
        about="sixteen questions about one document, one after the other, on what kvzip keeps of it",
        sides=(STOCK_WITHOUT, WITH),
        policy="kvzip",
        room=REPEAT_ROOM,
    ),
    "windows": replace(
        ONE_BY_ONE,
        about="sixteen questions about one document, one after the other, where three of four layers see a window",
        sides=(STOCK, WITH, ALL_EVICTED),
        architecture="gemma3_text",
    ),
    "states": replace(
        ONE_BY_ONE,
        about="sixteen questions about one document, one after the other, where half of the layers have a state",
        sides=(WITH, ALL_EVICTED),
        architecture="granitemoehybrid",
    ),
    "long": replace(
        ONE_BY_ONE,
        about="two questions about one document of 32k tokens, one after the other",
        document_len=32768,
        questions=2,
        sides=(STOCK_WITHOUT, WITH),
    ),
}

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


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[Any, dict[str, Scenario]]:
    """The options, and the scenarios to run, by name."""
    return parse("prefix", __doc__, SCENARIOS, SIZES, argv)


def main() -> int:
    """Run scenarios; the exit code."""
    return run_benchmark(measure("prefix", *parse_arguments(), SCENARIOS))


if __name__ == "__main__":
    sys.exit(main())
