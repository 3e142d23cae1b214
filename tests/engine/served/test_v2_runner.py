"""vLLM's V2 model runner, the default on GPUs, makes the same of every request as the V1 runner, which CPUs have.

Dummy runs, warm-up requests and the preparation of graph captures come between the batches.
"""

from typing import Any

import pytest
import torch

from tests.engine.served import test_answers_anywhere as anywhere
from tests.engine.served import test_chains as chains
from tests.engine.support.conversations import conversation
from tests.engine.support.running import Ask, evicting_engine, num_preemptions, run
from tests.engine.support.v2_runner import NewProcess

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
    "turns": {**chains.BASE, "eviction": chains.OPTIONS, "enable_prefix_caching": False},
}
SMALL = [
    Ask(70, "ada-snapkv", 0.6, max_tokens=4),
    Ask(45, "full", max_tokens=6, seed=1),
    Ask(66, "lava", 0.7, max_tokens=2, seed=2),
]
WINDOWED = [ask for ask in ASKS if ask.policy != "take"]
"""What a model can be asked of which some layers see a window only."""
WINDOWED_BASE = {"max_num_seqs": 16, "max_model_len": 512, "max_num_batched_tokens": 128}
CACHING = {"enable_prefix_caching": True, "block_size": 32}
TURNS = [*conversation("kvzip"), *conversation("lava", 1)]
LOADS = {"mixed": ASKS, "tight": TIGHT, "small": SMALL, "answers": anywhere.ASKS, "turns": TURNS}
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
    mixed, tight, small, answers, turns = ({"model": model, **SETTINGS[name]} for name in SETTINGS)
    process = NewProcess(
        tmp_path_factory.mktemp("v2"),
        [
            {**mixed, "batches": [ASKS, ASKS[:4]], "logits": True},
            {**tight, "batches": [TIGHT], "ahead": True, "aborting": (ASKS, ABORTED_AFTER)},
            {**mixed, "batches": [ASKS], **STAGES},
            {**small, "batches": [SMALL, SMALL], "ahead": True, "gpu": True, **CACHING},
            {**mixed, "batches": [ASKS, ASKS], "logits": True, "ahead": True, **CACHING},
            {
                "model": windowed,
                **WINDOWED_BASE,
                "num_gpu_blocks_override": 16,
                "batches": [WINDOWED, WINDOWED[::-1]],
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
        ],
    )
    yield process
    process.stop()


@pytest.fixture(scope="module")
def first(model, second):
    """The same by the V1 runner."""
    known = {}
    for name, asks in LOADS.items():
        with evicting_engine(model, **SETTINGS[name]) as llm:
            known[name] = run(llm, asks, logits=name == "mixed")
            assert (num_preemptions(llm) > 0) == (name == "tight")
    return known


@pytest.mark.engine
@pytest.mark.parametrize(
    ("case", "name"),
    [(0, "mixed"), (1, "tight"), (2, "mixed"), (3, "small"), (6, "answers"), (7, "turns")],
    ids=["mixed", "preempted", "PP 2", "pages of a GPU", "answers that are evicted", "PP 2, conversations"],
)
def test_equals_v1(first, second, case, name) -> None:
    batches, preemptions, found, _ = second.result()[case]
    assert (preemptions > 0) == (name == "tight")
    assert (found > 0) == (name in ("small", "turns"))
    for batch in batches:
        assert batch
        for ask, one, other in zip(LOADS[name], first[name], batch, strict=False):
            assert one.tokens == other.tokens, ask
            # Preempted requests are evicted again; when they are preempted depends on what was scheduled ahead.
            # What is found in the cache is not evicted again.
            assert name == "turns" or one.kept[-1:] == other.kept[-1:], ask
            if other.logits.numel():
                torch.testing.assert_close(one.logits, other.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.engine
def test_cached_prefixes_make_no_difference(first, second) -> None:
    (read, cached), _, found, _ = second.result()[4]
    # The second time most prompts are found up to the window of their policy.
    assert found > sum(ask.length for ask in ASKS) // 3
    for ask, expected, *answers in zip(ASKS, first["mixed"], read, cached, strict=True):
        for answer in answers:
            assert answer.tokens == expected.tokens, ask
            torch.testing.assert_close(answer.logits, expected.logits, atol=1e-4, rtol=1e-4)
    with_prefix = [bool(ask.prefix_len) for ask in ASKS]
    was_cached = [bool(one.kept) and not other.kept for one, other in zip(read, cached, strict=True)]
    assert was_cached == with_prefix and any(with_prefix)


@pytest.mark.engine
def test_aborted_requests_leave_nothing_behind(first, second) -> None:
    *_, finished = second.result()[1]
    for answer, last, tokens in zip(first["mixed"], ABORTED_AFTER, finished, strict=True):
        assert tokens == (None if last else answer.tokens)


@pytest.mark.engine
def test_layers_with_windows(windowed, second) -> None:
    """Scheduled ahead, with so few blocks that layers with windows and pages take them from each other."""
    batches, *_ = second.result()[5]
    with evicting_engine(windowed, **WINDOWED_BASE) as llm:
        expected = run(llm, WINDOWED)
    for answers in (batches[0], batches[1][::-1]):
        for ask, one, other in zip(WINDOWED, expected, answers, strict=True):
            assert one.tokens == other.tokens, ask
            assert one.kept[-1:] == other.kept[-1:], ask
