"""The page ledger's time in the scheduler, compared with vLLM's block manager.

Both managers let the same requests decode, in turn and in the same process. In every step both refuse one waiting
request, which is when admission takes longest. Times are per running request and step. Then the ledger of a model with
other layers beside the evicted ones, with prefix caching and without.
"""

import argparse
import dataclasses
import itertools
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from benchmarks.harness.measure import Estimate, estimate, paired_ratio
from benchmarks.harness.options import whole
from benchmarks.harness.scenarios import Target
from benchmarks.harness.tables import table
from benchmarks.micro.loop import Found, in_turns
from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.request_options import RequestOptions
from vllm_kvevict.engine.scheduler.admission import AdmissionControl
from vllm_kvevict.engine.scheduler.ledger import PageLedger
from vllm_kvevict.engine.spec import BoundedAttentionSpec
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.bounds import MemoryBounds
from vllm_kvevict.schedules.inputs import HeadDims
from vllm_kvevict.schedules.reports import Report

LAYERS, KV_HEADS, PAGE = 32, 8, 32
PROMPT, OUTPUT = 2048, 4096
LONGEST, BESIDE = PROMPT + PAGE + OUTPUT, 32
STEPS = 32
"""Steps in a round: every row takes one page."""
EVICTION = Options.parse({"policy": "ada-snapkv", "budget": 0.2, "decode_reserve": OUTPUT})
HAS_DTYPE = False
OPTIONS = (("rounds", whole, 40, "rounds of each manager"),)


def refuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    most = OUTPUT // STEPS - 1
    return f"--rounds must be at most {most}" if arguments.rounds > most else None


def make_requests(count: int, last: int) -> list[Request]:
    """Requests that are evicted after ``PROMPT`` tokens, one before their prompt's end, and behind them one of
    ``last`` tokens that has to wait."""
    read = RequestOptions.read(EVICTION, {"kv_prefix_len": PROMPT}, PROMPT + 1)
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, extra_args=read.to_extra_args(None))
    lengths = [PROMPT + 1] * count + [last]
    return [Request(f"{index}", [7] * length, params, None) for index, length in enumerate(lengths)]


