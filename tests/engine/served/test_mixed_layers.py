"""Models of which only some layers are evicted; those with a window, or a state, stay with vLLM."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import pytest
from vllm import LLM
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from tests.engine.support.conversations import conversation, found_by, questions
from tests.engine.support.masked import check_logits
from tests.engine.support.running import (
    Answer,
    Ask,
    assert_same,
    engine,
    evicting_engine,
    metric,
    num_preemptions,
    run,
    tokens_of,
)
from vllm_kvevict.engine.layers import LayerMap
from vllm_kvevict.engine.memory import bounds_of

UNREPEATED = {"policies": "unreserved"}
"""Without policies that repeat prompts, for which other layers have blocks of their own."""
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
    with evicting_engine(model, eviction={**UNREPEATED, "decode_reserve": 16}, **settings) as llm:
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


WITH_STATES = ("granitemoehybrid", "falcon_h1")
CACHING: dict[str, Any] = {
    "enable_prefix_caching": True,
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
}
DOCUMENT, LAST = Ask(520).prompt, Ask(60, seed=9).prompt
SHARED = {
    "again": [Ask(700), Ask(700)],
    "questions": [Ask(0, tokens=(*DOCUMENT, *LAST[seed : seed + 40])) for seed in range(4)],
    "longer": [Ask(0, tokens=tuple(Ask(900, seed=5).prompt[:end])) for end in (256, 480, 481, 900)],
    "block": [Ask(640, seed=2), Ask(640, seed=2), Ask(0, tokens=(*Ask(640, seed=2).prompt, *LAST))],
}
"""Prompts that begin like those before them."""


def asked_in_turns(llm: LLM, asks: Sequence[Ask], **options: Any) -> tuple[list[Answer], list[int]]:
    """Answers to requests one after the other, and how many tokens each finds."""
    answers, found = [], []
    for ask in asks:
        before = metric(llm, "prefix_cache_hits")
        answers += run(llm, [ask], **options)
        found.append(metric(llm, "prefix_cache_hits") - before)
    return answers, found


@pytest.mark.engine
@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma3_text", "granitemoehybrid", "falcon_h1"])
def test_cached_prefixes_beside_other_layers(models, architecture, monkeypatch):
    """Requests that are not evicted find no fewer tokens than with stock; what any request finds changes no answer."""
    model, caching = models(architecture), dict(CACHING)
    if architecture in WITH_STATES:
        del caching["block_size"]  # vLLM makes blocks as large as states
    evicted = [
        dataclasses.replace(ask, policy=policy, budget=budget)
        for policy, budget in (("ada-snapkv", 0.3), ("lava", 0.2), ("ada-snapkv", 1.0))
        for ask in SHARED["questions"]
    ]
    prefix = dataclasses.replace(SHARED["again"][0], policy="ada-snapkv", budget=0.3, prefix_len=300)
    asks = [ask for load in SHARED.values() for ask in load]
    # What windows remember behind an evicted prefix depends on what is left of it.
    asks = [*asks, *evicted, prefix, *SHARED["again"]]
    with monkeypatch.context() as patch:
        # Stock cannot save states within a step on a CPU.
        patch.setattr(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec)
        with engine(model, **caching) as llm:
            stocks = [asked_in_turns(llm, load, recorded=False)[1] for load in SHARED.values()]
            assert all(map(sum, stocks)), stocks
    with evicting_engine(model, **caching | {"enable_prefix_caching": False}) as llm:
        expected, none = asked_in_turns(llm, asks, logits=True)
    with evicting_engine(model, **caching) as llm:
        for load, by_stock in zip(SHARED.values(), stocks, strict=True):
            found = asked_in_turns(llm, load)[1]
            assert all(map(operator.ge, found, by_stock)), (found, by_stock)
        llm.reset_prefix_cache()
        answers, found = asked_in_turns(llm, asks, logits=True)
        ledger = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        llm.reset_prefix_cache()
        run(llm, [Ask(20, max_tokens=1)])
        assert ledger.blocks.beyond_withheld(ledger.blocks.of_others) == 0
    assert_same(expected, answers, kept=False)
    assert not any(none) and sum(map(bool, found)) > len(asks) // 2, found


@pytest.mark.engine
@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma3_text", "granitemoehybrid", "falcon_h1"])
@pytest.mark.parametrize("chunk", [1024, 96])
def test_compressed_prefixes_beside_other_layers(models, architecture, chunk):
    """What is found of a document, or of the turns before, ends anywhere in a block, and changes no answer."""
    documents = {"ada-snapkv": (199, 20), "lava": (256, 256), "streaming-llm": (193, 64), "kvzip": (230, 30)}
    asks, expected_found = [], []
    for seed, (policy, (document, rest)) in enumerate(documents.items()):
        lengths = [document + rest + more for more in (0, 36, 1)]
        asks += questions(policy, seed, lengths, document, prefix_len=document, max_tokens=5)
        expected_found += [0, document, document]
    for chat in (conversation("ada-snapkv", 3), conversation("keydiff", 4)):
        asks += chat
        expected_found += [found_by(chat[: count + 1]) - found_by(chat[:count]) for count in range(len(chat))]
    settings = CACHING | {"max_num_batched_tokens": chunk, "eviction": {"min_turn": 16}}
    if architecture in WITH_STATES:
        del settings["block_size"]
    with evicting_engine(models(architecture), **settings | {"enable_prefix_caching": False}) as llm:
        expected = run(llm, asks, logits=True)
    for ask, answer in zip(asks, expected, strict=True):
        check_logits(models(architecture), ask, answer, ask.turns, atol=1e-4, rtol=1e-4)
    with evicting_engine(models(architecture), **settings) as llm:
        answers, found = asked_in_turns(llm, asks, logits=True)
        assert found == expected_found
        assert_same(expected, answers, kept=False)
        llm.reset_prefix_cache()
        assert_same(expected, run(llm, asks, logits=True), kept=False)


@pytest.mark.engine
@pytest.mark.parametrize("blocks", [110, 130])
def test_cached_prefixes_and_windows_that_are_short_of_memory(models, blocks):
    """What is cached gives way to either side's needs."""
    asks = [
        dataclasses.replace(ask, policy=policy, budget=budget, max_tokens=150)
        for policy, budget in (("full", None), ("ada-snapkv", 0.3))
        for ask in (*SHARED["questions"], *SHARED["again"], *MANY[:4])
    ]
    model = models("gemma3_text")
    with evicting_engine(model, **CACHING | {"enable_prefix_caching": False}) as llm:
        expected = run(llm, asks, logits=True)
    short = {"num_gpu_blocks_override": blocks, "eviction": {**UNREPEATED, "decode_reserve": 1}}
    with evicting_engine(model, **CACHING, **short) as llm:
        for _ in range(2):
            assert_same(expected, run(llm, asks, logits=True), kept=False)
        assert metric(llm, "prefix_cache_hits") and num_preemptions(llm)


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
