"""Whether hostile clients slow down ordinary ones more than honest clients with as many tokens do.

Starts ``vllm serve`` with memory for less than one request of the longest kind. Hostile clients ask for answers that
the memory cannot hold, for prompts that fit only once they are evicted, for policies that need memory besides their KV,
and for what must be refused; and they disconnect. Each round sends 300 such requests, then an honest one of the same
length for each that was answered. Meanwhile four ordinary clients ask short questions, each one after the other. Their
waiting times in both cases are compared. Ends with exit code 1 if a requirement is missed.
"""

import argparse
import asyncio
import base64
import io
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness.measure import RESULTS, Estimate, paired_ratio, record, save, warn_if_busy
from benchmarks.harness.models import make_model
from benchmarks.harness.options import add_start_patience, whole
from benchmarks.harness.server import Server, cpu_environment, run_benchmark
from benchmarks.harness.traffic import ENDPOINTS
from benchmarks.harness.words import random_words

SCRATCH = Path(__file__).parent / "out" / "hostile"
HIDDEN, LAYERS, MAX_LEN, BLOCK = 64, 4, 1024, 32
POOL = 512
"""Tokens that the memory holds of a request that is kept whole."""
FLAGS = (
    *("--kv-budget", "0.2", "--kv-eviction-config.policies", "all", "--kv-eviction-config.min_prompt", "32"),
    *("--max-model-len", str(MAX_LEN), "--max-num-seqs", "32", "--enable-prompt-embeds", "--dtype", "float32"),
    *("--enforce-eager", "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(POOL // BLOCK)),
)  # fmt: skip
SERVERS = {
    "chunks": (
        *("--kv-eviction", "take", "--kv-eviction-config.take_chunk", "128"),
        *("--max-num-batched-tokens", "256", "--long-prefill-token-threshold", "192"),
    ),
    "layers": (
        *("--kv-eviction", "knorm", "--kv-eviction-config.skip_layers", "1"),
        *("--max-num-batched-tokens", str(MAX_LEN)),
    ),
}
"""How a prompt of MAX_LEN gets by with less memory than it has tokens: evicted chunk by chunk or layer by layer."""
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
"""GiB that vLLM may take; the blocks above are far less."""
CONCURRENCY, ORDINARY_CLIENTS = 12, 4
QUESTION, ANSWER = 100, 16
"""Tokens of the ordinary clients' prompts and answers."""
ORDINARY = {"vllm_xargs": {"kv_eviction": "ada-snapkv"}}
"""What ordinary and honest clients ask for."""
DEADLINE = 180.0
"""Seconds after which a request counts as hanging."""
MOST = 3.0
"""What the ordinary clients' 99th percentile may be, over what it is beside honest clients."""
DONE, REFUSED, LEFT, HUNG, WRONG = "answered", "refused", "left by the client", "hung", "wrong"


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        kind: what it is for.
        body: as sent to the endpoint at ``path``.
        refusal: a word that its refusal must contain; None: it is to be answered.
        leave: seconds after which its client goes away; None: never.
    """

    kind: str
    body: dict[str, Any]
    path: str = ENDPOINTS["completions"]
    refusal: str | None = None
    leave: float | None = None


@dataclass
class Phase:
    """What came of one crowd and of the ordinary clients beside it.

    Attributes:
        latencies: seconds of each of the ordinary clients' requests.
        lengths: tokens of prompt and answer of each request of the crowd that was answered.
        tally: how many requests of the crowd came to which end, by kind and result.
        failures: what was wrong, a sentence each.
        seconds: from the crowd's first request to its last answer.
        preemptions: by the server meanwhile.
    """

    latencies: list[float] = field(default_factory=list)
    lengths: list[tuple[int, int]] = field(default_factory=list)
    tally: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    preemptions: int = 0

    @property
    def tokens(self) -> tuple[int, int]:
        """Of all prompts and of all answers."""
        return sum(prompt for prompt, _ in self.lengths), sum(answer for _, answer in self.lengths)

    def percentile(self, percent: float) -> float:
        """Of the ordinary clients' latencies, seconds."""
        return float(np.percentile(self.latencies, percent))

    def summary(self) -> dict[str, Any]:
        """For the record."""
        return {
            "seconds": self.seconds,
            "requests": {f"{kind}: {result}": times for (kind, result), times in sorted(self.tally.items())},
            "prompt_tokens": self.tokens[0],
            "output_tokens": self.tokens[1],
            "preemptions": self.preemptions,
            "ordinary": len(self.latencies),
            **{f"p{percent}": self.percentile(percent) for percent in (50, 90, 99)},
        }


def hostile_asks(model: str, count: int, seed: int) -> list[Ask]:
    """So many requests, of each kind in turn.

    Args:
        model: its name.
        seed: of their words and lengths.
    """
    choose = random.Random(seed)

    def body(tokens: int, output: int, policy: str | None = None, **more: Any) -> dict[str, Any]:
        fields = {} if policy is None else {"vllm_xargs": {"kv_eviction": policy}}
        return _body(model, random_words(choose, tokens), output, **fields, **more)

    def beyond_memory(policy: str) -> Callable[[], Ask]:
        """As long an answer as the model's length allows."""
        tokens = POOL // 2
        return lambda: Ask(f"endless answer, {policy}", body(tokens, MAX_LEN - tokens, policy))

    def only_evicted(policy: str) -> Callable[[], Ask]:
        """A prompt that whole would not fit; in several steps, since no step has so many tokens."""
        return lambda: Ask(
            f"long prompt, {policy}", body(choose.randint(POOL // 2, POOL * 3 // 4), 8, policy)
        )

    def leaving() -> Ask:
        """Its client goes away while it is read or answered."""
        return Ask("left", body(POOL // 2, POOL, "lava"), leave=choose.choice((0.05, 0.3, 1.0)))

    makers = [
        *map(beyond_memory, ("knorm", "ada-snapkv", "pyramidkv")),
        *map(only_evicted, ("criticalkv", "defensivekv", "h2o", "take")),
        lambda: Ask("long prompt, full", body(POOL - 64, 8, "full")),
        lambda: Ask("too long", body(POOL + 64, 8, "full"), refusal="kv_eviction"),
        lambda: Ask("min_tokens", body(POOL // 2, MAX_LEN // 2, "full", min_tokens=1000), refusal="min_tokens"),
        lambda: Ask("unknown policy", body(64, 8, "nope"), refusal="kv_eviction"),
        lambda: _mixed(model, random_words(choose, 64)),
        leaving,
    ]  # fmt: skip
    return [make() for make in itertools.islice(itertools.cycle(makers), count)]


def honest_asks(model: str, lengths: Sequence[tuple[int, int]], seed: int) -> list[Ask]:
    """A request of each length: tokens of its prompt and of its answer."""
    choose = random.Random(seed)
    return [
        Ask("honest", _body(model, random_words(choose, prompt), answer, **ORDINARY))
        for prompt, answer in lengths
    ]


def _body(model: str, text: str, output: int, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": text, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    return body | more


def _mixed(model: str, text: str) -> Ask:
    """A chat of text and embeddings, whose token ids ``take`` could not probe with."""
    buffer = io.BytesIO()
    torch.save(torch.zeros(40, HIDDEN), buffer)
    embeddings = {"type": "prompt_embeds", "data": base64.b64encode(buffer.getvalue()).decode()}
    content = [{"type": "text", "text": text}, embeddings]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "vllm_xargs": {"kv_eviction": "take"},
    }
    return Ask("text with embeddings, take", body, ENDPOINTS["chat"], refusal="take")


async def send(client: httpx.AsyncClient, ask: Ask, phase: Phase) -> str:
    """Send a request and note its tokens; what became of it."""
    try:
        async with asyncio.timeout(ask.leave or DEADLINE):
            answer = await client.post(ask.path, json=ask.body)
    except TimeoutError:
        return HUNG if ask.leave is None else LEFT
    except httpx.HTTPError as error:
        phase.failures.append(f"{ask.kind}: {error!r}")
        return WRONG
    if ask.refusal is not None:
        if answer.status_code == 400 and ask.refusal in answer.text:
            return REFUSED
    elif answer.status_code == 200:
        content = answer.json()
        phase.lengths.append((content["usage"]["prompt_tokens"], content["usage"]["completion_tokens"]))
        if [choice["finish_reason"] for choice in content["choices"]] == ["length"]:
            return DONE
    phase.failures.append(f"{ask.kind}: HTTP {answer.status_code} {answer.text[:300]}")
    return WRONG


async def run_phase(server: Server, client: httpx.AsyncClient, asks: Sequence[Ask], seed: int) -> Phase:
    """Send a crowd's requests, so many at a time, and ask as ordinary clients meanwhile."""
    phase, slots = Phase(), asyncio.Semaphore(CONCURRENCY)
    before = (await server.snapshot()).preemptions

    async def one(ask: Ask) -> None:
        async with slots:
            server.check()
            phase.tally[ask.kind, await send(client, ask, phase)] += 1

    start, over = time.monotonic(), asyncio.Event()
    seeds = (f"{seed} {number}" for number in range(ORDINARY_CLIENTS))
    ordinary = [_ask_questions(client, server.model, each, phase, over) for each in seeds]
    questions = asyncio.gather(*ordinary)
    try:
        await asyncio.gather(*map(one, asks))
        phase.seconds = time.monotonic() - start
        over.set()
        await questions
    finally:
        questions.cancel()
    phase.preemptions = (await server.snapshot()).preemptions - before
    return phase


async def _ask_questions(
    client: httpx.AsyncClient, model: str, seed: str, phase: Phase, over: asyncio.Event
) -> None:
    """Ask short questions, one after the other, until the crowd's last answer."""
    choose = random.Random(seed)
    while not over.is_set():
        ask = Ask("ordinary", _body(model, random_words(choose, QUESTION), ANSWER, **ORDINARY))
        begin, aside = time.monotonic(), Phase()
        result = await send(client, ask, aside)
        phase.latencies.append(time.monotonic() - begin)
        if result != DONE:
            phase.failures += aside.failures or [f"ordinary: {result}"]


def met(ratio: Estimate, rounds: Sequence[tuple[Phase, Phase]]) -> dict[str, tuple[float, float]]:
    """Each requirement's figure and the most that it may be."""
    phases = [phase for pair in rounds for phase in pair]
    hung = sum(times for phase in phases for (_, result), times in phase.tally.items() if result == HUNG)
    wrong = sum(len(phase.failures) for phase in phases)
    return {
        "the ordinary clients' p99, beside hostile over beside honest clients": (ratio.median, MOST),
        "requests that hung": (hung, 0),
        "answers that were wrong or broke off": (wrong, 0),
    }


def table(rounds: Sequence[tuple[Phase, Phase]], ratio: Estimate) -> Table:
    """A row for each phase."""
    title = f"What ordinary clients wait; p99 ratio {ratio}"
    shown = Table(title=title)
    for column in (
        "round",
        "beside",
        "seconds",
        "tokens in, out",
        "preemptions",
        "questions",
        "p50 s",
        "p99 s",
    ):
        shown.add_column(column, justify="right")
    for number, pair in enumerate(rounds, 1):
        for name, phase in zip(("hostile", "honest"), pair, strict=True):
            tokens = ", ".join(f"{count:,}" for count in phase.tokens)
            latencies = (f"{phase.percentile(percent):.3f}" for percent in (50, 99))
            row = (
                str(number),
                name,
                f"{phase.seconds:.0f}",
                tokens,
                str(phase.preemptions),
                str(len(phase.latencies)),
                *latencies,
            )
            shown.add_row(*row)
    return shown


class Hostile:
    """The whole run."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        tensor, stages = arguments.tensor_parallel_size, arguments.pipeline_parallel_size
        self.ranks = tensor * stages
        self.flags = [*SERVERS[arguments.server], *FLAGS]
        self.flags += ["--tensor-parallel-size", str(tensor), "--pipeline-parallel-size", str(stages)]
        self.console = Console(width=110)
        self.passed = False

    async def run(self) -> None:
        """Everything: start, rounds, table, verdict, record."""
        load_average = warn_if_busy(self.console)
        model = make_model(
            SCRATCH / "model", layers=LAYERS, hidden=HIDDEN, heads=4, kv_heads=4, max_len=MAX_LEN
        )
        env = cpu_environment(1, self.ranks) | ENVIRONMENT
        server = Server(model, SCRATCH / "server.log", self.flags, env)
        self.console.print(f"starting vllm serve {' '.join(self.flags)}", highlight=False)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with server, httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as client:
            await self._warm_up(client, server.model)
            rounds = []
            for number in range(self.arguments.rounds):
                rounds.append(await self._round(server, client, number))
                self.console.print(f"round {number + 1} of {self.arguments.rounds} is done", highlight=False)
            after = await server.snapshot()
        ratio = paired_ratio(
            *([phase.percentile(99) for phase in side] for side in zip(*rounds, strict=True))
        )
        self._judge(rounds, ratio, after.request_pages, load_average)

    async def _warm_up(self, client: httpx.AsyncClient, model: str) -> None:
        """The first requests compile what later ones use."""
        for ask in honest_asks(model, [(QUESTION, ANSWER)] * 4, seed=-1):
            (await client.post(ask.path, json=ask.body)).raise_for_status()

    async def _round(self, server: Server, client: httpx.AsyncClient, number: int) -> tuple[Phase, Phase]:
        """Beside hostile clients, then beside honest ones with as many tokens."""
        count = self.arguments.requests
        hostile = await run_phase(server, client, hostile_asks(server.model, count, number), number)
        honest = await run_phase(server, client, honest_asks(server.model, hostile.lengths, number), number)
        return hostile, honest

    def _judge(
        self, rounds: Sequence[tuple[Phase, Phase]], ratio: Estimate, pages: int, load_average: float
    ) -> None:
        requirements = met(ratio, rounds) | {"pages held at the end": (pages, 0)}
        self.console.print(table(rounds, ratio))
        for name, (value, most) in requirements.items():
            style = None if value <= most else "bold red"
            self.console.print(f"{name}: {value:.3g}, at most {most:g}", style=style, highlight=False)
        for failure in [failure for pair in rounds for phase in pair for failure in phase.failures][:5]:
            self.console.print(failure, style="red", highlight=False)
        self.passed = all(value <= most for value, most in requirements.values())
        results = {
            "flags": self.flags,
            "concurrency": CONCURRENCY,
            "load_average_at_start": load_average,
            "rounds": [{"hostile": one.summary(), "honest": other.summary()} for one, other in rounds],
            "p99_ratio": vars(ratio),
            "targets": [
                {"name": name, "value": value, "bound": most, "at_most": True, "met": value <= most}
                for name, (value, most) in requirements.items()
            ],
        }
        name, folder = self.arguments.name, RESULTS if self.arguments.name is None else SCRATCH
        path = save(name or self._record_name(), record("hostile", results), folder)
        self.console.print(f"written to {path}", highlight=False)

    def _record_name(self) -> str:
        tensor, stages = self.arguments.tensor_parallel_size, self.arguments.pipeline_parallel_size
        mode = "" if self.arguments.server == "chunks" else f"-{self.arguments.server}"
        return (
            f"hostile{mode}" + (f"-tp{tensor}" if tensor > 1 else "") + (f"-pp{stages}" if stages > 1 else "")
        )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument(
        "--requests", type=whole, default=300, metavar="N", help="hostile requests per round (default: 300)"
    )
    parser.add_argument(
        "--server",
        choices=SERVERS,
        default="chunks",
        help="how the server evicts by default: chunk by chunk (take) or layer by layer (knorm) (default: chunks)",
    )
    parser.add_argument("--rounds", type=whole, default=3, metavar="N", help="number of rounds (default: 3)")
    for kind in ("tensor", "pipeline"):
        name = f"--{kind}-parallel-size"
        parser.add_argument(name, type=whole, default=1, metavar="N", help="as for vllm serve (default: 1)")
    add_start_patience(parser)
    parser.add_argument(
        "--name", help=f"write the record to {SCRATCH}/NAME.json, not to the project's results"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; the exit code."""
    hostile = Hostile(parse_arguments(argv))
    return run_benchmark(hostile.run()) or int(not hostile.passed)


if __name__ == "__main__":
    sys.exit(main())
