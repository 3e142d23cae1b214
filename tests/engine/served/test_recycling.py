"""Prompts that are read in one step: each layer takes its pages when it runs and gives most of them back."""

import pytest
from vllm.exceptions import VLLMValidationError

from tests.engine.support.running import Ask, assert_same, evicting_engine, run
from vllm_kvevict.policies import EvictionConfig, available
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.bounds import MemoryBounds
from vllm_kvevict.schedules.eviction import Eviction
from vllm_kvevict.schedules.registry import plan_of

LAYERS, LENGTH, BUDGET = 16, 1024, 0.1
BOUNDS = MemoryBounds([RankCapacity(10**6, 0, LAYERS, 2, LAYERS, 2)], 32, 4096, 1, is_asynchronous=False)
RECYCLED = [
    policy
    for policy in available()
    if policy != "full"
    and BOUNDS.gains_from_one_step(plan_of(EvictionConfig(policy, keep_ratio=BUDGET), LENGTH))
]


@pytest.fixture(scope="module")
def model(models):
    return models("llama", layers=LAYERS, hidden=64, heads=4, kv_heads=2, head_dim=32)


@pytest.mark.engine
def test_the_same_choice_with_a_fraction_of_the_pages(model, monkeypatch) -> None:
    assert {"ada-snapkv", "pyramidkv", "h2o", "criticalkv", "lava", "lava-uniform-head", "cake"} <= set(
        RECYCLED
    )
    asks = [Ask(LENGTH, policy, BUDGET, seed=i, max_tokens=6) for i, policy in enumerate(RECYCLED)]
    asks += [
        Ask(LENGTH, policy, BUDGET, prefix_len=700, seed=i) for i, policy in enumerate(("snapkv", "lava"))
    ]
    seen: dict[str, int] = {}
    part_of = Eviction._part

    def watched(eviction, kept):
        part = part_of(eviction, kept)
        seen[eviction.resident.admission.request_id] = part.peak_pages
        return part

    monkeypatch.setattr(Eviction, "_part", watched)
    peaks, answers = {}, {}
    for step in (300, 4096):
        with evicting_engine(model, max_num_batched_tokens=step, max_model_len=1200) as llm:
            seen.clear()
            answers[step] = run(llm, asks)
            peaks[step] = [
                next(v for k, v in seen.items() if k.startswith(f"{i}-")) for i in range(len(asks))
            ]
    assert_same(answers[300], answers[4096])
    for ask, in_steps, at_once in zip(asks, peaks[300], peaks[4096], strict=True):
        assert in_steps == LAYERS * 2 * -(-(ask.prefix_len or LENGTH) // 32), ask
        assert at_once <= 0.25 * in_steps, ask


@pytest.mark.engine
def test_a_prompt_fits_a_pool_that_could_not_hold_it_whole(model) -> None:
    """1024 tokens in the memory of 512, since they are read in one step."""
    options = {"policy": "ada-snapkv", "budget": BUDGET}
    settings = {"max_model_len": 1024 + 32, "max_num_batched_tokens": 2048, "eviction": options}
    with evicting_engine(model, **settings, num_gpu_blocks_override=4) as llm:
        asks = [Ask(LENGTH, "ada-snapkv", BUDGET, seed=i, max_tokens=30) for i in range(4)]
        answers = run(llm, asks)
        assert all(len(answer.tokens) == 30 for answer in answers)
        with pytest.raises(
            VLLMValidationError,
            match="1024 tokens do not fit the KV cache: the longest prompt that fits with kv_evict",
        ):
            run(llm, [Ask(LENGTH, "full")])
