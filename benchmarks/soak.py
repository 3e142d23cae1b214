"""Put a server with eviction under random load for a long time, and check that nothing is lost, leaks or hangs.

Starts ``vllm serve`` with much less KV memory than the load needs. All policies, completions and chats, streamed or
not, several answers, log-probabilities, repeated documents, conversations that branch, clients that disconnect, bursts
and malformed requests come at random, and the prefix cache is emptied now and then. Ends with exit code 1 if a
requirement is missed.

With --updates, clients ask about documents and chat while the server's weights are changed and its caches are reset in
all of vLLM's ways; nobody may be answered from KV that was read with earlier weights.
"""

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import httpx
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.harness.conversations import BLOCK
from benchmarks.harness.measure import RESULTS, record, save, warn_if_busy
from benchmarks.harness.models import make_model
from benchmarks.harness.options import add_start_patience, positive, whole
from benchmarks.harness.requirements import Requirement, SoakRun, tracebacks
from benchmarks.harness.samples import Sample, baseline, growth, resident_memory
from benchmarks.harness.server import Server, cpu_environment, run_benchmark
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
from benchmarks.harness.update_soak import UpdateSoak
from vllm_kvevict.policies import available

SCRATCH = Path(__file__).parent / "out" / "soak"
MAX_LEN, LONGEST_PROMPT = 512, 300
FLAGS = (
    *("--kv-eviction", "take", "--kv-eviction-config.take_chunk", "64", "--kv-eviction-config.policies", "all"),
    *("--kv-eviction-config.min_prompt", "32", "--kv-eviction-config.decode_reserve", "16"),
    *("--kv-eviction-config.min_turn", "16", "--enable-prompt-tokens-details"),
    *("--max-model-len", str(MAX_LEN), "--max-num-seqs", "32", "--max-num-batched-tokens", "256"),
    *("--block-size", str(BLOCK), "--num-gpu-blocks-override", "24", "--dtype", "float32", "--enforce-eager"),
)  # fmt: skip
"""Memory for one and a half requests of MAX_LEN, and a reserve so small that decodes have to preempt each other."""
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
"""GiB that vLLM may take, of which the blocks above are far less; and what makes it offer to reset its cache."""
RESET, RESET_EVERY = "/reset_prefix_cache", 300
"""The endpoint, and after how many requests it is called."""
CONCURRENCY, BURST, BURST_EVERY = 32, 96, 500
"""Requests in flight; every BURST_EVERY-th and the BURST - 1 after it are sent at once, on top of these."""
SAMPLE_SECONDS = 2.0
IDLE_PATIENCE = 60.0
GROWTH, FOUND = 0.02, 0.1
KEPT_SAMPLES, KEPT_FAILURES = 60, 20


