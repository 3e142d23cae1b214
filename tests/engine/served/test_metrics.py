"""Metrics equal what was evicted."""

import json
import time

import pytest

from tests.engine.support.running import Ask, evicting_engine, run, run_aborted


@pytest.mark.engine
def test_a_request_that_ends_with_the_step_that_evicts_it_counts(models):
    layers, heads, page = 4, 2, 32
    asks = [Ask(300, "ada-snapkv", 0.2, max_tokens=1), Ask(200, "snapkv", 64.0, max_tokens=3)]
    with evicting_engine(models("llama")) as llm:
        answers = run(llm, asks)
        metrics = {
            (metric.name, metric.labels.get("policy")): metric
            for metric in llm.get_metrics()
            if metric.labels.get("phase") == "prefill"
        }
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


@pytest.mark.engine
def test_prompts_that_are_evicted_once_their_answer_has_begun(models, tmp_path):
    """The answer's tokens that stay are neither evicted nor kept. One ends before; one is never to be evicted."""
    heads, ahead, log = 8, 8, tmp_path / "log"
    asks = [Ask(300, "ada-snapkv", 0.2, max_tokens=20), Ask(200, "snapkv", 64.0, max_tokens=20)]
    options = {"policy": "snapkv", "lookahead": ahead, "eviction_log": str(log)}
    with evicting_engine(models("llama"), eviction=options) as llm:
        before = time.perf_counter()
        run(llm, [*asks, Ask(200, "snapkv", 0.2, max_tokens=ahead + 1)])
        seconds = time.perf_counter() - before
        assert run_aborted(llm, [Ask(200, "snapkv", 0.2), Ask(200, "full")], [4, 4]) == [None, None]
        run(llm, [Ask(50, "full", max_tokens=1)])
        metrics = {
            metric.name.removeprefix("vllm:kv_eviction_"): metric
            for metric in llm.get_metrics()
            if metric.labels.get("phase", "lookahead") == "lookahead"
        }
    assert metrics["evicted_tokens"].value == heads * (300 - 60 + 200 - 64)
    assert (metrics["kept_ratio"].count, metrics["kept_ratio"].sum) == (2, pytest.approx(0.2 + 64 / 200))
    assert metrics["ended_in_lookahead"].value == 1
    steps = metrics["lookahead_step_seconds"]
    assert steps.count == 1 and metrics["decision_seconds"].sum < steps.sum < seconds
    lines = sorted(map(json.loads, log.read_text().splitlines()), key=lambda line: -line["tokens"])
    for line, ask, kept in zip(lines, asks, (60, 64), strict=True):
        assert (line["policy"], line["phase"], line["tokens"]) == (
            ask.policy,
            "lookahead",
            ask.length + ahead,
        )
        assert (line["stored"], line["pinned"]) == (heads * (ask.length + ahead), heads * ahead)
        assert line["kept"] == sum(map(sum, line["heads"])) == heads * (kept + ahead)
