"""Send a load to one running server with vLLM's own benchmark client, and watch the server meanwhile."""

import asyncio
import contextlib
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.harness.server import Server, ServerError, Snapshot, tail
from benchmarks.harness.sides import FIRST_WORD, VOCAB
from vllm_kvevict.kernels.layout import KVLayout

HEAD_DIM = 64
"""Of the benchmark models."""
NUMBER_BYTES = {"bfloat16": 2, "float32": 4}
"""Of each dtype that a CPU benchmark can run in."""
INT8 = "int8_per_token_head"
"""vLLM's name of entries in 8 bits."""
PAGE = 32
"""The default ``page_size``."""
POLL_SECONDS = 0.2
SETTLE_SECONDS = 1.5
"""vLLM's processes spin for a second after the last message: until then they would disturb the next run."""
LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}
"""Our name of a latency and the client's."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Load:
    """Requests of random tokens; those of another load or another seed never share a prompt.

    Attributes:
        requests: how many.
        input_len, output_len: tokens of each prompt and answer.
        spread: lengths are uniform within this share of input_len and output_len around them.
        rate: requests per second, a Poisson process; None: all at once.
        seed: of tokens, lengths and arrivals.
    """

    requests: int
    input_len: int
    output_len: int
    spread: float = 0.0
    rate: float | None = None
    seed: int = 0

    def prompts(self) -> list[tuple[list[int], int]]:
        """Token ids and output length of every request."""
        choose = random.Random(f"{self}")

        def length(middle: int) -> int:
            return choose.randint(math.ceil(middle * (1 - self.spread)), longest(middle, self.spread))

        return [
            (choose.choices(range(FIRST_WORD, VOCAB), k=length(self.input_len)), length(self.output_len))
            for _ in range(self.requests)
        ]


@dataclass(frozen=True)
class Run:
    """What a load took and showed.

    Attributes:
        wall: seconds from the first request to the end of the last answer.
        cpu: CPU seconds of all processes of the server. vLLM's processes spin while they wait for each other, which
            is in it.
        completed: requests; a run with failures is an error.
        output_tokens: of all requests.
        latency: seconds until the first token (ttft), per further token of a request (tpot), between tokens
            (itl), of whole requests (e2e); each with mean, p50, p90 and p99. Without tpot and itl where
            all answers have one token.
        peak_running: most requests seen running at once.
        physical_bytes, logical_bytes: KV memory held when it was most, over all ranks, and the entries stored
            in it at that moment; stock vLLM does not tell the latter.
        preemptions: requests that lost their KV cache and had to be computed again.
        evictions: how many; an answer may be evicted more than once.
        decision_seconds, compaction_seconds: sums over the evictions, of the slowest rank of each.
        drafted, accepted: tokens of speculative decoding.
    """

    wall: float
    cpu: float
    completed: int
    output_tokens: int
    latency: dict[str, dict[str, float]]
    peak_running: int
    physical_bytes: float
    logical_bytes: int | None
    preemptions: int
    evictions: int
    decision_seconds: float
    compaction_seconds: float
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.wall

    @property
    def tokens_per_cpu_second(self) -> float:
        """Output tokens per CPU second of the server."""
        return self.output_tokens / self.cpu

    @property
    def requests_per_second(self) -> float:
        """Completed requests per second."""
        return self.completed / self.wall

    @property
    def evict_share(self) -> float:
        """Share of the time spent on choosing and moving what is kept."""
        return (self.decision_seconds + self.compaction_seconds) / self.wall

    def summary(self) -> dict[str, Any]:
        """For the record."""
        names = ("tokens_per_second", "tokens_per_cpu_second", "requests_per_second", "evict_share")
        return asdict(self) | {name: getattr(self, name) for name in names}


def entry_bytes(dtype: str) -> int:
    """Key and value of one token in one layer and KV head."""
    return KVLayout.of_heads(1, 1, 1, HEAD_DIM, dtype, is_quantised=dtype == INT8).entry_bytes


def page_bytes(dtype: str) -> int:
    """A page with room for ``PAGE`` entries."""
    return PAGE * entry_bytes(dtype)


def longest(length: int, spread: float) -> int:
    """Most tokens of a prompt or answer that is ``length`` tokens long on average."""
    return math.floor(length * (1 + spread))


async def drive(server: Server, load: Load, kv_bytes: int, dtype: str) -> Run:
    """Run a load to its end and wait until the server has come to rest.

    Args:
        server: it answers, and nobody else uses it.
        load: what to send.
        kv_bytes: the server's KV memory, over all ranks.
        dtype: of the KV entries in it.

    Raises:
        ServerError: if the server ended, or a request failed or had another length than asked for.
    """
    prompts = load.prompts()
    before, cpu = await server.snapshot(), server.cpu_seconds()
    client = asyncio.create_task(_send(server, load, prompts))
    seen = []
    try:
        while not client.done():
            await asyncio.wait([client], timeout=POLL_SECONDS)
            server.check()
            seen.append(await server.snapshot())
        result = client.result()
    finally:
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
    cpu = server.cpu_seconds() - cpu
    _require_all(server, prompts, result)
    run = summarise(result, cpu, before, seen, await server.snapshot(), kv_bytes, dtype)
    await asyncio.sleep(SETTLE_SECONDS)
    return run


async def _send(server: Server, load: Load, prompts: Sequence[tuple[list[int], int]]) -> dict[str, Any]:
    """The result of vLLM's client; what it prints goes to a file beside the server's log.

    Its random dataset has only as many prompts as the vocabulary has words, which would let prefix caching help;
    so it gets our own.
    """
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark
    from vllm.tokenizers import get_tokenizer

    requests = [
        SampleRequest(prompt=prompt, prompt_len=len(prompt), expected_output_len=length)
        for prompt, length in prompts
    ]
    np.random.seed(load.seed)  # the client draws arrivals from it
    log = server.log.with_suffix(".client.log")
    with log.open("a") as file, contextlib.redirect_stdout(file):
        return await benchmark(
            task_type=TaskType.GENERATION,
            endpoint_type="openai",
            api_url=f"{server.url}/v1/completions",
            base_url=server.url,
            model_id=server.model,
            model_name=server.model,
            tokenizer=get_tokenizer(server.model),
            input_requests=requests,
            logprobs=None,
            request_rate=math.inf if load.rate is None else load.rate,
            burstiness=1.0,
            disable_tqdm=True,
            num_warmups=0,
            profile=False,
            selected_percentile_metrics=list(LATENCIES.values()),
            selected_percentiles=list(PERCENTILES),
            ignore_eos=True,
            goodput_config_dict={},
            max_concurrency=None,
            lora_modules=None,
            extra_headers=None,
            extra_body={"temperature": 0},
            ready_check_timeout_sec=0,
        )


def _require_all(server: Server, prompts: Sequence[tuple[list[int], int]], result: dict[str, Any]) -> None:
    """Raise ServerError unless every request was answered in full length."""
    errors = [error for error in result["errors"] if error]
    if result["failed"]:
        reason = errors[0].strip().splitlines()[-1] if errors else "no reason given"
        raise ServerError(
            f"{result['failed']} of {len(prompts)} requests failed ({reason}); the end of {server.log}:\n"
            f"{tail(server.log)}"
        )
    wanted = [(len(prompt), length) for prompt, length in prompts]
    got = list(zip(result["input_lens"], result["output_lens"], strict=True))
    if got != wanted:
        raise ServerError(f"{server.log}: the answers have other lengths than asked for: {got}, not {wanted}")


def summarise(
    result: dict[str, Any],
    cpu: float,
    before: Snapshot,
    seen: Sequence[Snapshot],
    after: Snapshot,
    kv_bytes: int,
    dtype: str,
) -> Run:
    """Join what the client measured and what the server's metrics said before, during and after the run."""
    physical, logical = max((_held(snapshot, kv_bytes, dtype) for snapshot in seen), key=lambda held: held[0])
    names = LATENCIES
    if max(result["output_lens"]) == 1:
        names = {name: theirs for name, theirs in LATENCIES.items() if name not in ("tpot", "itl")}
    return Run(
        wall=result["duration"],
        cpu=cpu,
        completed=result["completed"],
        output_tokens=result["total_output_tokens"],
        latency={name: _seconds(result, theirs) for name, theirs in names.items()},
        peak_running=max(snapshot.running for snapshot in seen),
        physical_bytes=physical,
        logical_bytes=logical,
        preemptions=after.preemptions - before.preemptions,
        evictions=after.evictions - before.evictions,
        decision_seconds=after.decision_seconds - before.decision_seconds,
        compaction_seconds=after.compaction_seconds - before.compaction_seconds,
        drafted=after.draft_tokens - before.draft_tokens,
        accepted=after.accepted_drafts - before.accepted_drafts,
    )


def _held(snapshot: Snapshot, kv_bytes: int, dtype: str) -> tuple[float, int | None]:
    """Bytes of KV memory held, and of the entries stored if the server tells."""
    if snapshot.physical_pages is None or snapshot.logical_entries is None:
        return snapshot.kv_usage * kv_bytes, None
    return snapshot.physical_pages * page_bytes(dtype), snapshot.logical_entries * entry_bytes(dtype)


def _seconds(result: dict[str, Any], theirs: str) -> dict[str, float]:
    """Mean and percentiles of one latency, from the client's milliseconds."""
    names = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))
    return {name: float(result[f"{name}_{theirs}_ms"]) / 1e3 for name in names}
