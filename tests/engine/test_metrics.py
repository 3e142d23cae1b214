"""Metrics equal what was evicted."""

import logging

import pytest

from tests.engine.running import Ask, evicting_engine, run
from vllm_kvevict.engine.metrics import EvictionStats
from vllm_kvevict.schedules.reports import Report


def report(first_layer: int, first_head: int, kept: list[list[int]]) -> Report:
    """What one rank says of a prompt of 500 tokens."""
    return Report(
        policy="ada-snapkv",
        epoch=1,
        tokens=500,
        last=True,
        pages=8,
        freed_pages=24,
        peak_pages=32,
        residues=[0] * 32,
        first_layer=first_layer,
        first_head=first_head,
        kept=kept,
        decision_seconds=0.0,
        compaction_seconds=0.0,
    )


def test_a_kv_head_counts_once_however_many_ranks_hold_it(caplog):
    """Four tensor-parallel ranks in each of two stages, two KV heads: two ranks of a stage hold the same head."""
    kept = {(0, 0): [[90]], (0, 1): [[110]], (1, 0): [[120]], (1, 1): [[80]]}
    reports = [report(layer, head, kept[layer, head]) for layer in (0, 1) for head in (0, 0, 1, 1)]
    statistics, logger = EvictionStats(), logging.getLogger("vllm.kv_eviction")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.DEBUG, logger.name):
        statistics.on_eviction("r", reports)
    logger.removeHandler(caplog.handler)
    assert statistics.data["evicted_tokens"] == 4 * 500 - 400
    assert statistics.data["kept_ratio"] == [0.2]
    line = caplog.messages[-1]
    assert "kept 400/2000 entries" in line
    assert line.endswith("layer 0: 200/1000 (90 110); layer 1: 200/1000 (120 80)")
    # Each of the eight ranks has pages of its own.
    assert statistics.data["freed_pages"] == 8 * 24
    assert "freed 192 pages, held at most 256" in line


@pytest.mark.engine
def test_a_request_that_ends_with_the_step_that_evicts_it_counts(models):
    layers, heads, page = 4, 2, 32
    asks = [Ask(300, "ada-snapkv", 0.2, max_tokens=1), Ask(200, "snapkv", 64.0, max_tokens=3)]
    with evicting_engine(models("llama")) as llm:
        answers = run(llm, asks)
        metrics = {(metric.name, metric.labels.get("policy")): metric for metric in llm.get_metrics()}
    for policy in ("ada-snapkv", "snapkv"):
        assert metrics["vllm:kv_eviction_evictions", policy].value == 1
    assert metrics["vllm:kv_eviction_evicted_tokens", None].value == layers * heads * (300 - 60 + 200 - 64)
    freed = sum(
        -(-ask.length // page) - -(-len(positions) // page)
        for ask, answer in zip(asks, answers, strict=True)
        for layer in answer.kept[0].values()
        for positions in layer
    )
    assert metrics["vllm:kv_eviction_freed_pages", None].value == freed
    assert metrics["vllm:kv_eviction_kept_ratio", None].count == 2
