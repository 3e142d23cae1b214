"""kvzip on real workers: scores of the model as Hugging Face defines it, whatever else the steps carry."""

import dataclasses
import itertools
from typing import Any

import pytest

from tests.engine.served.test_decisions import check_evicted
from tests.engine.support.masked import check_logits
from tests.engine.support.running import (
    Ask,
    evicting_engine,
    num_preemptions,
    plain_prompts,
    run,
    run_aborted,
)
from vllm_kvevict.engine.worker import recording
from vllm_kvevict.schedules.repeat_prompts import RepeatPrompts

CHUNK = 64
ASK = Ask(300, "kvzip", 0.2, prefix_len=280)
SERVER = {"max_model_len": 1024, "max_num_batched_tokens": 100}
MIXED = ("gpt_oss", "gemma3_text", "granitemoehybrid", "falcon_h1")
TOKENS = 1024
"""Of a tight pool."""
LAYOUTS = {
    "alone": {},
    "two tensor ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}


def options(**params):
    return {"policy": "kvzip", "kvzip_chunk": CHUNK, **params}


CASES: dict[str, dict[str, Any]] = {
    "all": {"kvzip_chunk": CHUNK},
    "chunk": {"kvzip_chunk": CHUNK, "kvzip_sees": "chunk"},
    # A chunk so long that repeating pays a token no more than the window does.
    "window": {"kvzip_chunk": 512, "window": 32},
}


def check(model, ask: Ask, answer, prompts: RepeatPrompts, case: str = "all") -> None:
    """What was kept, up to entries at the cut, and what the model says with it alone."""
    params = CASES[case]
    sees = params.get("kvzip_sees", "all")
    check_evicted(model, ask, answer, prompts, sees, params["kvzip_chunk"], **params)


@pytest.mark.engine
@pytest.mark.parametrize("layout, case", [*itertools.product(LAYOUTS, ("all", "window")), ("alone", "chunk")])
def test_keeps_what_the_model_needs_to_repeat_the_prompt(model, layout, case):
    """Five chunks, the last of them short; windows that one step reads, and two; prompts of every kind."""
    asks = [
        ASK,
        dataclasses.replace(ASK, prefix_len=None, seed=1),
        Ask(200, "kvzip", 0.3, prefix_len=64, seed=2),
        Ask(240, "kvzip", 0.3, prefix_len=205, seed=3),
    ]
    with evicting_engine(model, eviction=options(**CASES[case]), **SERVER, **LAYOUTS[layout]) as llm:
        answers, prompts = run(llm, asks, logits=True), plain_prompts(llm)
        others = run(llm, [Ask(150, "take", 64.0), ASK, Ask(150, "snapkv", 0.2)])
    for ask, answer in zip(asks, answers, strict=True):
        check(model, ask, answer, prompts, case)
    assert others[1].kept == answers[0].kept and others[1].tokens == answers[0].tokens
    with pytest.raises(AssertionError):
        check(model, dataclasses.replace(ASK, seed=3), answers[0], prompts, case)


@pytest.mark.engine
@pytest.mark.parametrize("case", ("all", "chunk"))
@pytest.mark.parametrize("architecture", MIXED)
def test_beside_other_layers(models, architecture, case):
    """What these remember of a prompt is what its repeats see, and stays as it was."""
    model = models(architecture)
    asks = [ASK, Ask(200, "kvzip", 0.3, seed=1), Ask(321, "kvzip", 0.2, seed=2), Ask(150, "ada-snapkv", 0.2)]
    with evicting_engine(model, eviction=options(**CASES[case]), **SERVER) as llm:
        answers, prompts = run(llm, asks, logits=True), plain_prompts(llm)
    for ask, answer in zip(asks[:3], answers, strict=False):
        check(model, ask, answer, prompts, case)
    check_logits(model, asks[3], answers[3])


@pytest.mark.engine
@pytest.mark.parametrize("architecture, blocks", [("gpt_oss", 16), ("gemma3_text", 24), ("falcon_h1", 16)])
def test_beside_other_layers_in_a_tight_pool(models, architecture, blocks):
    """Requests that are preempted keep the same, and in the end nobody holds a block."""
    asks = [Ask(300, "kvzip", 0.5, max_tokens=200, seed=seed) for seed in range(4)]
    common = {"eviction": options(decode_reserve=8), "max_model_len": 640, "max_num_batched_tokens": 96}
    with evicting_engine(models(architecture), **common) as llm:
        calm = run(llm, asks)
    with evicting_engine(models(architecture), **common, num_gpu_blocks_override=blocks) as llm:
        ledger = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        free = ledger.block_pool.get_num_free_blocks()
        tight = run(llm, asks)
        assert num_preemptions(llm)
        assert ledger.block_pool.get_num_free_blocks() + len(ledger.blocks.as_pages) == free
    for one, other in zip(calm, tight, strict=True):
        assert one.tokens == other.tokens and one.kept[0] == other.kept[-1]


@pytest.mark.engine
@pytest.mark.parametrize(
    "settings, window", [({}, 0), ({"pipeline_parallel_size": 2}, 32)], ids=["alone", "two stages, a window"]
)
def test_in_a_tight_pool(models, settings, window):
    """Requests that are preempted repeat from the beginning and keep the same."""
    # 8 rows, 32 values of a key and of a value each: 2 KiB a token, of which a stage has its share.
    model, stages = models("llama", heads=4, kv_heads=2, layers=4), settings.get("pipeline_parallel_size", 1)
    asks = [Ask(300, "kvzip", 0.5, max_tokens=200, seed=seed) for seed in range(4)]
    common = {"eviction": options(decode_reserve=8, window=window), "max_model_len": 640, **settings}
    with evicting_engine(model, **common) as llm:
        calm = run(llm, asks)
    with evicting_engine(model, **common, kv_cache_memory_bytes=TOKENS * 2048 // stages) as llm:
        tight = run(llm, asks)
        assert num_preemptions(llm)
    for one, other in zip(calm, tight, strict=True):
        assert one.tokens == other.tokens and one.kept[0] == other.kept[-1]


@pytest.mark.engine
@pytest.mark.parametrize("window", [0, 32])
def test_aborted_at_any_step(model, window):
    with evicting_engine(model, eviction=options(window=window), **SERVER) as llm:
        (calm,) = run(llm, [ASK])
        for steps in range(1, 12):
            assert run_aborted(llm, [ASK], [steps]) == [None]
        llm.collective_rpc(recording.take_decisions)
        (again,) = run(llm, [ASK])
        assert again.kept == calm.kept and again.tokens == calm.tokens
