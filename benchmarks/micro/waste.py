"""Memory that pages and their bookkeeping waste.

One engine serves the same requests with each policy. Once every prompt is read and evicted, and after every decode step
from there, it reports how many KV entries it stores, how many pages they take, and the size of all bookkeeping: page
tables, free pages, row lengths, and the accounts of the worker and of the scheduler. Nothing is timed, so the figures
have no spread; the worst step counts against the targets.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from rich.progress import track

from benchmarks.harness.options import policy_name, whole
from benchmarks.harness.scenarios import BLOCK, KV_HEADS, LAYERS, Target, model, token_bytes
from benchmarks.harness.sides import Engine, Side, Workload, running
from benchmarks.harness.tables import table
from benchmarks.micro.engines import CHUNK, admit, drop, output_len, prefill, requests
from benchmarks.micro.loop import Found

LIVE, METADATA = 0.95, 0.03
"""Targets: live entries in the pages held at least, metadata over the KV bytes held at most.

Nothing is timed, so they hold for every level and dtype.
"""
OPTIONS = (
    ("policies", policy_name, ["ada-snapkv", "snapkv", "lava"], "that evict"),
    ("requests", whole, 16, "requests at once"),
    ("input-len", whole, 2048, "tokens of each prompt"),
    ("output-len", whole, 64, "decode steps after the last eviction"),
    ("budget", whole, 512, "tokens per KV head"),
    ("page-size", whole, 32, "entries of a page"),
    ("threads", whole, len(os.sched_getaffinity(0)), "OpenMP threads of the engine"),
)


def refuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    if not 32 < arguments.budget < arguments.input_len:
        return "--budget must be above 32, the policies' window, and below --input-len"
    if arguments.input_len < 256:
        return "--input-len must be at least 256: shorter prompts are kept whole"
    if "full" in arguments.policies:
        return "--policies must evict"
    return None if arguments.page_size in (32, 64, 128) else "--page-size must be 32, 64 or 128"


@dataclass(frozen=True)
class Sample:
    """What one moment of an engine shows.

    Attributes:
        tokens: of each request, prompt and output.
        entries: KV entries stored, over all layers and KV heads.
        pages: pages held.
        page_size: entries that a page has room for.
        page_bytes: size of a page.
        metadata: bytes of what finds the entries again, by its name.
    """

    tokens: list[int]
    entries: int
    pages: int
    page_size: int
    page_bytes: int
    metadata: dict[str, int]

    @property
    def live(self) -> float:
        """Share of the room in the held pages that entries take."""
        return self.entries / (self.pages * self.page_size)

    @property
    def overhead(self) -> float:
        """Metadata over the bytes of the pages held."""
        return sum(self.metadata.values()) / self.kv_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pages held."""
        return self.pages * self.page_bytes

    @property
    def stock_bytes(self) -> int:
        """Bytes of the blocks in which stock vLLM would hold the same requests."""
        entry = self.page_bytes // self.page_size
        return sum(-(-tokens // BLOCK) for tokens in self.tokens) * BLOCK * LAYERS * KV_HEADS * entry


def object_bytes(root: Any, seen: set[int] | None = None) -> int:
    """Bytes of an object and of all that it refers to, each object once; classes and code do not count."""
    seen = set() if seen is None else seen
    if id(root) in seen or isinstance(root, (type, FunctionType, ModuleType)):
        return 0
    seen.add(id(root))
    if isinstance(root, (torch.Tensor, np.ndarray)):
        return int(root.nbytes)
    inside: list[Any] = []
    if isinstance(root, dict):
        inside = [*root, *root.values()]
    elif isinstance(root, (list, tuple, set, frozenset)):
        inside = list(root)
    elif hasattr(root, "__dict__"):
        inside = [root.__dict__]
    return sys.getsizeof(root) + sum(object_bytes(item, seen) for item in inside)


# What the engine's process does.


def sample(engine: Engine) -> Sample:
    """This moment of an engine with eviction."""
    from vllm_kvevict.engine.worker.runtime import get_runtime

    runtime = get_runtime()
    cache = runtime.rank.cache
    return Sample(
        tokens=[request.num_computed_tokens for request in requests(engine)],
        entries=cache.lengths.total_entries,
        pages=cache.physical_pages,
        page_size=cache.page_size,
        page_bytes=cache.storage[0].nbytes,
        metadata={
            "page tables": object_bytes(cache.tables),
            "free pages": object_bytes(cache.pool),
            "row lengths": object_bytes(cache.lengths),
            "worker's requests": object_bytes(runtime.residents),
            "ledger": object_bytes(engine.probe.scheduler.kv_cache_manager.accounts),
        },
    )


def hold(engine: Engine, workload: Workload, steps: int, policy: str) -> list[Sample]:
    """Read and evict all prompts, then decode.

    Returns:
        A sample after the last eviction, and one after each step.

    Raises:
        RuntimeError: not every request was evicted.
    """
    engine.probe.reset()
    total = admit(engine, workload, policy)
    if prefill(engine) != total or len(engine.probe.evictions) != workload.requests:
        raise RuntimeError(f"{len(engine.probe.evictions)} of {workload.requests} requests were evicted")
    samples = [sample(engine)]
    for _ in range(steps):
        engine.llm.llm_engine.step()
        samples.append(sample(engine))
    drop(engine)
    engine.llm.llm_engine.step()  # the worker hears of it
    return samples


# What the parent does.


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """The figures of a policy, shares as fractions; the raw samples with them."""
    lives, overheads = [one.live for one in samples], [one.overhead for one in samples]
    heaviest = max(samples, key=lambda one: one.overhead)
    return {
        "live_after_evictions": lives[0],
        "live_mean": sum(lives) / len(lives),
        "live_worst": min(lives),
        "metadata_worst": max(overheads),
        "metadata_worst_bytes": heaviest.metadata,
        "kv_bytes": samples[-1].kv_bytes,
        "stock_bytes": samples[-1].stock_bytes,
        "samples": [asdict(one) for one in samples],
    }


def targets(results: dict[str, dict[str, Any]]) -> list[Target]:
    """What the worst step of the worst policy should reach."""
    live = min(figures["live_worst"] for figures in results.values())
    metadata = max(figures["metadata_worst"] for figures in results.values())
    return [
        Target("share of live entries in pages, worst step", live, LIVE),
        Target("metadata over KV held, worst step", metadata, METADATA, at_most=True),
    ]


def measure(arguments: argparse.Namespace) -> Found:
    """Sample every policy."""
    count, length, steps = arguments.requests, arguments.input_len, arguments.output_len
    workload = Workload(count, length, output_len(count, length, steps))
    max_len = length + workload.output_len
    blocks = count * -(-max_len // BLOCK) + 1  # vLLM keeps one for itself
    side = Side(
        "waste",
        model(max(4096, max_len)),
        arguments.threads,
        dtype=arguments.dtype,
        max_model_len=max_len,
        max_num_batched_tokens=CHUNK,
        kv_cache_memory_bytes=blocks * BLOCK * token_bytes(arguments.dtype),
        kv_eviction=arguments.policies[0],
        kv_budget=arguments.budget,
        kv_eviction_config={"page_size": arguments.page_size, "policies": ["all"]},
    )
    results = {}
    with running(side):
        for name in track(arguments.policies, "policies"):
            results[name] = summary(side.call(hold, workload, steps, name))
    columns = ("live after evictions", "mean", "worst step", "KV MiB", "of stock's", "metadata over KV")
    shown = table("live entries in the pages held, and what is held after the last step", ["policy"], columns)
    for name, of in results.items():
        shares = (f"{of[what]:.1%}" for what in ("live_after_evictions", "live_mean", "live_worst"))
        held = f"{of['kv_bytes'] / 2**20:.1f}", f"{of['kv_bytes'] / of['stock_bytes']:.1%}"
        shown.add_row(name, *shares, *held, f"{of['metadata_worst']:.2%}")
    return Found({"policies": results}, [shown], targets(results))
