"""Metrics equal what was evicted."""

import pytest

from tests.engine.support.running import Ask, evicting_engine, run


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
