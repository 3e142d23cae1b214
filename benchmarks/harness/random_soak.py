"""The soak of random requests of every kind, in much less memory than they need."""

import argparse
import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

from benchmarks.harness.conversations import BLOCK
from benchmarks.harness.scenarios import Target
from benchmarks.harness.server import Server, Snapshot
from benchmarks.harness.soaking import SoakRun, none, reset, until_idle
from benchmarks.harness.traffic import WRONG, Ask, Outcome, Traffic, ask_probes, send
from vllm_kvevict.policies import available

MAX_LEN, LONGEST_PROMPT = 512, 300
FLAGS = (
    *("--kv-eviction", "take", "--kv-eviction-config.take_chunk", "64", "--kv-eviction-config.policies", "all"),
    *("--kv-eviction-config.min_prompt", "32", "--kv-eviction-config.decode_reserve", "16"),
    *("--kv-eviction-config.min_turn", "16", "--enable-prompt-tokens-details"),
    *("--max-model-len", str(MAX_LEN), "--max-num-seqs", "32", "--max-num-batched-tokens", "256"),
    *("--block-size", str(BLOCK), "--num-gpu-blocks-override", "24", "--dtype", "float32", "--enforce-eager"),
)  # fmt: skip
"""Memory for one and a half requests of MAX_LEN, and a reserve so small that decodes have to preempt each other."""
RESET_EVERY = 300
"""Requests after which the cache is reset."""
CONCURRENCY, BURST, BURST_EVERY = 32, 96, 500
"""Requests in flight; every BURST_EVERY-th and the BURST - 1 after it are sent at once, on top of these."""
SAMPLE_SECONDS = 2.0
GROWTH, FOUND = 0.02, 0.1


@dataclass(frozen=True)
class Sample:
    """What was seen at one moment.

    Attributes:
        rss: MiB of resident memory over all processes; what they share counts in each.
        server: what it said of itself.
    """

    rss: float
    server: Snapshot


def resident_memory() -> float:
    """MiB of all processes that this one has started."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_info().rss
        except psutil.Error:  # it has ended
            continue
    return total / 2**20


def baseline(samples: Sequence[Sample]) -> float:
    """MiB resident after the warm-up, the first third of the load: the median of the sixth that follows."""
    return median(sample.rss for sample in samples[len(samples) // 3 : len(samples) // 2 + 1])


def growth(samples: Sequence[Sample]) -> float:
    """Growth of the resident memory from the sixth after the warm-up to the last sixth, as a share."""
    return median(sample.rss for sample in samples[-(len(samples) // 6) - 1 :]) / baseline(samples) - 1


class RandomSoak(SoakRun):
    """One run: the load, what was seen, and the verdict."""

    def __init__(self, arguments: argparse.Namespace):
        super().__init__("soak", arguments, FLAGS)
        self.policies = list(available())
        self.samples: list[Sample] = []
        self.later_turns, self.found_turns, self.changed = 0, 0, 0

    async def load(self, server: Server, client: httpx.AsyncClient) -> None:
        """Probes, random requests, probes again, and a reset at the end."""
        probes = await ask_probes(client, server.model, self.policies)
        traffic = Traffic(server.model, self.arguments.seed, LONGEST_PROMPT, MAX_LEN, probes)
        watcher = asyncio.create_task(self._watch(server))
        try:
            await self._offer(server, client, traffic)
        finally:
            watcher.cancel()
            (ended,) = await asyncio.gather(watcher, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError):
            raise RuntimeError("the server was not watched to the end") from ended
        self.samples.append(await self._sample(server))
        await until_idle(server)
        again = await ask_probes(client, server.model, self.policies)
        self.changed = sum(again[policy] != answer for policy, answer in probes.items())
        await self.settle(server, client)

    async def _watch(self, server: Server) -> None:
        with self.console.status("soaking") as status:
            while True:
                with contextlib.suppress(httpx.HTTPError):  # a busy server may be late
                    self.samples.append(await self._sample(server))
                    status.update(f"{self.tally.total()} requests")
                await asyncio.sleep(SAMPLE_SECONDS)

    async def _offer(self, server: Server, client: httpx.AsyncClient, traffic: Traffic) -> None:
        slots = asyncio.Semaphore(CONCURRENCY)

        async def one(ask: Ask, waits: bool) -> None:
            try:
                self.note_answer(ask, traffic.hear(ask, await send(client, ask)))
            finally:
                if waits:
                    slots.release()

        async with asyncio.TaskGroup() as tasks:
            for number in self.numbers():
                place = number + BURST  # the first burst comes after a while
                waits = place % BURST_EVERY >= BURST
                if waits:
                    await slots.acquire()
                server.check()
                if place % RESET_EVERY == 0:
                    await reset(client)
                tasks.create_task(one(traffic.next(), waits))

    def note_answer(self, ask: Ask, outcome: Outcome) -> None:
        """Count what became of a request."""
        if ask.turn is not None and ask.turn.is_later and outcome.answer is not None:
            self.later_turns += 1
            self.found_turns += ask.turn.is_found(outcome.answer.cached)
        body = ask.content.decode(errors="replace")
        self.note(ask.kind, outcome, body=f"{body[:200]} ... {body[-200:]}")

    async def _sample(self, server: Server) -> Sample:
        return Sample(resident_memory(), await server.snapshot())

    def judge(self, tracebacks: int) -> None:
        """Hold everything against what is required."""
        accepted = self.count(WRONG, "malformed")
        found = self.found_turns / max(1, self.later_turns)
        self.requirements = [
            none("wrong answers", self.count(WRONG) - accepted),
            none("malformed requests not refused with 4xx", accepted),
            none("probes answered otherwise at the end", self.changed),
            none("KV entries stored when idle", self.empty.logical_entries or 0),
            Target(
                "growth of the resident memory after a third of the load", growth(self.samples), GROWTH, True
            ),
            Target("share of later turns that begin with earlier ones", found, FOUND),
            *self.shared_requirements(tracebacks),
        ]

    def rows(self) -> dict[str, float]:
        """The most of everything that was seen."""
        seen = [sample.server for sample in self.samples]
        return {
            "most running": max(one.running for one in seen),
            "most pages of requests": max(one.request_pages for one in seen),
            "preemptions": seen[-1].preemptions,
            "later turns of conversations": self.later_turns,
            "later turns that began with earlier ones": self.found_turns,
            "prompt tokens found in the prefix cache": seen[-1].prefix_hits,
            "MiB resident after a third": round(baseline(self.samples), 1),
        }

    def results(self) -> dict[str, Any]:
        """For the record."""
        return {"concurrency": CONCURRENCY, "burst": BURST, "extremes": self.rows()}
