"""Whether hostile clients slow down ordinary ones more than honest clients with as many tokens do.

The server has memory for less than one request of the longest kind. Hostile clients ask for answers that the memory
cannot hold, for prompts that fit only once they are evicted, for policies that need memory besides their KV, and for
what must be refused; and they disconnect. Each round sends such requests, then an honest one of the same length for
each that was answered. Meanwhile four ordinary clients ask short questions, each one after the other. Their waiting
times in both cases are compared.
"""

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import numpy as np

from benchmarks.harness.conversations import BLOCK
from benchmarks.harness.measure import Estimate, paired_ratio
from benchmarks.harness.questions import body_of, random_words
from benchmarks.harness.scenarios import Target
from benchmarks.harness.server import Server
from benchmarks.harness.soaking import SoakRun, none
from benchmarks.harness.traffic import ENDPOINTS, WRONG, Ask, encoded, send

MAX_LEN = 1024
POOL = 512
"""Tokens that the memory holds of a request that is kept whole."""
FLAGS = (
    *("--kv-eviction", "take", "--kv-eviction-config.take_chunk", "128"),
    *("--max-num-batched-tokens", "256", "--long-prefill-token-threshold", "192"),
    *("--kv-budget", "0.2", "--kv-eviction-config.policies", "all", "--kv-eviction-config.min_prompt", "32"),
    *("--max-model-len", str(MAX_LEN), "--max-num-seqs", "32", "--dtype", "float32"),
    *("--enforce-eager", "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(POOL // BLOCK)),
)  # fmt: skip
"""A prompt of MAX_LEN gets by with less memory than it has tokens, since it is evicted chunk by chunk."""
CONCURRENCY, ORDINARY_CLIENTS = 12, 4
QUESTION, ANSWER = 100, 16
"""Tokens of the ordinary clients' prompts and answers."""
ORDINARY: dict[str, Any] = {"vllm_xargs": {"kv_eviction": "ada-snapkv"}}
"""What ordinary and honest clients ask for."""
MOST = 3.0
"""What the ordinary clients' 99th percentile may be, over what it is beside honest clients."""


@dataclass
class Phase:
    """What came of one crowd and of the ordinary clients beside it.

    Attributes:
        latencies: seconds of each of the ordinary clients' requests.
        lengths: tokens of prompt and answer of each request of the crowd that was answered.
    """

    latencies: list[float] = field(default_factory=list)
    lengths: list[tuple[int, int]] = field(default_factory=list)

    def percentile(self, percent: float) -> float:
        """Of the ordinary clients' latencies, seconds."""
        return float(np.percentile(self.latencies, percent))

    def summary(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self) | {f"p{percent}": self.percentile(percent) for percent in (50, 90, 99)}


def hostile_asks(model: str, count: int, seed: int) -> list[Ask]:
    """So many requests, of each kind in turn.

    Args:
        model: its name.
        seed: of their words and lengths.
    """
    choose = random.Random(seed)

    def ask(kind: str, tokens: int, output: int, policy: str, min_tokens: int = 0, **more: Any) -> Ask:
        prompt, fields = random_words(choose, tokens), {"kv_eviction": policy}
        body = body_of(model, output, prompt=prompt, min_tokens=min_tokens, vllm_xargs=fields)
        return lenient(kind, body, **more)

    def crowd() -> Iterator[Ask]:
        for policy in ("knorm", "ada-snapkv", "pyramidkv"):
            yield ask(f"endless answer, {policy}", POOL // 2, MAX_LEN - POOL // 2, policy)
        for policy in ("criticalkv", "defensivekv", "h2o", "take"):
            # Whole it would not fit; in several steps, since no step has so many tokens.
            yield ask(f"long prompt, {policy}", choose.randint(POOL // 2, POOL * 3 // 4), 8, policy)
        yield ask("long prompt, full", POOL - 64, 8, "full")
        yield ask("too long", POOL + 64, 8, "full", refusal="kv_eviction")
        yield ask("min_tokens", POOL // 2, MAX_LEN // 2, "full", min_tokens=1000, refusal="min_tokens")
        yield ask("unknown policy", 64, 8, "nope", refusal="kv_eviction")
        yield ask("left", POOL // 2, POOL, "lava", leave=choose.choice((0.05, 0.3, 1.0)))

    crowds = (crowd() for _ in itertools.count())
    return list(itertools.islice(itertools.chain.from_iterable(crowds), count))


def honest_asks(model: str, lengths: Sequence[tuple[int, int]], seed: int) -> list[Ask]:
    """A request of each length: tokens of its prompt and of its answer."""
    choose = random.Random(seed)
    return [
        lenient("honest", body_of(model, answer, prompt=random_words(choose, prompt), **ORDINARY))
        for prompt, answer in lengths
    ]


def lenient(kind: str, body: Mapping[str, Any], **more: Any) -> Ask:
    """A request whose answer the server may cut short."""
    return Ask(kind, ENDPOINTS["completions"], encoded(body), tokens=None, **more)


class HostileSoak(SoakRun):
    """The whole run."""

    def __init__(self, arguments: argparse.Namespace):
        super().__init__("hostile", arguments, FLAGS)
        self.sizes = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "max_len": MAX_LEN}
        self.rounds: list[tuple[Phase, Phase]] = []

    async def load(self, server: Server, client: httpx.AsyncClient) -> None:
        """Rounds, each beside hostile clients, then beside honest ones with as many tokens."""
        for ask in honest_asks(server.model, [(QUESTION, ANSWER)] * 4, seed=-1):
            await send(client, ask)  # compiles what later ones use
        for number in range(self.arguments.seed, self.arguments.seed + self.arguments.rounds):
            asks = hostile_asks(server.model, self.arguments.requests, number)
            hostile = await self.phase(server, client, asks, number)
            honest = honest_asks(server.model, hostile.lengths, number)
            self.rounds.append((hostile, await self.phase(server, client, honest, number)))
            self.console.print(
                f"round {len(self.rounds)} of {self.arguments.rounds} is done", highlight=False
            )
        await self.settle(server, client)

    async def phase(self, server: Server, client: httpx.AsyncClient, asks: Sequence[Ask], seed: int) -> Phase:
        """Send a crowd's requests, so many at a time, and ask as ordinary clients meanwhile."""
        phase, slots, over = Phase(), asyncio.Semaphore(CONCURRENCY), asyncio.Event()

        async def one(ask: Ask) -> None:
            async with slots:
                server.check()
                outcome = await send(client, ask)
                self.note(ask.kind, outcome)
                if outcome.answer:
                    phase.lengths.append((outcome.answer.prompt, outcome.answer.tokens))

        async def crowd() -> None:
            try:
                await asyncio.gather(*map(one, asks))
            finally:
                over.set()

        async def ordinary(choose: random.Random) -> None:
            """Short questions, one after the other, until the crowd's last answer."""
            while not over.is_set():
                body = body_of(server.model, ANSWER, prompt=random_words(choose, QUESTION), **ORDINARY)
                begin = time.monotonic()
                self.note("ordinary", await send(client, lenient("ordinary", body)))
                phase.latencies.append(time.monotonic() - begin)

        clients = [ordinary(random.Random(f"{seed} {number}")) for number in range(ORDINARY_CLIENTS)]
        await asyncio.gather(crowd(), *clients)
        return phase

    @property
    def ratio(self) -> Estimate:
        """The ordinary clients' 99th percentile, beside hostile over beside honest clients."""
        return paired_ratio(
            *([phase.percentile(99) for phase in side] for side in zip(*self.rounds, strict=True))
        )

    def judge(self, tracebacks: int) -> None:
        """Hold everything against what is required."""
        name = "the ordinary clients' p99, beside hostile over beside honest clients"
        self.requirements = [
            Target(name, self.ratio.median, MOST, at_most=True),
            none("wrong answers", self.count(WRONG)),
            *self.shared_requirements(tracebacks),
        ]

    def rows(self) -> dict[str, Any]:
        """What ordinary clients waited."""
        return {
            f"round {number}, beside {name}: p50, p99 s": f"{phase.percentile(50):.3f}, {phase.percentile(99):.3f}"
            for number, pair in enumerate(self.rounds, 1)
            for name, phase in zip(("hostile", "honest"), pair, strict=True)
        }

    def results(self) -> dict[str, Any]:
        """For the record."""
        rounds = [{"hostile": one.summary(), "honest": other.summary()} for one, other in self.rounds]
        return {"concurrency": CONCURRENCY, "rounds": rounds, "p99_ratio": vars(self.ratio)}
