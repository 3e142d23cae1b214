"""The model in the box: it answers with the full cache, and eviction that looks for what matters keeps the answers."""

import random

import pytest
from vllm import SamplingParams

from benchmarks.quality import NEEDLE
from tests.engine.support.running import engine, evicting_engine
from vllm_kvevict.quality.tasks import TASKS, Sample, make, score

LENGTH = 1500
POLICIES = ("full", "ada-snapkv", "streaming-llm")
TOGETHER = 10
"""As many texts stay in the prefix cache while all policies are asked about them."""
SETTINGS = {"max_model_len": 4096, "max_num_batched_tokens": 4096}


def samples(tasks: list[str], count: int, length: int = LENGTH) -> list[Sample]:
    return [make(task, length, random.Random(f"{task}{i}")) for task in tasks for i in range(count)]


def every_task() -> list[Sample]:
    return samples(list(TASKS), 3)


def replies(llm, asked: list[Sample], **fields) -> list[str]:
    """What the model says; greedy."""
    chats = [
        [{"role": "system", "content": sample.context}, {"role": "user", "content": sample.question}]
        for sample in asked
    ]
    params = SamplingParams(temperature=0, max_tokens=24, extra_args=fields or None)
    return [output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def stock() -> list[str]:
    """What vLLM itself makes of all tasks, before ``ours`` is in the process."""
    with engine(NEEDLE, **SETTINGS) as llm:
        return replies(llm, every_task())


@pytest.fixture(scope="module")
def ours():
    """An engine for the whole module; what is asked three times is read once."""
    cache = {"enable_prefix_caching": True, "kv_cache_memory_bytes": 1 << 28}
    with evicting_engine(NEEDLE, **SETTINGS, **cache) as llm:
        yield llm


@pytest.mark.engine
def test_full_cache_scores_like_stock_vllm(stock, ours):
    assert replies(ours, every_task(), kv_eviction="full") == stock


@pytest.mark.engine
def test_a_fifth_of_the_cache_keeps_the_answers(ours):
    """ada-snapkv finds what the question is about, streaming-llm cannot."""
    asked, scores = samples(["single", "multikey"], 25), dict.fromkeys(POLICIES, 0.0)
    for first in range(0, len(asked), TOGETHER):
        part = asked[first : first + TOGETHER]
        for policy in POLICIES:
            said = replies(ours, part, kv_eviction=policy, kv_budget=0.2)
            scores[policy] += sum(map(score, part, said)) / len(asked)
    full, adaptive, streaming = scores.values()
    assert full >= 0.95
    assert adaptive >= 0.95 * full
    assert streaming < 0.95 * full
