"""The soak of random requests of every kind, in much less memory than they need."""

import argparse
import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness.samples import Sample, baseline, growth, resident_memory
from benchmarks.harness.server import Server, Snapshot
from benchmarks.harness.soaking import BLOCK, KEPT_FAILURES, Requirement, SoakRun, reset, until_idle
from benchmarks.harness.traffic import (
    BROKEN,
    EXPECTED,
    HUNG,
    LEFT,
    WRONG,
    Ask,
    Outcome,
    Traffic,
    ask_probes,
    send,
)
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
KEPT_SAMPLES = 60


class RandomSoak(SoakRun):
    """One run: the load, what was seen, and the verdict."""

    def __init__(self, arguments: argparse.Namespace):
        super().__init__("soak", arguments, FLAGS)
        self.policies = list(available())
        self.samples: list[Sample] = []
        self.later_turns, self.found_turns, self.missed_samples, self.changed = 0, 0, 0, 0
        self.idle = self.empty = Snapshot()

    def model(self) -> Path:
        """That of the command line, or a random one."""
        return self.arguments.model or super().model()

    async def load(self, server: Server, client: httpx.AsyncClient) -> None:
        """Probes, random requests, probes again, and a reset at the end."""
        probes, words_per_token = await ask_probes(client, server.model, self.policies)
        longest = int(LONGEST_PROMPT * words_per_token)
        traffic = Traffic(server.model, self.arguments.seed, longest, MAX_LEN, probes)
        await self._watched(server, client, traffic)
        await until_idle(server)
        again, _ = await ask_probes(client, server.model, self.policies)
        self.changed = sum(again[policy] != answer for policy, answer in probes.items())
        self.idle = await until_idle(server)
        await reset(client)
        self.empty = await until_idle(server, empty=True)

    async def _watched(self, server: Server, client: httpx.AsyncClient, traffic: Traffic) -> None:
        """Send everything and watch the server meanwhile."""
        start = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
        with Progress(*columns, TimeElapsedColumn(), console=self.console) as bar:
            total = self.arguments.requests or 60 * self.arguments.minutes
            task = bar.add_task("soaking", total=total, state="")

            async def watch() -> None:
                while True:
                    try:
                        self.samples.append(await self._sample(server, time.monotonic() - start))
                    except httpx.HTTPError:
                        self.missed_samples += 1
                    else:
                        last = self.samples[-1]
                        state = (
                            f"{self.answered} requests, {last.running}+{last.waiting} now, {last.rss:.0f} MiB"
                        )
                        done = self.answered if self.arguments.requests else last.seconds
                        bar.update(task, completed=done, state=state)
                    await asyncio.sleep(SAMPLE_SECONDS)

            watcher = asyncio.create_task(watch())
            try:
                await self._offer(server, client, traffic, start)
            finally:
                watcher.cancel()
                (ended,) = await asyncio.gather(watcher, return_exceptions=True)
            if not isinstance(ended, asyncio.CancelledError):
                raise RuntimeError("the server was not watched to the end") from ended
        self.samples.append(await self._sample(server, time.monotonic() - start))

    async def _offer(self, server: Server, client: httpx.AsyncClient, traffic: Traffic, start: float) -> None:
        slots = asyncio.Semaphore(CONCURRENCY)
        tasks: set[asyncio.Task] = set()

        async def one(ask: Ask, waits: bool) -> None:
            try:
                self.note(ask, traffic.hear(ask, await send(client, ask)))
            finally:
                if waits:
                    slots.release()

        try:
            for number in self.numbers(start):
                waits = number % BURST_EVERY >= BURST
                if waits:
                    await slots.acquire()
                server.check()
                if number % RESET_EVERY == 0:
                    await reset(client)
                task = asyncio.create_task(one(traffic.next(), waits))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def numbers(self, start: float) -> Iterator[int]:
        """Numbers of the requests, as long as there are to be more; the first burst comes after a while."""
        for number in itertools.count(BURST):
            if self.arguments.requests is not None and number - BURST >= self.arguments.requests:
                return
            if self.arguments.minutes is not None and time.monotonic() - start >= 60 * self.arguments.minutes:
                return
            yield number

    def note(self, ask: Ask, outcome: Outcome) -> None:
        """Count what became of a request."""
        self.tally[ask.kind, outcome.result] += 1
        self.server_errors += outcome.status is not None and outcome.status >= 500
        if ask.turn is not None and ask.turn.is_later and outcome.answer is not None:
            self.later_turns += 1
            self.found_turns += ask.turn.is_found(outcome.answer.cached)
        if outcome.result not in (EXPECTED, LEFT) and len(self.failures) < KEPT_FAILURES:
            body = ask.content.decode(errors="replace")
            asked = {"kind": ask.kind, "body": f"{body[:200]} ... {body[-200:]}"}
            self.failures.append({**asked, **asdict(outcome)})

    async def _sample(self, server: Server, seconds: float) -> Sample:
        seen = await server.snapshot()
        # What is cached stays when nobody asks.
        pages, entries = seen.request_pages, seen.logical_entries or 0
        load = seen.running, seen.waiting, seen.preemptions
        cache = seen.cached_pages + seen.uncompressed_pages, seen.prefix_hits
        return Sample(seconds, self.answered, resident_memory(), pages, entries, *load, *cache)

    def judge(self, tracebacks: int) -> None:
        """Hold everything against what is required."""
        idle = self.idle

        def count(wanted: str, *malformed: bool) -> int:
            return sum(
                times
                for (kind, result), times in self.tally.items()
                if result == wanted and (kind == "malformed") in malformed
            )

        self.requirements = [
            Requirement("requests that hung", count(HUNG, False, True)),
            Requirement("connections that broke off", count(BROKEN, False, True)),
            Requirement("wrong answers", count(WRONG, False)),
            Requirement("malformed requests not refused with 4xx", count(WRONG, True)),
            Requirement("answers 5xx", self.server_errors),
            Requirement("probes answered otherwise at the end", self.changed),
            Requirement("tracebacks in the server's log", tracebacks),
            Requirement("requests running or waiting when idle", idle.running + idle.waiting),
            Requirement("pages held when idle", idle.request_pages),
            Requirement("pages cached after a reset", self.empty.physical_pages or 0),
            Requirement("KV entries stored when idle", self.empty.logical_entries or 0),
            Requirement(
                "growth of the resident memory after a third of the load", growth(self.samples), GROWTH
            ),
            Requirement("share of later turns that begin with earlier ones", self.found_share, FOUND, False),
        ]

    @property
    def found_share(self) -> float:
        """Of the later turns of conversations, how many began with what eviction had left of earlier ones."""
        return self.found_turns / max(1, self.later_turns)

    def rows(self) -> dict[str, float]:
        """The most of everything that was seen."""
        names = ("running", "waiting", "pages", "cached")
        most = {name: max(getattr(sample, name) for sample in self.samples) for name in names}
        return {
            **{f"most {name}": value for name, value in most.items()},
            "preemptions": self.samples[-1].preemptions,
            "later turns of conversations": self.later_turns,
            "later turns that began with earlier ones": self.found_turns,
            "prompt tokens found in the prefix cache": self.samples[-1].prefix_hits,
            "looks at /metrics that failed": self.missed_samples,
            "MiB resident after a third": round(baseline(self.samples), 1),
            "MiB resident at the end": round(self.samples[-1].rss, 1),
        }

    def results(self) -> dict[str, Any]:
        """For the record."""
        step = -(-len(self.samples) // KEPT_SAMPLES)
        samples = [asdict(sample) for sample in self.samples[::step]]
        return {"concurrency": CONCURRENCY, "burst": BURST, "extremes": self.rows(), "samples": samples}
