"""The soak whose server gets other weights again and again, while clients ask about documents and chat.

Nobody may be answered from KV that was read with earlier weights. All questions are first asked with nothing cached,
with each of three sets of weights. Under load, a request that met one set only must be answered as it was then.
"""

import argparse
import asyncio
import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.conversations import BLOCK
from benchmarks.harness.models import make_model
from benchmarks.harness.questions import Question
from benchmarks.harness.scenarios import Target
from benchmarks.harness.server import Server
from benchmarks.harness.soaking import FOLDER, PATIENCE, SoakRun, none, reset
from benchmarks.harness.traffic import EXPECTED, WRONG, Outcome, asked, send
from benchmarks.harness.updates import (
    CHATS,
    GOOD,
    MIXABLE,
    MIXED,
    STALE,
    TURNS,
    UPDATES,
    WITHOUT_RESET,
    Chat,
    Timeline,
    Update,
    about_documents,
    found_in,
    in_turns,
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

    good = GOOD

    def __init__(self, arguments: argparse.Namespace):
        control: bool = arguments.without_reset
        super().__init__("soak-without-reset" if control else "soak-updates", arguments, FLAGS)
        self.ways = WITHOUT_RESET if control else UPDATES
        self.models: list[Path] = []
        self.answers: dict[Question, list[str]] = {}
        self.in_flight: list[Question] = []
        self.timeline = Timeline()
        self.updates: Counter[str] = Counter()
        self.compared: Counter[tuple[str, str]] = Counter()

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
        await self.settle(server, client)

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
        numbers = self.numbers()

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

    async def _ask(self, client: httpx.AsyncClient, choose: random.Random, question: Question) -> str:
        """Ask, and note what becomes of it."""
        stream = choose.random() < 0.5
        leave = choose.choice((0, 1, 3) if stream else (0.02, 0.1)) if choose.random() < 0.05 else None
        sent = self.timeline.moment
        self.in_flight.append(question)
        outcome = await send(client, asked(question, question.body("model", stream), leave))
        self.in_flight.remove(question)
        return self.note_answer(question, sent, outcome, stream)

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
            await _post(client, "/resume")

    # What was seen.

    def note_answer(self, question: Question, sent: int, outcome: Outcome, stream: bool = False) -> str:
        """Count what became of a request that was sent at a moment of the timeline and has just ended."""
        expected, weights = self.answers[question], self.timeline.weights
        result = judge(self.timeline, sent, outcome, expected)
        if result in (EXPECTED, STALE) and outcome.answer:
            self.compared[found_in(outcome.answer.cached), result] += 1
        kind = question.kind + (", streamed" if stream else "")
        self.note(kind, outcome, result, **question.fields, moment=sent, expected=expected[weights])
        return result

    def judge(self, tracebacks: int) -> None:
        """Hold everything against what is required."""
        alike = sum(len(set(answers)) < WEIGHTS for answers in self.answers.values())
        rarest = min(self.updates[str(way)] for way in self.ways)
        self.requirements = [
            none("answers that were not as with nothing cached", self.count(STALE)),
            none("answers of several sets of weights after a pause", self.count(MIXED)),
            self._hits("compressed prefix"),
            self._hits("uncompressed prefix"),
            Target("updates of the rarest kind", rarest, 1),
            none("questions that two sets of weights answer alike", alike),
            none("answers refused, cut short or too long", self.count(WRONG)),
            *self.shared_requirements(tracebacks),
        ]

    def _hits(self, where: str) -> Target:
        """How many of the compared answers began in one of the caches."""
        found = sum(times for (kind, _), times in self.compared.items() if kind == where)
        share = found / max(1, self.compared.total())
        return Target(f"share of compared answers with hits in {where}es", share, HITS)

    def rows(self) -> dict[str, int]:
        """What was compared, and the updates."""
        compared = {
            f"began with {found}: {result}": n for (found, result), n in sorted(self.compared.items())
        }
        updates = {f"update: {name}": times for name, times in sorted(self.updates.items())}
        return compared | updates

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
    body = replace(question, salt=f"alone {salt}").body("model")
    outcome = await send(client, asked(question, body))
    if outcome.result != EXPECTED or outcome.answer is None or outcome.answer.cached:
        raise RuntimeError(f"{question} was not answered as with nothing cached: {outcome}")
    return outcome.answer.text