def make_stock(requests: Sequence[Request]) -> KVCacheManager:
    """vLLM's manager after these requests' prefills, with room for their outputs."""
    tokens = len(requests) * (PROMPT + 1 + OUTPUT)
    manager = KVCacheManager(_cache_config(tokens // PAGE + 1), tokens, PAGE, PAGE, enable_caching=False)
    for request in requests:
        manager.allocate_slots(request, PROMPT)
        request.num_computed_tokens = PROMPT
    return manager


def make_ledger(requests: Sequence[Request], ranks: int) -> PageLedger:
    """A ledger with these requests evicted to a fifth, every row to another length, and room for no further one."""
    longest = PROMPT + 1 + OUTPUT
    ledger = PageLedger(
        _cache_config(2),
        longest,
        scheduler_block_size=PAGE,
        hash_block_size=PAGE,
        enable_caching=False,
        options=EVICTION,
        control=AdmissionControl(MemoryBounds([], PAGE, 8192, 1, False), 8192, OUTPUT, longest),
        head_dims=HeadDims(128, 4),
    )
    heads = KV_HEADS // ranks
    rows = LAYERS * heads
    plenty = RankCapacity(rows * len(requests) * longest, 0, LAYERS, heads, LAYERS, KV_HEADS)
    ledger.set_capacity(dict.fromkeys(range(ranks), plenty))
    choose = random.Random(0)
    for request in requests:
        _read(ledger, request, choose)
        request.num_computed_tokens = PROMPT
    ledger.next_message({})
    _leave_no_room(ledger, plenty, longest)
    return ledger


def _read(ledger: PageLedger, request: Request, choose: random.Random) -> None:
    """Let a request read its prefix and every rank report what it keeps."""
    assert ledger.allocate_slots(request, PROMPT) is not None
    ledger.next_message({})
    for rank, capacity in enumerate(ledger.books.ranks):
        residues, pages = [0] * PAGE, 0
        for _ in range(capacity.rows):
            length = choose.randrange(1, 2 * PROMPT // 5)
            residues[length % PAGE] += 1
            pages += -(-length // PAGE)
        ledger.on_report(rank, request.request_id, Report(1, PROMPT, pages, residues, None))


def _leave_no_room(ledger: PageLedger, plenty: RankCapacity, longest: int) -> None:
    """Shrink the last rank, so that admission looks at every rank before it says no."""
    last = len(ledger.ranks) - 1
    accounts = ledger.accounts.values()
    full = sum(ledger.requests.control.expected_pages(account, last, longest) for account in accounts)
    capacities = [*[plenty] * last, dataclasses.replace(plenty, pages=full)]
    bounds = dataclasses.replace(ledger.bounds, ranks=capacities)
    ledger.requests.control = dataclasses.replace(ledger.requests.control, bounds=bounds)
    ledger.books.ranks = capacities


def _cache_config(blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=128, dtype=torch.bfloat16)
    group = KVCacheGroupSpec([f"layers.{index}" for index in range(LAYERS)], spec)
    return KVCacheConfig(blocks, [], [group])


def decode_round(manager: KVCacheManager, running: Sequence[Request], waiting: Request) -> float:
    """Schedule ``STEPS`` decode steps as vLLM's scheduler does, and turn a request away in each.

    Returns:
        Seconds per running request and step.
    """
    ledger = manager if isinstance(manager, PageLedger) else None
    started = time.perf_counter()
    for _ in range(STEPS):
        for request in running:
            if ledger is not None:
                ledger.plan(request)  # our scheduler asks for the eviction position as well
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        if ledger is not None:
            assert not ledger.shared.is_awaited(waiting)
        _, computed, _ = manager.get_computed_blocks(waiting)
        assert computed == 0
        assert manager.allocate_slots(waiting, PROMPT, full_sequence_must_fit=True) is None
    return (time.perf_counter() - started) / (STEPS * len(running))


def compare(ranks: int, requests: int, rounds: int) -> dict[str, Estimate]:
    """Microseconds per running request and step by each manager, which take turns."""
    # vLLM turns away what does not fit now, the ledger also what would not fit in the end.
    theirs = make_requests(requests, last=requests * (PROMPT + 1 + OUTPUT))
    ours = make_requests(requests, last=PROMPT)
    sides = {
        "stock": (make_stock(theirs[:-1]), theirs),
        "ledger": (make_ledger(ours[:-1], ranks), ours),
    }
    calls = {
        name: lambda manager=manager, every=every: 1e6 * decode_round(manager, every[:-1], every[-1])
        for name, (manager, every) in sides.items()
    }
    times = in_turns(calls, rounds)
    return {name: estimate(series) for name, series in times.items()}


def _beside(kind: str, is_cached: bool) -> KVCacheConfig:
    """As many layers of another kind beside the evicted ones, and blocks for twice what ``BESIDE`` requests take.

    States are as large as the KV of many tokens, so that few of them are kept.
    """
    shape: dict[str, Any] = {"block_size": PAGE, "num_kv_heads": KV_HEADS, "head_size": 128}
    shape["dtype"] = torch.bfloat16
    full = FullAttentionSpec(**shape)
    size, mode = (16 * PAGE, "align") if is_cached else (LONGEST, "none")
    others: dict[str, KVCacheSpec] = {
        "windows": SlidingWindowSpec(sliding_window=1024, **shape),
        "states": MambaSpec(
            block_size=size, shapes=((full.page_size_bytes,),), dtypes=(torch.int8,), mamba_cache_mode=mode
        ),
        "a draft model": full,
    }
    specs = BoundedAttentionSpec.of(full, is_cached), others[kind]
    groups = [
        KVCacheGroupSpec([f"layers.{LAYERS * group + layer}" for layer in range(LAYERS)], spec)
        for group, spec in enumerate(specs)
    ]
    return KVCacheConfig(2 * BESIDE * LONGEST // PAGE, [], groups)


def make_mixed(kind: str, is_cached: bool) -> tuple[PageLedger, list[Request]]:
    """A ledger of such a model, and its requests, which have read their prompts."""
    hasher = get_request_block_hasher(PAGE, sha256)
    read = RequestOptions.read(EVICTION, {"kv_prefix_len": PROMPT}, PROMPT + 1)
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, extra_args=read.to_extra_args(None))
    requests = [
        Request(f"{index}", [8 + index] * (PROMPT + 1), params, None, block_hasher=hasher)
        for index in range(BESIDE)
    ]
    config = _beside(kind, is_cached)
    ledger = PageLedger(
        config,
        LONGEST,
        scheduler_block_size=max(group.kv_cache_spec.block_size for group in config.kv_cache_groups),
        hash_block_size=PAGE,
        enable_caching=is_cached,
        options=EVICTION,
        control=AdmissionControl(MemoryBounds([], PAGE, 8192, 1, False), 8192, OUTPUT, LONGEST),
        head_dims=HeadDims(128, 4),
        blocks_kept=BESIDE,
    )
    pages = LAYERS * KV_HEADS * (config.num_blocks - BESIDE)
    ledger.set_capacity({0: RankCapacity(pages, 0, LAYERS, KV_HEADS, LAYERS, KV_HEADS)})
    choose = random.Random(0)
    for request in requests:
        _read(ledger, request, choose)
        request.num_computed_tokens = PROMPT
    ledger.next_message({})
    return ledger, requests


def decode_mixed(ledger: PageLedger, requests: Sequence[Request]) -> float:
    """Microseconds per request and step of ``STEPS`` decode steps."""
    started = time.perf_counter()
    for _ in range(STEPS):
        ledger.new_step_starts()
        for request in requests:
            ledger.plan(request)
            assert ledger.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
            request.append_output_token_ids(7)
    return 1e6 * (time.perf_counter() - started) / (STEPS * len(requests))


def measure_beside(rounds: int) -> tuple[Table, list[dict[str, Any]], list[Target]]:
    """The ledger beside each kind of other layers, with prefix caching over without."""
    title = f"{BESIDE} requests beside other layers; us per running request and step [95 %]"
    shown, cells, targets = table(title, ["beside"], ("cached", "not cached", "ratio")), [], []
    init_none_hash(sha256)
    for kind in ("windows", "states", "a draft model"):
        sides = {str(is_cached): make_mixed(kind, is_cached) for is_cached in (True, False)}
        times = in_turns({name: partial(decode_mixed, *side) for name, side in sides.items()}, rounds)
        ratio = paired_ratio(times["True"], times["False"])
        cached, plain = (estimate(times[name]) for name in sides)
        shown.add_row(kind, str(cached), str(plain), str(ratio))
        cells.append({"beside": kind, "cached": cached, "not cached": plain, "ratio": ratio})
        targets.append(Target(f"ledger step beside {kind}, cached over not", ratio, 1.1, at_most=True))
    return shown, cells, targets


def measure(arguments: argparse.Namespace) -> Found:
    """One rank and four, 64 requests and 256; then beside other layers."""
    title = f"{LAYERS} layers x {KV_HEADS} KV heads; us per running request and step [95 %]"
    columns = ("ledger", "vLLM blocks")
    shown, cells = table(title, ["ranks", "requests"], columns), []
    for ranks, requests in itertools.product((1, 4), (64, 256)):
        one = compare(ranks, requests, arguments.rounds)
        shown.add_row(str(ranks), str(requests), str(one["ledger"]), str(one["stock"]))
        cells.append({"ranks": ranks, "requests": requests, **one})
    beside, of_kinds, targets = measure_beside(arguments.rounds)
    return Found({"cells": cells, "beside": of_kinds}, [shown, beside], targets=targets)
