"""vLLM's V2 model runner, the default on GPUs, makes the same of every request as the V1 runner, which CPUs have.

Dummy runs, warm-up requests and the preparation of graph captures come between the batches.
"""

from typing import Any

import pytest
import torch

from tests.engine.served import test_answers_anywhere as anywhere
from tests.engine.served import test_hits as hits
from tests.engine.served import test_lookahead as lookahead
from tests.engine.support.conversations import conversation
from tests.engine.support.running import CLOSE, Ask, evicting_engine, num_preemptions, run
from tests.engine.support.v2_runner import NewProcess
from vllm_kvevict.kernels.layout import INT8

BASE: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_model_len": 1024,
    "eviction": {**anywhere.TAKE, "decode_reserve": 1},
}
ASKS = [
    Ask(300, "full", max_tokens=8),
    Ask(60, "full", max_tokens=12),
    Ask(200, "ada-snapkv", 0.3, max_tokens=9, seed=1),
    Ask(333, "take", max_tokens=8),
    Ask(150, "lava", 0.3, max_tokens=9, seed=2),
    Ask(250, "lava", 0.2, prefix_len=200, max_tokens=9, seed=3),
    Ask(129, "take", max_tokens=9, seed=4),
    Ask(180, "streaming-llm", 0.5, max_tokens=1),
    Ask(140, "h2o", 0.4, max_tokens=9, seed=5),
]
TIGHT = [
    Ask(330, policy, budget, seed=i, max_tokens=34)
    for i, (policy, budget) in enumerate(
        [("take", None), ("ada-snapkv", 0.5), ("lava", 0.5), ("full", None), ("full", None), ("take", None)]
    )
]
ABORTED_AFTER = [0, 2, 0, 3, 4, 0, 0, 0, 5]
"""Steps of the engine until each of ``ASKS`` is aborted, 0: never."""
SETTINGS: dict[str, dict[str, Any]] = {
    # Some prompts fit a step, others are cut.
    "mixed": {**BASE, "max_num_batched_tokens": 256},
    "tight": {**BASE, "max_num_batched_tokens": 192, "max_model_len": 512, "num_gpu_blocks_override": 7},
    "small": {**BASE, "max_num_batched_tokens": 64},
    "answers": {**anywhere.SMALL, "eviction": anywhere.OPTIONS},
    "turns": {**hits.BASE, "eviction": hits.OPTIONS},
    "windows": {
        "max_num_seqs": 16,
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "eviction": {"policy_params": {"kvzip": {"kvzip_chunk": 64}}},
    },
    "lookahead": {**lookahead.SMALL, "eviction": lookahead.OPTIONS},
    "8 bits": {**BASE, "max_num_batched_tokens": 64, "kv_cache_dtype": INT8},
}
SMALL = [
    Ask(70, "ada-snapkv", 0.6, max_tokens=4),
    Ask(45, "full", max_tokens=6, seed=1),
    Ask(66, "lava", 0.7, max_tokens=2, seed=2),
]
WINDOWED = [*(ask for ask in ASKS if ask.policy != "take"), Ask(210, "kvzip", 0.3, max_tokens=9, seed=6)]
"""What a model can be asked of which some layers see a window only."""
CACHING = {"enable_prefix_caching": True, "block_size": 32}
TURNS = [*conversation("kvzip"), *conversation("lava", 1)]
LOADS = {
    "windows": WINDOWED,
    "mixed": ASKS,
    "tight": TIGHT,
    "small": SMALL,
    "answers": anywhere.ASKS,
    "turns": TURNS,
    "lookahead": lookahead.ASKS[::4],
    "8 bits": SMALL,
}
STAGES = {"ahead": True, "pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def model(models):
    return models("llama", heads=4, kv_heads=2, layers=4)


@pytest.fixture(scope="module")
def windowed(models):
    return models("gpt_oss")


@pytest.fixture(scope="module")
def second(model, windowed, tmp_path_factory):
    """All cases of the V2 runner, in the background."""
    mixed, tight, small, answers, turns, windows, later, quantised = (
        {"model": model, **SETTINGS[name]} for name in SETTINGS
    )
    process = NewProcess(
        tmp_path_factory.mktemp("v2"),
        [
            {**mixed, "batches": [ASKS, ASKS[:4]], "logits": True},
            {**tight, "batches": [TIGHT], "ahead": True, "aborting": (ASKS, ABORTED_AFTER)},
            {**mixed, "batches": [ASKS], **STAGES},
            {**small, "batches": [SMALL, SMALL], "ahead": True, "gpu": True, **CACHING},
            {**mixed, "batches": [ASKS, ASKS], "logits": True, "ahead": True, **CACHING},
            # So few blocks that layers with windows and pages take them from each other.
            {
                **windows,
                "model": windowed,
                "num_gpu_blocks_override": 18,
                "batches": [WINDOWED] * 2,
                "ahead": True,
            },
            {**answers, "batches": [anywhere.ASKS], "ahead": True},
            {
                **turns,
                "batches": [TURNS[:1], TURNS[:2], TURNS, TURNS],
                **STAGES,
                "max_num_batched_tokens": 96,
                "enable_prefix_caching": True,
            },
            {**later, "batches": [lookahead.ASKS[::4]], "ahead": True, "max_num_batched_tokens": 256},
            {**quantised, "batches": [SMALL], "ahead": True, "gpu": True, "logits": True},
        ],
    )
    yield process
    process.stop()


@pytest.fixture(scope="module")
def first(model, windowed, second):
    """The same by the V1 runner."""
    known = {}
    for name, asks in LOADS.items():
        with evicting_engine(windowed if name == "windows" else model, **SETTINGS[name]) as llm:
            known[name] = run(llm, asks, logits=name in ("mixed", "8 bits"))
            assert (num_preemptions(llm) > 0) == (name == "tight")
    return known


CASES = {
    "mixed": (0, "mixed"),
    "preempted": (1, "tight"),
    "PP 2": (2, "mixed"),
    "pages of a GPU": (3, "small"),
    "cached prefixes": (4, "mixed"),
    "windows": (5, "windows"),
    "answers that are evicted": (6, "answers"),
    "PP 2, conversations": (7, "turns"),
    "lookahead": (8, "lookahead"),
    "pages of a GPU in 8 bits": (9, "8 bits"),
}


@pytest.mark.engine
@pytest.mark.parametrize(("case", "name"), CASES.values(), ids=CASES)
def test_equals_v1(first, second, case, name) -> None:
    batches, preemptions, found, _ = second.result()[case]
    assert name == "windows" or (preemptions > 0) == (name == "tight")
    assert (found > 0) == (case in (3, 4, 7))
    assert case != 4 or found > sum(ask.length for ask in ASKS) // 3
    for batch in batches:
        assert batch
        for ask, one, other in zip(LOADS[name], first[name], batch, strict=False):
            assert one.tokens == other.tokens, ask
            # Preempted requests are evicted again; when they are preempted depends on what was scheduled ahead.
            # What is found in the cache is not evicted again.
            was_found = name == "turns" or (case == 4 and batch is batches[1])
            assert was_found or one.kept[-1:] == other.kept[-1:], ask
            if other.logits.numel():
                torch.testing.assert_close(one.logits, other.logits, **CLOSE)


@pytest.mark.engine
def test_aborted_requests_leave_nothing_behind(first, second) -> None:
    *_, finished = second.result()[1]
    for answer, last, tokens in zip(first["mixed"], ABORTED_AFTER, finished, strict=True):
        assert tokens == (None if last else answer.tokens)
