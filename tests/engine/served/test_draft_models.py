"""Draft models with KV of their own change no answer: they keep all of it, and the target what policies say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.models import make_model
from tests.engine.support import drafters
from tests.engine.support.running import (
    Ask,
    assert_same,
    engine,
    evicting_engine,
    metric,
    num_preemptions,
    run,
)
from vllm_kvevict.engine.worker import draft_model

pytestmark = pytest.mark.engine

SMALL: dict[str, Any] = {"max_num_batched_tokens": 160, "max_model_len": 512}
OPTIONS = {
    "policy_params": {"kvzip": {"kvzip_chunk": 64}},
    **{"decode_budget": 64, "decode_interval": 16, "decode_window": 4},
}
METHODS = ("draft_model", "eagle", "eagle3", "mtp")
WHOLE = [Ask(300, "full", max_tokens=48), Ask(200, "full", max_tokens=48), Ask(64, "full", max_tokens=40)]
ASKS = [
    *WHOLE,
    Ask(200, "ada-snapkv", 1.0, max_tokens=48),
    *[
        Ask(130 + 17 * seed, policy, 0.3, seed=seed, max_tokens=24)
        for seed, policy in enumerate(
            ("ada-snapkv", "lava", "snapkv", "streaming-llm", "pyramidkv", "kvzip", "take")
        )
    ],
    Ask(250, "lava", 0.2, prefix_len=200, max_tokens=30),
    Ask(250, "kvzip", 0.2, prefix_len=190, max_tokens=30),
    Ask(96, "ada-snapkv", 0.3, decode_budget=16, max_tokens=70),
    Ask(1, max_tokens=30),
    Ask(40, max_tokens=1),
    Ask(41, max_tokens=2),
    Ask(500, "snapkv", 0.1, max_tokens=12),
]
PREFIX_LENGTHS = {"ada-snapkv": 201, "lava": 128, "kvzip": 190, "streaming-llm": 65}
PREFIXES = [
    Ask(300, "full", max_tokens=20),
    Ask(300, "snapkv", 0.3, seed=1, max_tokens=20),
    *[
        Ask(260, policy, 0.3, prefix_len=end, seed=end, max_tokens=20)
        for policy, end in PREFIX_LENGTHS.items()
    ],
]
Drafting = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory) -> Drafting:
    """By method, a model and how it is drafted for; ``itself`` is a draft model that is always right."""
    root, made = tmp_path_factory.mktemp("drafting"), dict[str, tuple[Path, dict[str, Any]]]()

    def make(name: str) -> tuple[Path, dict[str, Any]]:
        method, _, architecture = name.partition(" ")
        folder = root / name.replace(" ", "-")
        if method == "itself":  # whose answers depend on what it reads
            target = make_model(folder)
            return target, {"method": "draft_model", "num_speculative_tokens": 3, "model": str(target)}
        target = drafters.counting_target(
            folder, architecture or ("glm4_moe" if method == "mtp" else "llama")
        )
        drafter = {
            "draft_model": lambda: drafters.one_layer(folder / "drafter", target),
            "eagle": lambda: drafters.eagle(folder / "drafter"),
            "eagle3": lambda: drafters.eagle3(folder / "drafter"),
        }.get(method)
        drafts = {"method": method, "num_speculative_tokens": 3}
        return target, drafts | ({"model": str(drafter())} if drafter else {})

    def get(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return get


def drafts(llm) -> tuple[int, int]:
    """Draft tokens that were accepted, and all."""
    return metric(llm, "spec_decode_num_accepted_tokens"), metric(llm, "spec_decode_num_draft_tokens")


def accepted(llm, asks: list[Ask], recorded: bool = True) -> int:
    """Draft tokens that are accepted, one request at a time."""
    before = drafts(llm)[0]
    for ask in asks:
        run(llm, [ask], recorded=recorded)
    return drafts(llm)[0] - before


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_without_drafts(drafting: Drafting, method: str) -> None:
    """And as many drafts of what is kept whole are accepted as in vLLM without eviction."""
    model, speculation = drafting(method)
    with evicting_engine(model, eviction=OPTIONS, **SMALL) as llm:
        expected = run(llm, ASKS, logits=True)
    with evicting_engine(model, eviction=OPTIONS, speculative_config=speculation, **SMALL) as llm:
        assert_same(expected, run(llm, ASKS, logits=True))
        right, all_drafts = drafts(llm)
        assert right > 100 and all_drafts - right > 100
        found = accepted(llm, WHOLE)
        groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        assert len(groups) == 2
    with engine(model, speculative_config=speculation, enable_prefix_caching=False, **SMALL) as llm:
        asks = [Ask(ask.length, max_tokens=ask.max_tokens) for ask in WHOLE]
        of_stock = accepted(llm, asks, recorded=False)
    # Which also drafts, and accepts, tokens behind the end of an answer.
    assert of_stock - 3 * len(WHOLE) <= found <= of_stock


def test_a_draft_model_reads_its_own_blocks(drafting: Drafting, monkeypatch) -> None:
    """The control: with the tables of another group, answers are right, and drafts are not."""
    model, speculation = drafting("itself")
    with evicting_engine(model, speculative_config=speculation, **SMALL) as llm:
        right = accepted(llm, WHOLE)
        assert right > 0.9 * drafts(llm)[1]
    monkeypatch.setattr(draft_model, "goes_first", lambda vllm_config: False)
    with evicting_engine(model, speculative_config=speculation, **SMALL) as llm:
        assert accepted(llm, WHOLE) < 0.5 * right


@pytest.mark.parametrize("name", [*METHODS, "eagle3 gpt_oss"])
def test_cached_prefixes(drafting: Drafting, name: str) -> None:
    """They are found as without drafts, but for the block before the last token, which a head of vLLM's reads again."""
    model, speculation = drafting(name)
    settings = {**SMALL, "eviction": OPTIONS, "enable_prefix_caching": True, "block_size": 32}
    found = []
    with evicting_engine(model, **settings) as llm:
        expected = run(llm, PREFIXES, logits=True)
        run(llm, PREFIXES)
        found.append(metric(llm, "prefix_cache_hits"))
    with evicting_engine(model, speculative_config=speculation, **settings) as llm:
        counts = []
        for _ in range(3):
            before = drafts(llm)[0]
            assert_same(expected, run(llm, PREFIXES, logits=True), kept=False)
            counts.append(drafts(llm)[0] - before)
            found.append(metric(llm, "prefix_cache_hits"))
        assert min(counts) >= 0.9 * counts[0] > 30
    again = 32 if speculation["method"] != "draft_model" else 0
    assert found[0] - 2 * again <= found[2] <= found[0] - again


