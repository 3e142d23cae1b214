"""Models of which only some layers are evicted; those with a window, or a state, stay with vLLM."""

import dataclasses

import pytest

from tests.engine.support.running import (
    Ask,
    assert_same,
    engine,
    evicting_engine,
    num_preemptions,
    run,
    tokens_of,
)
from vllm_kvevict.engine.layers import LayerMap
from vllm_kvevict.engine.memory import bounds_of

LONG_ANSWERS = [Ask(40 + 20 * i, "full", max_tokens=350, seed=i) for i in range(5)]
"""They outgrow the pages."""
MANY = [Ask(20, "full", max_tokens=120 + i, seed=i) for i in range(16)]
"""They outgrow the windows: each of them has as many blocks there as pages."""
EVICTED = [Ask(400 - 30 * i, "ada-snapkv", 0.3, max_tokens=64, seed=i) for i in range(8)]


@pytest.mark.engine
def test_memory_that_both_kinds_of_layers_are_short_of(models):
    """Blocks become pages and windows again many times over, and whoever lacks some starts anew."""
    model, loads = models("gemma3_text"), (LONG_ANSWERS, MANY, EVICTED)
    settings = {"max_model_len": 512, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 18}
    with engine(model, enable_prefix_caching=False) as llm:
        expected = [tokens_of(run(llm, load, recorded=False)) for load in loads[:2]]
    with evicting_engine(model) as llm:
        expected.append(tokens_of(run(llm, EVICTED)))
        assert num_preemptions(llm) == 0
    with evicting_engine(model, eviction={"decode_reserve": 16}, **settings) as llm:
        ledger = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        preempted, as_pages = [0], []
        for load, tokens in zip(loads, expected, strict=True):
            assert tokens_of(run(llm, load)) == tokens
            preempted.append(num_preemptions(llm))
            as_pages.append(len(ledger.blocks.as_pages))
        run(llm, [Ask(20, max_tokens=1)])  # the workers hear of the last that finished
        assert ledger.books.used == [0] and ledger.blocks.beyond_withheld(ledger.blocks.of_others) == 0
        assert ledger.block_pool.get_num_free_blocks() + len(ledger.blocks.as_pages) == 17
    assert 0 < preempted[1] < preempted[2], preempted
    assert len(set(as_pages)) > 1, as_pages


@pytest.mark.engine
@pytest.mark.parametrize("architecture, blocks", [("gpt_oss", 26), ("gemma3_text", 31), ("falcon_h1", 20)])
def test_front_end_and_scheduler_know_of_the_same_memory(models, architecture, blocks):
    """The front-end foresees how vLLM groups the layers; it may think of a block less in each group."""
    settings = {"max_model_len": 512, "max_num_batched_tokens": 128, "num_gpu_blocks_override": blocks}
    with evicting_engine(models(architecture), **settings) as llm:
        (foreseen,) = bounds_of(llm.llm_engine.vllm_config).ranks
        ledger = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        (known,) = ledger.books.ranks
        groups = LayerMap.predicted(llm.llm_engine.vllm_config)
        pages_per_block = known.pages // ledger.blocks.most
    assert dataclasses.replace(foreseen, pages=known.pages) == known
    assert known.pages - len(groups.others) * pages_per_block <= foreseen.pages <= known.pages


@pytest.mark.engine
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("architecture", ["gpt_oss", "falcon_h1"])
def test_workers(models, architecture, size):
    model = models(architecture)
    evicted = [
        Ask(length, policy, 0.3, seed=i)
        for i, (length, policy) in enumerate([(300, "ada-snapkv"), (200, "lava"), (410, "pyramidkv")])
    ]
    settings = {"max_num_batched_tokens": 256, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 24}
    with evicting_engine(model, **settings) as llm:
        expected = run(llm, evicted)
    with evicting_engine(model, **settings, **{size: 2}) as llm:
        answers = run(llm, evicted)
    assert_same(expected, answers)
