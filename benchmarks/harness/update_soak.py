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
from rich.table import Table

from benchmarks.harness.measure import RESULTS, record, save, warn_if_busy
from benchmarks.harness.models import make_model
from benchmarks.harness.requirements import Requirement, SoakRun, tracebacks
from benchmarks.harness.server import Server, Snapshot, cpu_environment
from benchmarks.harness.traffic import BROKEN, EXPECTED, HUNG, WRONG, Outcome, send
from benchmarks.harness.updates import (
    BLOCK,
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
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
"""GiB that vLLM may take; and what makes it offer to change weights and to reset its cache."""
CONCURRENCY = 12
BETWEEN = 0.5, 4.0
"""Seconds from one update to the next, at least and at most."""
LONGEST_PAUSE, SENT_AGAIN = 0.3, 6
"""Seconds before weights change, or between that and a reset without a pause; and how many of the requests that are in
flight are sent again at once, on top of the others."""
PATIENCE = 180.0
"""Seconds that a pause may wait for requests, and the server for the last of them to leave."""
HITS = 0.1
"""Share of the compared answers that must begin in each of the caches; without hits they would prove nothing."""
KEPT_FAILURES = 20


class UpdateSoak(SoakRun):
    """One run: the load, what was seen, and the verdict.

    Args:
        arguments: the soak's.
        folder: for models and logs, and for records that are not the project's.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path):
        super().__init__(arguments, FLAGS)
        self.folder = folder
        self.ways: Sequence[Update] = WITHOUT_RESET if arguments.without_reset else UPDATES
        self.models: list[Path] = []
        self.table: dict[Question, list[str]] = {}
        self.in_flight: list[Question] = []
        self.timeline = Timeline()
        self.updates: Counter[str] = Counter()
        self.compared: Counter[tuple[str, str]] = Counter()
        self.sent_while_paused = 0

    async def run(self) -> None:
        """Everything: start, questions with nothing cached, load, verdict, record."""
        load_average = warn_if_busy(self.console)
        self.models = [
            make_model(self.folder / f"weights-{seed}", layers=2, hidden=64, max_len=MAX_LEN, seed=seed)
            for seed in range(WEIGHTS)
        ]
        env = cpu_environment(1, self.ranks) | ENVIRONMENT
        env["VLLM_KVEVICT_CHECK"] = str(int(self.arguments.check))
        server = Server(self.models[0], self.folder / "updates.log", self.flags, env)
        self.console.print(f"starting vllm serve {' '.join(self.flags)}", highlight=False)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with server, httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as client:
            await self._ask_all(client)
            self.console.print(
                f"{len(self.table)} questions, each with {WEIGHTS} sets of weights; now the load"
            )
            start = time.monotonic()
            await self._load(server, client)
            seconds = time.monotonic() - start
            idle = await _idle(server)
            await _reset(client)
            empty = await _idle(server, empty=True)
            server.check()
            log = server.log.read_text(errors="replace")  # the end of a server brings lines of its own
        self.judge(idle, empty, tracebacks(log))
        self._report(seconds, load_average, idle)

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
        self.table = {question: [] for question in questions}
        for weights in range(WEIGHTS):
            await self._set_weights(client, weights)
            for question, answers in self.table.items():
                answers.append(await _alone(client, question, next(salts)))
        self.timeline = Timeline(WEIGHTS - 1)

    async def _set_weights(self, client: httpx.AsyncClient, weights: int) -> None:
        path = {"weights_path": str(self.models[weights])}
        await _post(client, "/collective_rpc", json={"method": "reload_weights", "kwargs": path})

    # The load.

    async def _load(self, server: Server, client: httpx.AsyncClient) -> None:
        """Clients and updates, until there are to be no more requests and all are answered."""
        over = asyncio.Event()
        numbers = self._numbers()

        async def ask_on(choose: random.Random) -> None:
            for _ in numbers:
                server.check()
                question = choose.choice(list(self.table))
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
            await _reset(client, hard=update.reset == "hard")
        if update.pause:
            self.timeline.paused = False
            await _post(client, "/resume")

    # What was seen.

    def note(self, question: Question, sent: int, outcome: Outcome, stream: bool = False) -> str:
        """Count what became of a request that was sent at a moment of the timeline and has just ended."""
        expected = self.table[question]
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

    def judge(self, idle: Snapshot, empty: Snapshot, tracebacks: int) -> None:
        """Hold everything against what is required.

        Args:
            idle: the server when all requests were over.
            empty: and when its cache was then emptied.
            tracebacks: in its log.
        """

        def count(wanted: str) -> int:
            return sum(times for (_, result), times in self.tally.items() if result == wanted)

        alike = sum(len(set(answers)) < WEIGHTS for answers in self.table.values())
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
            Requirement("requests running or waiting when idle", idle.running + idle.waiting),
            Requirement("pages held when idle", idle.request_pages),
            Requirement("pages held after a last reset", empty.physical_pages or 0),
        ]

    def _hits(self, where: str) -> Requirement:
        """How many of the compared answers began in one of the caches."""
        found = sum(times for (kind, _), times in self.compared.items() if kind == where)
        share = found / max(1, self.compared.total())
        return Requirement(f"share of compared answers with hits in {where}es", share, HITS, at_most=False)

    def show(self, seconds: float) -> Table:
        """Tally and requirements."""
        table = Table(title=f"{self.answered} requests, {self.updates.total()} updates in {seconds:.0f} s")
        for heading in ("", "", "bound"):
            table.add_column(heading, justify="right" if table.columns else "left")
        for name, value in self._counts().items():
            table.add_row(name, str(value), "")
        table.add_section()
        for of in self.requirements:
            bound = f"{'at most' if of.at_most else 'at least'} {of.bound:g}"
            table.add_row(of.name, f"{of.value:.3g}", bound, style=None if of.met else "bold red")
        return table

    def _counts(self) -> dict[str, int]:
        """Everything that was counted."""
        return {
            **{f"{kind}: {result}": times for (kind, result), times in sorted(self.tally.items())},
            **{
                f"began with {found}: {result}": times
                for (found, result), times in sorted(self.compared.items())
            },
            "sent while the server paused": self.sent_while_paused,
            **{f"update: {name}": times for name, times in sorted(self.updates.items())},
        }

    def _report(self, seconds: float, load_average: float, idle: Snapshot) -> None:
        self.console.print(self.show(seconds))
        results = {
            "flags": self.flags,
            "check": self.arguments.check,
            "concurrency": CONCURRENCY,
            "load_average_at_start": load_average,
            "seconds": seconds,
            "requests": self.answered,
            "questions": len(self.table),
            "counts": self._counts(),
            "preemptions": idle.preemptions,
            "evictions": idle.evictions,
            "targets": [requirement.as_record() for requirement in self.requirements],
            "failures": self.failures,
        }
        own = self.arguments.name is None and not self.arguments.without_reset
        name = self.arguments.name or ("soak-updates" if own else "soak-without-reset")
        path = save(name, record("soak", results), RESULTS if own else self.folder)
        self.console.print(f"written to {path}")
        for failure in self.failures[:5]:
            self.console.print(failure, style="red")
        if not self.passed:
            self.console.print(f"failed; the server's log is in {self.folder}", highlight=False)


async def _post(client: httpx.AsyncClient, path: str, **arguments: Any) -> None:
    (await client.post(path, **arguments)).raise_for_status()


async def _reset(client: httpx.AsyncClient, hard: bool = False) -> None:
    await _post(client, "/reset_prefix_cache", params={"reset_running_requests": str(hard).lower()})


async def _alone(client: httpx.AsyncClient, question: Question, salt: int) -> str:
    """The answer with nothing cached and nobody else there."""
    outcome = await send(client, question.ask("model", salt=f"alone {salt}"))
    if outcome.result != EXPECTED or outcome.answer is None or outcome.answer.cached:
        raise RuntimeError(f"{question} was not answered as with nothing cached: {outcome}")
    return outcome.answer.text


async def _idle(server: Server, empty: bool = False) -> Snapshot:
    """The server once nothing runs and no request holds anything, or after too long a time.

    Args:
        empty: wait until nothing is cached, either.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        seen = await server.snapshot()
        held = seen.physical_pages if empty else seen.request_pages
        if not (seen.running or seen.waiting or held) or time.monotonic() > deadline:
            return seen
        await asyncio.sleep(0.2)
