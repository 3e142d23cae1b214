"""What the GPU benchmarks share: the shapes, the timer, turns, checks, FlashAttention, and the loop with its record."""

import argparse
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.harness.measure import RESULTS, Estimate, estimate, save
from benchmarks.harness.options import add, whole
from benchmarks.harness.scenarios import Target, show_targets
from vllm_kvevict import machine

LAYERS, HIDDEN, FEED_FORWARD = 32, 4096, 14336
QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Of Llama-3.1-8B."""
GROUP = QUERY_HEADS // KV_HEADS
SCALE = HEAD_DIM**-0.5
DTYPE = torch.bfloat16
PAGE, STOCK_PAGE = 32, 16
"""Tokens of a page of ours, which holds one KV head, and of vLLM's, which holds all."""
ENTRY_BYTES = 2 * HEAD_DIM * 2
"""Key and value of one token in one layer and KV head."""
PAGE_ELEMENTS = 2 * PAGE * HEAD_DIM

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


def require_cuda() -> None:
    """End the program with one line unless there is a CUDA device."""
    if not torch.cuda.is_available():
        sys.exit("error: this benchmark needs a CUDA device, and torch finds none")


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


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
        name: how results call it.
        run: does it once.
        prepare: called before each run, not timed.
        ahead_ms: how far the host is ahead of the device when it starts.
        waits: whether it asks the device for results, so that the host cannot stay ahead.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    ahead_ms: float = 4.0
    waits: bool = False


@dataclass
class Times:
    """What timing a contender gave.

    Attributes:
        ms: milliseconds of each round.
        late: rounds in which the host was late, so that launches are in the time, though nothing had to wait.
    """

    ms: list[float] = field(default_factory=list)
    late: int = 0

    @property
    def us(self) -> Estimate:
        """Microseconds."""
        return estimate([1e3 * value for value in self.ms])


def take_turns(contenders: Sequence[Contender], rounds: int, timer: Timer) -> dict[str, Times]:
    """Time all of them, once a round and in turns; the results by name."""
    times = {contender.name: Times() for contender in contenders}
    for number in range(-WARM_UP, rounds):
        for contender in contenders[:: 1 if number % 2 == 0 else -1]:
            contender.prepare()
            ms = timer(contender.run, contender.ahead_ms)
            if number >= 0:
                times[contender.name].ms.append(ms)
                times[contender.name].late += timer.was_late and not contender.waits
    return times


def note_late(out: Console, times: Sequence[Times]) -> None:
    """Say so where launches are in the times."""
    late, total = sum(one.late for one in times), sum(len(one.ms) for one in times)
    if late:
        out.print(f"the host was late in {late} of {total} timings: they include what launches cost it")


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

    def plan(self, requests: int, queries: int, longest: int, lengths: Tensor, starts: Tensor) -> Any:
        """The schedule that vLLM makes once a step for all layers, over pages of all KV heads; None without one.

        Args:
            requests, queries, longest: sequences, most query tokens of one, most entries of one.
            lengths, starts: int32 [requests], int32 [requests + 1]: entries, and where queries start.
        """
        if self.version != 3:
            return None
        return self._plan(
            batch_size=requests,
            max_seqlen_q=queries,
            max_seqlen_k=longest,
            num_heads_q=QUERY_HEADS,
            num_heads_kv=KV_HEADS,
            headdim=HEAD_DIM,
            cache_seqlens=lengths,
            qkv_dtype=DTYPE,
            cu_seqlens_q=starts,
            page_size=STOCK_PAGE,
            causal=True,
        )

    def __call__(self, **arguments: Any) -> Any:
        """Causal attention; arguments as of ``flash_attn_varlen_func``."""
        return self._attend(**arguments, softmax_scale=SCALE, causal=True, fa_version=self.version)


def stock_pages(memory: Tensor) -> tuple[Tensor, Tensor]:
    """Some memory as vLLM's pages of one layer: keys and values, [pages, STOCK_PAGE, KV_HEADS, HEAD_DIM] each."""
    pages = memory.view(-1, STOCK_PAGE, KV_HEADS, 2 * HEAD_DIM)
    return pages[..., :HEAD_DIM], pages[..., HEAD_DIM:]


def random_numbers(*shape: int) -> Tensor:
    """Normal numbers on the device."""
    return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_()


@dataclass
class Found:
    """What a benchmark measured.

    Attributes:
        results: for the record.
        times: of all contenders.
        targets: to judge.
        table: to print at the end.
        notes: sentences to print.
    """

    results: dict[str, Any]
    times: Sequence[Times]
    targets: Sequence[Target]
    table: Table
    notes: Sequence[str] = ()


def parser(name: str, description: str | None, rounds: int) -> argparse.ArgumentParser:
    """A command line with what all have."""
    result = argparse.ArgumentParser(
        prog=f"python -m benchmarks.gpu.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = RESULTS / "gpu" / f"{name}.json"
    add(
        result,
        ("rounds", whole, rounds, "timings of each contender"),
        ("out", Path, own, "file of the record"),
    )
    return result


def run(
    name: str, arguments: argparse.Namespace, measure: Callable[[argparse.Namespace, Timer], Found]
) -> None:
    """Measure, print and save."""
    require_cuda()
    torch.manual_seed(0)
    console = Console(width=160)
    with torch.inference_mode():
        found = measure(arguments, Timer())
    note_late(console, found.times)
    for note in found.notes:
        console.print(note)
    results = found.results | {"targets": show_targets(console, found.targets)}
    print(f"written to {write(name, arguments, results)}")
    console.print(found.table)


def show_progress(items: Sequence[Any], what: str) -> Any:
    """Iterate with a bar on stderr, so that the table remains the last thing on stdout."""
    return track(items, what, console=Console(stderr=True))


def write(name: str, arguments: argparse.Namespace, results: Any) -> Path:
    """Write the record: results, command, card, driver and versions. Returns its path."""
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    content = {
        "command": shlex.join(["python", "-m", f"benchmarks.gpu.{name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": card(),
        "cpu": machine.cpu_model(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda}
        | {package: _version(package) for package in ("torch", "triton", "vllm", "vllm-kvevict")},
        "settings": settings,
        "results": results,
    }
    return save(arguments.out.stem, content, arguments.out.parent)


def card() -> dict[str, Any]:
    """Name, memory, multiprocessors and driver of the device."""
    properties = torch.cuda.get_device_properties(DEVICE)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        driver = answer.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    return {
        "name": properties.name,
        "memory_GiB": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "driver": driver,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
