"""The soak whose server gets other weights again and again, while clients ask about documents and chat.

Nobody may be answered from KV that was read with earlier weights. All questions are first asked with nothing cached,
with each of three sets of weights. Under load, a request that met one set only must be answered as it was then.
"""

import argparse
import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.models import make_model
from benchmarks.harness.server import Server, Snapshot
from benchmarks.harness.soaking import (
    BLOCK,
    FOLDER,
    KEPT_FAILURES,
    PATIENCE,
    Requirement,
    SoakRun,
    reset,
    until_idle,
)
from benchmarks.harness.traffic import BROKEN, EXPECTED, HUNG, WRONG, Outcome, send
from benchmarks.harness.updates import (
    CHATS,
    MIXABLE,
    MIXED,
    STALE,
    TURNS,
    UPDATES,
    WITHOUT_RESET,
    Chat,
    Question,
    Timeline,
    Update,
    about_documents,
    found_in,
    in_turns,
    is_good,
    judge,
)
from vllm_kvevict.policies import available

MAX_LEN, WEIGHTS = 512, 3
FLAGS = (
    *("--kv-eviction", "take", "--kv-eviction-config.take_chunk", "64", "--kv-eviction-config.policies", "all"),
    *("--kv-eviction-config.min_prompt", "32", "--dtype", "float32"),
    *("--max-model-len", str(MAX_LEN), "--max-num-seqs", "16", "--max-num-batched-tokens", "96"),
    *("--block-size", str(BLOCK), "--num-gpu-blocks-override", "96", "--enforce-eager"),
    *("--served-model-name", "model", "--enable-prompt-tokens-details"),
)  # fmt: skip
"""Memory for six requests of MAX_LEN: prefixes stay cached, but not all of them, and not for long.

Documents are read in several steps, so that weights change in between."""
CONCURRENCY = 12
BETWEEN = 0.5, 4.0
"""Seconds from one update to the next, at least and at most."""
LONGEST_PAUSE, SENT_AGAIN = 0.3, 6
"""Seconds before weights change, or between that and a reset without a pause; and how many of the requests that are in
flight are sent again at once, on top of the others."""
HITS = 0.1
"""Share of the compared answers that must begin in each of the caches; without hits they would prove nothing."""