@pytest.mark.parametrize("name", ["draft_model", "eagle3", "eagle3 gpt_oss"])
def test_requests_that_are_preempted(drafting: Drafting, name: str) -> None:
    """In the end nobody holds a block."""
    model, speculation = drafting(name)
    count, blocks = (5, 118) if "gpt_oss" in name else (3, 90)
    asks = [
        Ask(250, policy, budget, seed=seed, max_tokens=90)
        for seed, (policy, budget) in enumerate([("ada-snapkv", 0.6), ("full", None), ("full", None)] * count)
    ]
    tight = {**SMALL, "block_size": 32, "num_gpu_blocks_override": blocks, "eviction": {"decode_reserve": 1}}
    with evicting_engine(model, **SMALL) as llm:
        expected = run(llm, asks, logits=True)
    with evicting_engine(model, speculative_config=speculation, **tight) as llm:
        ledger = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        free = ledger.block_pool.get_num_free_blocks()
        assert_same(expected, run(llm, asks, logits=True), kept=False)
        assert drafts(llm)[0] and num_preemptions(llm)
        assert ledger.block_pool.get_num_free_blocks() + len(ledger.blocks.as_pages) == free


@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_tensor_ranks(drafting: Drafting, name: str) -> None:
    model, speculation = drafting(name)
    sizes = {"tensor_parallel_size": 2}
    ranks = {"draft_tensor_parallel_size": 2}
    with evicting_engine(model, eviction=OPTIONS, **SMALL) as llm:
        expected = run(llm, ASKS, logits=True)
    with evicting_engine(
        model, eviction=OPTIONS, speculative_config=speculation | ranks, **SMALL, **sizes
    ) as llm:
        assert_same(expected, run(llm, ASKS, logits=True), kept=False)
        assert drafts(llm)[0] > 100
