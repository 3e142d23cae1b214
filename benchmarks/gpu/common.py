"""What the GPU benchmarks share: the shapes, the timer, turns, checks and FlashAttention."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from vllm.collect_env import get_nvidia_driver_version, run

from benchmarks.harness.measure import Estimate, estimate
from benchmarks.micro.loop import in_turns
from vllm_kvevict.engine.worker.batch import Sequences
from vllm_kvevict.kernels.layout import KVLayout

LAYERS, HIDDEN, FEED_FORWARD = 32, 4096, 14336
QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Of Llama-3.1-8B."""
GROUP = QUERY_HEADS // KV_HEADS
SCALE = HEAD_DIM**-0.5
DTYPE = torch.bfloat16
PAGE, STOCK_PAGE = 32, 16
"""Tokens of a page of ours, which holds one KV head, and of vLLM's, which holds all."""
LAYOUT = KVLayout.of_heads(PAGE, KV_HEADS, KV_HEADS, HEAD_DIM, "bfloat16")
ENTRY_BYTES, PAGE_ELEMENTS = LAYOUT.entry_bytes, LAYOUT.page_elements
"""Key and value of one token in one layer and KV head; numbers in a page."""

DEVICE = torch.device("cuda")
FLUSH_BYTES = 256 << 20
"""Read before each timing: several times the largest L2 cache."""
COPY_BYTES = 1 << 30
WARM_UP = 3
"""Rounds before those that count: kernels are compiled in the first."""
CYCLES_PER_MS = 2_000_000
"""Of a clock that is at least as fast as any card's, so that a delay is never shorter than asked for."""
TOLERANCE = 1e-2
"""Relative error, by norms, of results of attention; those of bf16 come closest to it."""


class WrongResult(RuntimeError):
    """A kernel's result differs from the reference."""


def free_bytes() -> int:
    """Memory of the device that is not in use."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def multiprocessors() -> int:
    """Of the device."""
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


class Timer:
    """Milliseconds of work on the device, by CUDA events, from a cold L2 cache.

    The device first waits, so that the host can hand over all of the work meanwhile: what launches cost the host is
    then not in the time, as in an engine that replays a CUDA graph or runs ahead of the device.

    Attributes:
        was_late: whether the device started the last work before the host had handed over all of it.
    """

    def __init__(self) -> None:
        self._flush = torch.ones(FLUSH_BYTES // 4, device=DEVICE)
        self.was_late = False

    def __call__(self, work: Callable[[], object], ahead_ms: float) -> float:
        """Milliseconds that ``work`` takes when the host is ``ahead_ms`` ahead of the device."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.sum()  # reads, so that no written line is left to be stored at the expense of the work
        torch.cuda._sleep(int(ahead_ms * CYCLES_PER_MS))
        begin.record()
        work()
        end.record()
        self.was_late = begin.query()
        end.synchronize()
        return begin.elapsed_time(end)


