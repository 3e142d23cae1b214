"""The page ledger and vLLM's own block manager with the same requests, and a round of their decode steps."""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.scheduler.admission import AdmissionControl
from vllm_kvevict.engine.scheduler.ledger import PageLedger
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.bounds import MemoryBounds
from vllm_kvevict.schedules.reports import Report

LAYERS, KV_HEADS, PAGE = 32, 8, 32
PROMPT, OUTPUT = 2048, 4096
STEPS = 32
"""Steps in a round: every row takes one page."""


def make_requests(count: int, last: int) -> list[Request]:
    """Requests of ``PROMPT`` tokens that decode, and behind them one of ``last`` tokens that has to wait."""
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    lengths = [PROMPT] * count + [last]
    return [Request(f"r{index}", [7] * length, params, None) for index, length in enumerate(lengths)]


def make_stock(requests: Sequence[Request]) -> KVCacheManager:
    """vLLM's manager after these requests' prefills, with room for their outputs."""
    tokens = len(requests) * (PROMPT + OUTPUT)
    manager = KVCacheManager(_cache_config(tokens // PAGE + 1), tokens, PAGE, PAGE, enable_caching=False)
    for request in requests:
        manager.allocate_slots(request, PROMPT)
    return manager


def make_ledger(requests: Sequence[Request], ranks: int, seed: int) -> tuple[PageLedger, float]:
    """A ledger with these requests evicted to a fifth, every row to another length, and room for no further one.

    Returns:
        The ledger, and the seconds of one rank's report.
    """
    options = Options.parse({"policy": "ada-snapkv", "budget": 0.2, "decode_reserve": OUTPUT})
    ledger = PageLedger(
        _cache_config(2),
        PROMPT + OUTPUT,
        PAGE,
        PAGE,
        enable_caching=False,
        options=options,
        control=AdmissionControl(MemoryBounds([], PAGE, 8192, 1, False), 8192, OUTPUT, PROMPT + OUTPUT),
    )
    heads = KV_HEADS // ranks
    rows = LAYERS * heads
    plenty = RankCapacity(rows * len(requests) * (PROMPT + OUTPUT), 0, LAYERS, heads, LAYERS, KV_HEADS)
    ledger.set_capacity(dict.fromkeys(range(ranks), plenty))
    choose = random.Random(seed)
    seconds = []
    for request in requests:
        ledger.allocate_slots(request, PROMPT)
        for rank in range(ranks):
            residues = [0] * PAGE
            pages = 0
            for _ in range(rows):
                length = choose.randrange(1, 2 * PROMPT // 5)
                residues[length % PAGE] += 1
                pages += -(-length // PAGE)
            report = Report("snapkv", 1, PROMPT, True, pages, 0, 0, residues, 0, 0, [], 0.0, 0.0)
            started = time.perf_counter()
            ledger.on_report(rank, request.request_id, report)
            seconds.append(time.perf_counter() - started)
    # Only the last rank has no room, so admission looks at every rank before it says no.
    accounts = ledger.accounts.values()
    full = sum(ledger.control.expected_pages(account, ranks - 1, PROMPT + OUTPUT) for account in accounts)
    capacities = [*[plenty] * (ranks - 1), dataclasses.replace(plenty, pages=full)]
    bounds = dataclasses.replace(ledger.bounds, ranks=capacities)
    ledger.control = dataclasses.replace(ledger.control, bounds=bounds)
    return ledger, statistics.median(seconds)


def _cache_config(blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=128, dtype=torch.bfloat16)
    group = KVCacheGroupSpec([f"layers.{index}" for index in range(LAYERS)], spec)
    return KVCacheConfig(blocks, [], [group])


def decode_round(manager: KVCacheManager, running: Sequence[Request], waiting: Request) -> float:
    """Schedule ``STEPS`` decode steps.

    Returns:
        Seconds per running request and step.
    """
    plan: Callable[[Request], Any] | None = getattr(manager, "plan", None)
    started = time.perf_counter()
    for _ in range(STEPS):
        for request in running:
            if plan is not None:
                plan(request)  # our scheduler asks for the eviction position as well
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        assert manager.allocate_slots(waiting, PROMPT, full_sequence_must_fit=True) is None
    return (time.perf_counter() - started) / (STEPS * len(running))
