"""Metrics equal what was evicted."""

import pytest

from tests.engine.support.running import Ask, evicting_engine, run
from vllm_kvevict.schedules.reports import read_evictions


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
def test_the_share_kept_is_of_what_an_eviction_could_drop(models, tmp_path):
    """Neither of earlier parts of the prompt, nor, where an answer is evicted, of the prompt."""
    rules = {"decode_budget": 16, "decode_interval": 48, "decode_window": 4, "decode_policy": "ada-snapkv"}
    log = tmp_path / "evictions.jsonl"
    ask = Ask(340, "ada-snapkv", 0.25, turns=(100, 200, 320), max_tokens=16 + 2 * 48 + 1)
    with evicting_engine(models("llama"), eviction={"eviction_log": str(log), **rules}) as llm:
        run(llm, [ask])
        shares = {
            metric.labels["phase"]: (metric.sum, metric.count)
            for metric in llm.get_metrics()
            if metric.name == "vllm:kv_eviction_kept_ratio"
        }
    assert shares["prefill"] == (pytest.approx(3 * 0.25), 3)
    assert shares["decode"] == (pytest.approx(2 * 0.25), 2)
    parts = list(read_evictions(log))
    of_prompt = [8 * tokens for tokens in (25, 50, 80, 100)]  # layers x KV heads; the question is kept
    assert [eviction.pinned for eviction in parts] == [0, *of_prompt[:2], *of_prompt[3:] * 2]
    assert [eviction.kept for eviction in parts[:3]] == of_prompt[:3]