@contextmanager
def device() -> Iterator[Timer]:
    """A timer of the device, and a mode without gradients; without a device the program ends with one line."""
    if not torch.cuda.is_available():
        sys.exit("error: this benchmark needs a CUDA device, and torch finds none")
    torch.manual_seed(0)
    with torch.inference_mode():
        yield Timer()


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
        name: how results call it.
        run: does it once.
        moved: bytes that it has to read and write, where that is asked for.
        prepare: called before each run, not timed.
        ahead_ms: how far the host is ahead of the device when it starts.
        waits: whether it asks the device for results, so that the host cannot stay ahead.
    """

    name: str
    run: Callable[[], object]
    moved: int = 0
    prepare: Callable[[], object] = lambda: None
    ahead_ms: float = 4.0
    waits: bool = False

    def time(self, timer: Timer) -> tuple[float, bool]:
        """Milliseconds, and whether the host was late although nothing had to wait."""
        self.prepare()
        ms = timer(self.run, self.ahead_ms)
        return ms, timer.was_late and not self.waits


@dataclass
class Times:
    """What timing a contender gave.

    Attributes:
        ms: milliseconds of each round.
        late: rounds in which the host was late, so that launches are in the time, though nothing had to wait.
    """

    ms: list[float]
    late: int

    @property
    def us(self) -> Estimate:
        """Microseconds."""
        return estimate([1e3 * value for value in self.ms])


def take_turns(contenders: Sequence[Contender], rounds: int, timer: Timer) -> dict[str, Times]:
    """Time all of them, once a round and in turns; the results by name."""
    calls = {one.name: lambda one=one: one.time(timer) for one in contenders}
    found = in_turns(calls, rounds, WARM_UP)
    return {
        name: Times([ms for ms, _ in seen], sum(late for _, late in seen)) for name, seen in found.items()
    }


def late_notes(times: Sequence[Times]) -> list[str]:
    """A sentence where launches are in the times."""
    late, total = sum(one.late for one in times), sum(len(one.ms) for one in times)
    note = f"the host was late in {late} of {total} timings: they include what launches cost it"
    return [note] if late else []


def copy_bandwidth(rounds: int, timer: Timer) -> float:
    """Bytes per second that a copy within the device's memory reads and writes, the median of some rounds."""
    source = torch.ones(COPY_BYTES // 4, device=DEVICE)
    target = torch.empty_like(source)
    times = take_turns([Contender("copy", lambda: target.copy_(source))], rounds, timer)
    return 2e6 * COPY_BYTES / times["copy"].us.median


def check(name: str, actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Compare by norms, in fp32; a tolerance of 0 wants equality.

    Raises:
        WrongResult: they differ by more, or there is a NaN.
    """
    if tolerance == 0:
        if not torch.equal(actual, expected):
            raise WrongResult(f"{name}: the result differs from the reference")
        return
    error = float((actual.float() - expected.float()).norm() / expected.float().norm())
    if not error <= tolerance:
        raise WrongResult(f"{name}: relative error {error:.2g} against the reference, at most {tolerance:g}")


class FlashAttention:
    """vLLM's FlashAttention, of the version that vLLM would use on this device."""

    def __init__(self) -> None:
        try:
            from vllm.v1.attention.backends import fa_utils

            self._attend = fa_utils.flash_attn_varlen_func
        except (ImportError, AttributeError) as error:
            sys.exit(f"error: this benchmark needs FlashAttention from a CUDA build of vLLM: {error}")
        self._plan = fa_utils.get_scheduler_metadata
        self.version = fa_utils.get_flash_attn_version(head_size=HEAD_DIM)

    def plan(self, sequences: Sequences) -> Any:
        """The schedule that vLLM makes once a step for all layers, over pages of all KV heads; None without one."""
        if self.version != 3:
            return None
        return self._plan(
            batch_size=len(sequences.seq_lens),
            max_seqlen_q=sequences.longest_query,
            max_seqlen_k=sequences.longest,
            num_heads_q=QUERY_HEADS,
            num_heads_kv=KV_HEADS,
            headdim=HEAD_DIM,
            cache_seqlens=sequences.seq_lens,
            qkv_dtype=DTYPE,
            cu_seqlens_q=sequences.query_start_loc,
            page_size=STOCK_PAGE,
            causal=True,
        )

    def __call__(
        self,
        query: Tensor,
        pages: tuple[Tensor, Tensor],
        sequences: Sequences,
        output: Tensor,
        plan: Any = None,
    ) -> None:
        """Causal attention of queries to keys and values in pages.

        Args:
            query, output: [tokens, heads, HEAD_DIM]; output is filled.
            pages: keys and values, [pages, tokens of a page, KV heads, HEAD_DIM] each.
            plan: see :meth:`plan`.
        """
        self._attend(
            q=query,
            k=pages[0],
            v=pages[1],
            out=output,
            cu_seqlens_q=sequences.query_start_loc,
            max_seqlen_q=sequences.longest_query,
            seqused_k=sequences.seq_lens,
            max_seqlen_k=sequences.longest,
            block_table=sequences.block_table,
            softcap=0.0,
            scheduler_metadata=plan,
            softmax_scale=SCALE,
            causal=True,
            fa_version=self.version,
        )


def expected(query: Tensor, pages: tuple[Tensor, Tensor], table: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attention in plain torch and fp32, of one query token per sequence.

    Args:
        query: [S, H * G, D] for pages of H heads.
        pages: as of :class:`FlashAttention`.
        table, lengths: of the S sequences, [S, width].
    """
    results = []
    for one, row, length in zip(query, table.long(), lengths, strict=True):
        used = row[: -(-length // pages[0].shape[1])]
        k, v = (x[used].flatten(0, 1)[:length].float() for x in pages)
        grouped = one.float().unflatten(0, (k.shape[1], -1))
        weights = (SCALE * torch.einsum("hgd,nhd->hgn", grouped, k)).softmax(-1)
        results.append(torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1))
    return torch.stack(results)


def stock_pages(memory: Tensor) -> tuple[Tensor, Tensor]:
    """Some memory as vLLM's pages of one layer: keys and values, [pages, STOCK_PAGE, KV_HEADS, HEAD_DIM] each."""
    pages = memory.view(-1, STOCK_PAGE, KV_HEADS, 2 * HEAD_DIM)
    return pages[..., :HEAD_DIM], pages[..., HEAD_DIM:]


def stock_sequences(requests: int, tokens: int, queries: int) -> Sequences:
    """Requests that hold so many tokens and ask with their last ones, in stock pages in random order."""
    starts = queries * torch.arange(requests + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((requests,), tokens, dtype=torch.int32, device=DEVICE)
    pages = requests * -(-tokens // STOCK_PAGE)
    table = torch.randperm(pages, dtype=torch.int32, device=DEVICE).view(requests, -1)
    return Sequences(lengths, table, starts, tokens, queries)


def random_numbers(*shape: int) -> Tensor:
    """Normal numbers on the device."""
    return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_()


def card() -> dict[str, Any]:
    """For the record: the device, its driver, and the versions that are a GPU's alone."""
    properties = torch.cuda.get_device_properties(DEVICE)
    return {
        "name": properties.name,
        "memory_GiB": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "driver": get_nvidia_driver_version(run) or "unknown",
        "cuda": torch.version.cuda,
        "triton": metadata.version("triton"),
    }