class UpdateSoak(SoakRun):
    """One run: the load, what was seen, and the verdict."""

    def __init__(self, arguments: argparse.Namespace):
        self.is_control = arguments.without_reset
        super().__init__("soak-without-reset" if self.is_control else "soak-updates", arguments, FLAGS)
        self.ways: Sequence[Update] = WITHOUT_RESET if self.is_control else UPDATES
        self.models: list[Path] = []
        self.answers: dict[Question, list[str]] = {}
        self.in_flight: list[Question] = []
        self.timeline = Timeline()
        self.updates: Counter[str] = Counter()
        self.compared: Counter[tuple[str, str]] = Counter()
        self.sent_while_paused = 0
        self.idle = self.empty = Snapshot()

    def model(self) -> Path:
        """One of several sets of weights."""
        self.models = [
            make_model(FOLDER / f"weights-{seed}", **self.sizes, seed=seed) for seed in range(WEIGHTS)
        ]
        return self.models[0]

    async def load(self, server: Server, client: httpx.AsyncClient) -> None:
        """Questions with nothing cached, then clients and updates, and a reset at the end."""
        client.timeout = httpx.Timeout(PATIENCE)
        await self._ask_all(client)
        self.console.print(
            f"{len(self.answers)} questions, each with {WEIGHTS} sets of weights; now the load"
        )
        await self._clients(server, client)
        self.idle = await until_idle(server)
        await reset(client)
        self.empty = await until_idle(server, empty=True)

    # What has to be answered.

    async def _ask_all(self, client: httpx.AsyncClient) -> None:
        """Ask every question with all weights; nothing is found in a cache."""
        salts = itertools.count()
        questions = about_documents(list(available()), self.arguments.seed)
        for weights in range(WEIGHTS):
            await self._set_weights(client, weights)
            for number, policy in zip(range(CHATS), ("full", "ada-snapkv", "lava"), strict=True):
                chat = Chat(policy, seed=number)
                for _ in range(TURNS):
                    questions.append(chat.next())
                    chat.answered(await _alone(client, questions[-1], next(salts)))
        self.answers = {question: [] for question in questions}
        for weights in range(WEIGHTS):
            await self._set_weights(client, weights)
            for question, answers in self.answers.items():
                answers.append(await _alone(client, question, next(salts)))
        self.timeline = Timeline(WEIGHTS - 1)

    async def _set_weights(self, client: httpx.AsyncClient, weights: int) -> None:
        path = {"weights_path": str(self.models[weights])}
        await _post(client, "/collective_rpc", json={"method": "reload_weights", "kwargs": path})

    # The load.

    async def _clients(self, server: Server, client: httpx.AsyncClient) -> None:
        """Clients and updates, until there are to be no more requests and all are answered."""
        over = asyncio.Event()
        numbers = self._numbers()

        async def ask_on(choose: random.Random) -> None:
            for _ in numbers:
                server.check()
                question = choose.choice(list(self.answers))
                # Whoever went on with other weights must leave nothing, which the next one would find.
                while await self._ask(client, choose, question) == MIXABLE:
                    pass

        async def ask_all() -> None:
            seeds = range(self.arguments.seed, self.arguments.seed + CONCURRENCY)
            try:
                await asyncio.gather(*(ask_on(random.Random(seed)) for seed in seeds))
            finally:
                over.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask_all())
            tasks.create_task(self._update_until(over, client))

    def _numbers(self) -> Any:
        """Of the requests, as long as there are to be more."""
        start, minutes = time.monotonic(), self.arguments.minutes
        numbers = itertools.count() if minutes is not None else range(self.arguments.requests)
        return itertools.takewhile(
            lambda _: minutes is None or time.monotonic() - start < 60 * minutes, numbers
        )

    async def _ask(self, client: httpx.AsyncClient, choose: random.Random, question: Question) -> str:
        """Ask, and note what becomes of it."""
        stream = choose.random() < 0.5
        leave = choose.choice((0, 1, 3) if stream else (0.02, 0.1)) if choose.random() < 0.05 else None
        sent = self.timeline.moment
        self.sent_while_paused += self.timeline.paused
        self.in_flight.append(question)
        outcome = await send(client, question.ask("model", stream=stream, leave=leave))
        self.in_flight.remove(question)
        return self.note(question, sent, outcome, stream)

    def _ask_again(self, asking: asyncio.TaskGroup, client: httpx.AsyncClient, choose: random.Random) -> None:
        """Ask some of what was asked before the update: who begins alike must not begin with what those read."""
        if choose.random() < 0.5:  # else those leave something first, if they do
            return
        for question in choose.sample(self.in_flight, min(SENT_AGAIN, len(self.in_flight))):
            asking.create_task(self._ask(client, choose, question))

    async def _update_until(self, over: asyncio.Event, client: httpx.AsyncClient) -> None:
        choose = random.Random(self.arguments.seed)
        for update in in_turns(self.ways, self.arguments.seed):
            try:
                async with asyncio.timeout(choose.uniform(*BETWEEN)):
                    await over.wait()
                return
            except TimeoutError:
                await self._update(client, update, choose)

    async def _update(self, client: httpx.AsyncClient, update: Update, choose: random.Random) -> None:
        """Change the weights; the server goes on as before afterwards."""
        weights = choose.choice([other for other in range(WEIGHTS) if other != self.timeline.weights])
        self.timeline.begin(update)
        async with asyncio.TaskGroup() as asking:
            if update.pause:
                clears = str(update.clears).lower()
                await _post(client, "/pause", params={"mode": update.pause, "clear_cache": clears})
                # Whoever comes now is read after the pause, so with the new weights only.
                self.timeline.settle(weights)
                self.timeline.paused = True
                self._ask_again(asking, client, choose)
                await asyncio.sleep(choose.uniform(0, LONGEST_PAUSE))
            await self._set_weights(client, weights)
            await self._end(client, update, choose)
            if not update.pause:
                self.timeline.settle(weights)
                self._ask_again(asking, client, choose)
        self.updates[str(update)] += 1

    async def _end(self, client: httpx.AsyncClient, update: Update, choose: random.Random) -> None:
        """What comes after the weights have changed."""
        if not update.pause:
            await asyncio.sleep(choose.uniform(0, LONGEST_PAUSE))
        if update.reset:
            await reset(client, hard=update.reset == "hard")
        if update.pause:
            self.timeline.paused = False
            await _post(client, "/resume")

    # What was seen.

    def note(self, question: Question, sent: int, outcome: Outcome, stream: bool = False) -> str:
        """Count what became of a request that was sent at a moment of the timeline and has just ended."""
        expected = self.answers[question]
        result = judge(self.timeline, sent, outcome, expected)
        self.tally[question.kind + (", streamed" if stream else ""), result] += 1
        self.server_errors += outcome.status is not None and outcome.status >= 500
        if result in (EXPECTED, STALE) and outcome.answer:
            self.compared[found_in(outcome.answer.cached), result] += 1
        if not is_good(result) and len(self.failures) < KEPT_FAILURES:
            asked = {"kind": question.kind, **question.fields, "moment": sent}
            seen = {**asdict(outcome), "result": result, "expected": expected[self.timeline.weights]}
            self.failures.append({**asked, "weights": self.timeline.weights, **seen})
        return result

    def judge(self, tracebacks: int) -> None:
        """Hold everything against what is required."""

        def count(wanted: str) -> int:
            return sum(times for (_, result), times in self.tally.items() if result == wanted)

        alike = sum(len(set(answers)) < WEIGHTS for answers in self.answers.values())
        self.requirements = [
            Requirement("answers that were not as with nothing cached", count(STALE)),
            Requirement("answers of several sets of weights after a pause", count(MIXED)),
            self._hits("compressed prefix"),
            self._hits("uncompressed prefix"),
            Requirement(
                "updates of the rarest kind", min(self.updates[str(way)] for way in self.ways), 1, False
            ),
            Requirement("questions that two sets of weights answer alike", alike),
            Requirement("requests that hung", count(HUNG)),
            Requirement("connections that broke off", count(BROKEN)),
            Requirement("answers refused, cut short or too long", count(WRONG)),
            Requirement("answers 5xx", self.server_errors),
            Requirement("tracebacks in the server's log", tracebacks),
            Requirement("requests running or waiting when idle", self.idle.running + self.idle.waiting),
            Requirement("pages held when idle", self.idle.request_pages),
            Requirement("pages held after a last reset", self.empty.physical_pages or 0),
        ]

    def _hits(self, where: str) -> Requirement:
        """How many of the compared answers began in one of the caches."""
        found = sum(times for (kind, _), times in self.compared.items() if kind == where)
        share = found / max(1, self.compared.total())
        return Requirement(f"share of compared answers with hits in {where}es", share, HITS, at_most=False)

    def rows(self) -> dict[str, int]:
        """What was compared, and the updates."""
        compared = {
            f"began with {found}: {result}": n for (found, result), n in sorted(self.compared.items())
        }
        updates = {f"update: {name}": times for name, times in sorted(self.updates.items())}
        return {**compared, "sent while the server paused": self.sent_while_paused, **updates}

    def results(self) -> dict[str, Any]:
        """For the record."""
        return {
            "concurrency": CONCURRENCY,
            "questions": len(self.answers),
            "counts": self.counted() | self.rows(),
            "preemptions": self.idle.preemptions,
            "evictions": self.idle.evictions,
        }


async def _post(client: httpx.AsyncClient, path: str, **arguments: Any) -> None:
    (await client.post(path, **arguments)).raise_for_status()


async def _alone(client: httpx.AsyncClient, question: Question, salt: int) -> str:
    """The answer with nothing cached and nobody else there."""
    outcome = await send(client, question.ask("model", salt=f"alone {salt}"))
    if outcome.result != EXPECTED or outcome.answer is None or outcome.answer.cached:
        raise RuntimeError(f"{question} was not answered as with nothing cached: {outcome}")
    return outcome.answer.text