class Soak(SoakRun):
    """One run: the load, what was seen, and the verdict."""

    def __init__(self, arguments: argparse.Namespace):
        super().__init__(arguments, FLAGS)
        self.policies = list(available())
        self.samples: list[Sample] = []
        self.later_turns, self.found_turns = 0, 0
        self.missed_samples = 0

    async def run(self) -> None:
        """Everything: start, load, verdict, table, record."""
        arguments = self.arguments
        load_average = warn_if_busy(self.console)
        model = arguments.model or make_model(SCRATCH / "model", layers=2, hidden=64, max_len=MAX_LEN)
        env = cpu_environment(1, self.ranks) | ENVIRONMENT
        env["VLLM_KVEVICT_CHECK"] = str(int(arguments.check))
        server = Server(model, SCRATCH / "server.log", self.flags, env)
        self.console.print(f"starting vllm serve {model} {' '.join(self.flags)}", highlight=False)
        # The server closes idle connections; a request that is on its way just then would be lost.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with server, httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as client:
            probes, words_per_token = await ask_probes(client, server.model, self.policies)
            longest = int(LONGEST_PROMPT * words_per_token)
            traffic = Traffic(server.model, arguments.seed, longest, MAX_LEN, probes)
            seconds = await self._load(server, client, traffic)
            await self._until_idle(server)
            again, _ = await ask_probes(client, server.model, self.policies)
            changed = sum(again[policy] != answer for policy, answer in probes.items())
            await self._until_idle(server)
            (await client.post(RESET, timeout=60)).raise_for_status()
            await self._until_idle(server, empty=True)
            server.check()
            log = server.log.read_text(errors="replace")  # the end of a server brings lines of its own
        self._judge(changed, tracebacks(log))
        self.console.print(self.table(seconds))
        self._save(seconds, load_average)
        for failure in self.failures[:5]:
            self.console.print(failure, style="red")
        if not self.passed:
            self.console.print(f"failed; the server's log is {server.log}", highlight=False)

    async def _load(self, server: Server, client: httpx.AsyncClient, traffic: Traffic) -> float:
        """Send everything and watch the server meanwhile; seconds that it took."""
        start = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
        with Progress(*columns, TimeElapsedColumn(), console=self.console) as bar:
            task = bar.add_task(
                "soaking", total=self.arguments.requests or 60 * self.arguments.minutes, state=""
            )

            async def watch() -> None:
                while True:
                    try:
                        self.samples.append(await self._sample(server, time.monotonic() - start))
                    except httpx.HTTPError:
                        self.missed_samples += 1
                        await asyncio.sleep(SAMPLE_SECONDS)
                        continue
                    last = self.samples[-1]
                    state = f"{self.answered} requests, {last.running}+{last.waiting} now, {last.rss:.0f} MiB"
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
        seconds = time.monotonic() - start
        self.samples.append(await self._sample(server, seconds))
        return seconds

    async def _offer(self, server: Server, client: httpx.AsyncClient, traffic: Traffic, start: float) -> None:
        slots = asyncio.Semaphore(CONCURRENCY)
        tasks: set[asyncio.Task] = set()

        async def one(ask: Ask, waits: bool) -> None:
            try:
                self._note(ask, traffic.hear(ask, await send(client, ask)))
            finally:
                if waits:
                    slots.release()

        try:
            for number in self._numbers(start):
                waits = number % BURST_EVERY >= BURST
                if waits:
                    await slots.acquire()
                server.check()
                if number % RESET_EVERY == 0:
                    (await client.post(RESET, timeout=60)).raise_for_status()
                task = asyncio.create_task(one(traffic.next(), waits))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _numbers(self, start: float) -> Iterator[int]:
        """Numbers of the requests, as long as there are to be more; the first burst comes after a while."""
        for number in itertools.count(BURST):
            if self.arguments.requests is not None and number - BURST >= self.arguments.requests:
                return
            if self.arguments.minutes is not None and time.monotonic() - start >= 60 * self.arguments.minutes:
                return
            yield number

    def _note(self, ask: Ask, outcome: Outcome) -> None:
        self.tally[ask.kind, outcome.result] += 1
        self.server_errors += outcome.status is not None and outcome.status >= 500
        if ask.turn is not None and ask.turn.is_later and outcome.answer is not None:
            self.later_turns += 1
            self.found_turns += ask.turn.is_found(outcome.answer.cached)
        if outcome.result not in (EXPECTED, LEFT) and len(self.failures) < KEPT_FAILURES:
            body = ask.content.decode(errors="replace")
            self.failures.append(
                {"kind": ask.kind, "body": f"{body[:200]} ... {body[-200:]}", **asdict(outcome)}
            )

    async def _sample(self, server: Server, seconds: float) -> Sample:
        seen = await server.snapshot()
        # What is cached stays when nobody asks.
        pages, entries = seen.request_pages, seen.logical_entries or 0
        load = seen.running, seen.waiting, seen.preemptions
        cache = seen.cached_pages + seen.uncompressed_pages, seen.prefix_hits
        return Sample(seconds, self.answered, resident_memory(), pages, entries, *load, *cache)

    async def _until_idle(self, server: Server, empty: bool = False) -> None:
        """Wait until nothing runs and no request holds anything, or until that has taken too long.

        Args:
            empty: wait until nothing is cached, either.
        """
        deadline = time.monotonic() + IDLE_PATIENCE
        begin = self.samples[-1].seconds - time.monotonic()
        while time.monotonic() < deadline:
            self.samples.append(await self._sample(server, begin + time.monotonic()))
            last = self.samples[-1]
            if not (last.running or last.waiting or last.pages or last.entries or (empty and last.cached)):
                return
            await asyncio.sleep(0.2)

    def _judge(self, changed: int, tracebacks: int) -> None:
        last = self.samples[-1]

        def count(result: str, malformed: bool) -> int:
            return sum(
                times
                for (kind, what), times in self.tally.items()
                if what == result and (kind == "malformed") == malformed
            )

        self.requirements = [
            Requirement("requests that hung", count(HUNG, False) + count(HUNG, True)),
            Requirement("connections that broke off", count(BROKEN, False) + count(BROKEN, True)),
            Requirement("wrong answers", count(WRONG, False)),
            Requirement("malformed requests not refused with 4xx", count(WRONG, True)),
            Requirement("answers 5xx", self.server_errors),
            Requirement("probes answered otherwise at the end", changed),
            Requirement("tracebacks in the server's log", tracebacks),
            Requirement("requests running or waiting when idle", last.running + last.waiting),
            Requirement("pages held when idle", last.pages),
            Requirement("KV entries stored when idle", last.entries),
            Requirement("pages cached after a reset", last.cached),
            Requirement(
                "growth of the resident memory after a third of the load", growth(self.samples), GROWTH
            ),
            Requirement(
                "share of later turns that begin with earlier ones", self.found_share, FOUND, at_most=False
            ),
        ]

    @property
    def found_share(self) -> float:
        """Of the later turns of conversations, how many began with what eviction had left of earlier ones."""
        return self.found_turns / max(1, self.later_turns)

    def table(self, seconds: float) -> Table:
        """Tally, extremes and requirements."""
        table = Table(title=f"{self.answered} requests in {seconds:.0f} s, {self.answered / seconds:.1f}/s")
        table.add_column("")
        table.add_column("", justify="right")
        table.add_column("bound", justify="right")
        for (kind, result), times in sorted(self.tally.items()):
            table.add_row(f"{kind}: {result}", str(times), "")
        table.add_section()
        for name, value in self.extremes().items():
            table.add_row(name, f"{value:g}", "")
        table.add_section()
        for of in self.requirements:
            bound = f"{'at most' if of.at_most else 'at least'} {of.bound:g}"
            table.add_row(of.name, f"{of.value:.3g}", bound, style=None if of.met else "bold red")
        return table

    def extremes(self) -> dict[str, float]:
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

    def _save(self, seconds: float, load_average: float) -> None:
        step = -(-len(self.samples) // KEPT_SAMPLES)
        results = {
            "flags": self.flags,
            "check": self.arguments.check,
            "concurrency": CONCURRENCY,
            "burst": BURST,
            "load_average_at_start": load_average,
            "seconds": seconds,
            "requests": self.answered,
            "tally": {f"{kind}: {result}": times for (kind, result), times in sorted(self.tally.items())},
            "extremes": self.extremes(),
            "targets": [requirement.as_record() for requirement in self.requirements],
            "failures": self.failures,
            "samples": [asdict(sample) for sample in self.samples[::step]],
        }
        folder = RESULTS if self.arguments.name is None else SCRATCH
        path = save(self.arguments.name or "soak", record("soak", results), folder)
        self.console.print(f"written to {path}")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--requests", type=whole, metavar="N", help="how many requests to send")
    length.add_argument("--minutes", type=positive, metavar="M", help="how long to send requests")
    parser.add_argument("--model", type=Path, help="folder of a model (default: a random one of two layers)")
    for kind in ("tensor", "pipeline"):
        name = f"--{kind}-parallel-size"
        parser.add_argument(name, type=whole, default=1, metavar="N", help="as for vllm serve (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (default: %(default)s)")
    parser.add_argument(
        "--check", action="store_true", help="the server compares page counts with pages after every step"
    )
    parser.add_argument(
        "--updates", action="store_true", help="change the weights under load, and reset the cache"
    )
    parser.add_argument(
        "--without-reset",
        action="store_true",
        help="with --updates: leave the cache as it is, as a control that must fail",
    )
    add_start_patience(parser)
    parser.add_argument(
        "--name", help=f"write the record to {SCRATCH}/NAME.json, not to the project's results"
    )
    arguments = parser.parse_args(argv)
    if arguments.without_reset and not arguments.updates:
        parser.error("--without-reset needs --updates")
    if arguments.model and arguments.updates:
        parser.error("--updates makes models of its own, so it takes no --model")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Soak; the exit code."""
    arguments = parse_arguments(argv)
    soak = UpdateSoak(arguments, SCRATCH) if arguments.updates else Soak(arguments)
    return run_benchmark(soak.run()) or int(not soak.passed)


if __name__ == "__main__":
    sys.exit(main())
