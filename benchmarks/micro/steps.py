"""The project's operations, each compared with the lower bound of its time.

One rank with 8 layers of 8 query and 4 KV heads of 64, no engine. The lower bound (floor) of an operation is the longer
of two times: its bytes at the speed at which this machine reads memory, and its FLOPs at the speed of a matrix product
in the same dtype. Both speeds are measured in every round with the same threads. Bytes are those of operands and
results, each counted once; for operations that only build index tensors, those of the tensors. Data in the processor's
cache can be faster than the floor. The rows of a decode step are those of all layers.
"""

import argparse
import os
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from benchmarks.harness.load import entry_bytes
from benchmarks.harness.measure import estimate
from benchmarks.harness.options import positive, whole
from benchmarks.harness.tables import table
from benchmarks.micro import floors
from benchmarks.micro.floors import Machine, Operation, Work, nbytes
from benchmarks.micro.holding import GROUP, HEAD_DIM, KERNEL, KV_HEADS, LAYERS, OP, PAGE, QUERY_HEADS, Holding
from benchmarks.micro.loop import Found
from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.worker.batch import lay_out
from vllm_kvevict.policies import EvictionConfig, LayerInputs, score_layer, select

OPTIONS = (
    ("batch", whole, 8, "requests in a decode step"),
    ("context", whole, 8192, "tokens of each request"),
    ("chunk", whole, 2048, "tokens of a prefill chunk"),
    ("rounds", whole, 9, "rounds of each operation"),
    ("threads", whole, len(os.sched_getaffinity(0)), "threads of each operation"),
    ("share", positive, 0.2, "share of the KV kept"),
)
STEPS = PAGE
"""Decode steps in a round of page allocation: every row takes one page."""


def refuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    if arguments.context < 256:
        return "--context must be at least 256"
    if not 1 < arguments.chunk < arguments.context:
        return "--chunk must be above 1 and below --context"
    return "--share must be in (0, 0.5]" if arguments.share > 0.5 else None


def decode_work(holding: Holding, batch: int) -> Work:
    """Floor of the attention of a decode step, all layers: every stored entry meets the query heads of its KV head."""
    stored = sum(int(call.seq_lens.sum()) for call in holding.calls)
    numbers = 2 * stored * HEAD_DIM + 2 * LAYERS * batch * QUERY_HEADS * HEAD_DIM
    return Work(numbers * holding.dtype.itemsize, 4 * GROUP * HEAD_DIM * stored)


def step_operations(batch: int, context: int, share: float, dtype: str) -> list[Operation]:
    """A decode step of ``batch`` requests, all layers: attention, KV write, pages, metadata."""
    whole = Holding(batch, context, 1.0, KERNEL, 0, dtype)
    part = Holding(batch, context, share, KERNEL, 1, dtype)
    entries = torch.randn(batch * KV_HEADS, HEAD_DIM).to(part.dtype)
    slots, ones = list(range(batch)), [1] * batch
    lengths = {slot: part.cache.lengths.of(slot) for slot in slots}

    def decode_operations(holding: Holding, held: str) -> list[Operation]:
        work = decode_work(holding, batch)
        return [
            Operation(f"decode attention, {held}, {attention}", run, work)
            for attention, run in ((OP, holding.by_op), (KERNEL, holding.by_kernel))
        ]

    places = part.cache.entry_slots(part.step)

    def write() -> None:
        for layer in range(LAYERS):
            part.pages.append(entries, entries, places[layer])

    def extend() -> None:
        part.cache.extend(slots, ones)

    def restore() -> None:
        """Give back what earlier rounds added."""
        for slot in slots:
            for layer in range(LAYERS):
                kept = [torch.arange(count) for count in lengths[slot][layer].tolist()]
                part.cache.compact(slot, layer, kept)

    def metadata() -> list[Tensor]:
        calls = lay_out(part.cache, part.step, most_new_tokens=0).calls
        return [tensor for call in calls for tensor in (call.block_tables, call.query_start_loc)]

    # Lengths are read and written, and every row takes a page, which is zeroed, in as many steps as it has entries.
    rows = batch * LAYERS * KV_HEADS
    growth = rows * (2 * part.cache.tables.kv_len.itemsize + entry_bytes(dtype))
    return [
        *decode_operations(whole, f"all KV of {batch} x {context}"),
        *decode_operations(part, f"ragged {share:.0%} of the KV"),
        Operation(
            f"KV write, decode step, {OP}",
            write,
            Work(2 * LAYERS * batch * KV_HEADS * entry_bytes(dtype)),
            repeats=STEPS,
        ),
        Operation("page allocation, decode step", extend, Work(growth), restore, STEPS),
        Operation("batch metadata, decode step", metadata, Work(nbytes(*metadata())), repeats=STEPS),
    ]


def prompt_operations(context: int, chunk: int, share: float, dtype: str) -> list[Operation]:
    """The last chunk of one prompt, and its eviction in one layer."""
    prompt, growing, moving = (Holding(1, context, 1.0, OP, seed, dtype) for seed in (2, 3, 4))

    def refill(cache: PagedKVCache, tokens: int) -> None:
        """Let the cache's one request hold this many tokens."""
        cache.close([0])
        assert cache.open() == 0
        if tokens:
            cache.extend([0], [tokens])

    refill(prompt.cache, context - chunk)
    step = prompt.cache.extend([0], [chunk])
    (call,) = lay_out(prompt.cache, step, most_new_tokens=0).calls
    places = prompt.cache.entry_slots(step)
    queries = torch.randn(chunk * KV_HEADS, GROUP, HEAD_DIM).to(prompt.dtype)
    entries = torch.randn(chunk * KV_HEADS, HEAD_DIM).to(prompt.dtype)
    pairs = KV_HEADS * (chunk * (context - chunk) + chunk * (chunk + 1) // 2)
    one_layer = KV_HEADS * context * entry_bytes(dtype)

    configs = {name: EvictionConfig(name, keep_ratio=share) for name in ("ada-snapkv", "lava")}
    window = configs["ada-snapkv"].window_for(context)
    q_window = torch.randn(QUERY_HEADS, window, HEAD_DIM).to(prompt.dtype)
    logits = 2 * QUERY_HEADS * window * context * HEAD_DIM

    def score(policy: str) -> Any:
        values = prompt.cache.read("value", 0, 0, context) if "values" in configs[policy].needs else None
        inputs = LayerInputs(q_window, prompt.cache.read("key", 0, 0, context), values)
        return score_layer(configs[policy], inputs, 0, LAYERS)

    def attend_chunk() -> None:
        """With the copies that the engine makes."""
        assert call.gather is not None
        gathered = queries.index_select(0, call.gather)
        output = torch.empty_like(gathered)
        prompt.pages.attend(gathered, output, call.sequences(0), HEAD_DIM**-0.5, 0.0)
        torch.empty_like(queries).index_copy_(0, call.gather, output)

    scores = score("ada-snapkv")
    (kept,) = select(configs["ada-snapkv"], [scores], context)
    survivors = sum(positions.numel() for positions in kept)
    return [
        Operation(
            f"prefill attention, {chunk} at {context}, one layer",
            attend_chunk,
            Work(one_layer + 2 * nbytes(queries), 4 * GROUP * HEAD_DIM * pairs),
        ),
        Operation(
            f"KV write, {chunk} tokens, one layer",
            lambda: prompt.pages.append(entries, entries, places[0]),
            Work(4 * nbytes(entries)),
            repeats=STEPS,
        ),
        Operation(
            f"page allocation, {chunk} tokens",
            lambda: growing.cache.extend([0], [chunk]),
            Work(LAYERS * KV_HEADS * (2 + chunk // PAGE) * prompt.cache.tables.arena.itemsize),
            lambda: refill(growing.cache, context - chunk),
        ),
        Operation(
            "scoring, snapkv, one layer",
            lambda: score("ada-snapkv"),
            Work(one_layer // 2 + nbytes(scores.scores), logits),
            repeats=4,
        ),
        Operation(
            "scoring, lava, one layer",
            lambda: score("lava"),
            Work(one_layer + nbytes(scores.scores), logits),
            repeats=4,
        ),
        Operation(
            "selection, ada-snapkv, one layer",
            lambda: select(configs["ada-snapkv"], [scores], context),
            Work(nbytes(scores.scores, *kept)),
            repeats=4,
        ),
        Operation(
            f"compaction to {share:.0%}, one layer",
            lambda: moving.cache.compact(0, 0, kept),
            Work(2 * survivors * entry_bytes(dtype)),
            lambda: refill(moving.cache, context),
        ),
    ]


def measure(arguments: argparse.Namespace) -> Found:
    """All operations in turns."""
    torch.set_num_threads(arguments.threads)
    current_platform.import_kernels()
    torch.manual_seed(0)
    dtype, context, share = arguments.dtype, arguments.context, arguments.share
    operations = [
        *step_operations(arguments.batch, context, share, dtype),
        *prompt_operations(context, arguments.chunk, share, dtype),
    ]
    with torch.inference_mode():
        timings, rates = floors.measure(operations, Machine(getattr(torch, dtype)), arguments.rounds)
    memory = estimate([rate.memory / 1e9 for rate in rates])
    arithmetic = estimate([rate.arithmetic / 1e9 for rate in rates])
    title = f"memory {memory} GB/s, {dtype} matrix product {arithmetic} GFLOP/s"
    columns = ("ms [95 %]", "floor ms", "times the floor [95 %]", "bound by")
    rows = table(f"{arguments.threads} thread(s): {title}", ["operation"], columns)
    for timing in timings:
        floor, times = f"{timing.floor_ms:.3g}", str(timing.times_floor)
        rows.add_row(timing.name, str(timing.ms), floor, times, timing.bound)
    results = {
        "memory_GB_per_s": asdict(memory),
        "arithmetic_GFLOP_per_s": asdict(arithmetic),
        "rates": [asdict(rate) for rate in rates],
        "operations": [asdict(timing) for timing in timings],
    }
    return Found(results, [rows])
