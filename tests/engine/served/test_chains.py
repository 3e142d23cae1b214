"""A conversation goes on from what earlier turns have left of it, and says what it would say had it read all of it.

In some conversations the first part stays whole, and what follows is evicted beside it.
"""

from typing import Any

import pytest

from tests.engine.served.test_hits import ABLE, CACHING, OPTIONS, WHOLE, asked, without_tails
from tests.engine.support.conversations import SPOKEN, turn
from tests.engine.support.running import (
    Ask,
    assert_same,
    evicting_engine,
    metric,
    num_preemptions,
    run,
    run_preempted,
)

CHAINS = [
    *((policy, 0) for policy in ("ada-snapkv", "lava", "layer-defensivekv", "kvzip", "keydiff", "h2o")),
    *((policy, WHOLE) for policy in ("ada-snapkv", "kvzip", "lava")),
]
"""Policies, and what stays whole."""


@pytest.fixture(scope="module")
def read(model):
    """What each request says that reads its whole prompt."""
    with evicting_engine(model, eviction=OPTIONS, **{**CACHING, "enable_prefix_caching": False}) as llm:
        return {chain: run(llm, asked(*chain), recorded=False) for chain in CHAINS}


@pytest.mark.engine
@pytest.mark.parametrize(
    "policy, whole", [("ada-snapkv", 0), ("kvzip", 0), ("h2o", 0), ("lava", WHOLE), ("kvzip", WHOLE)]
)
def test_preempted(model, read, policy: str, whole: int) -> None:
    """All at once in small steps, thrown out and begun anew with nothing cached; then again, when all is."""
    asks = asked(policy, whole)
    with evicting_engine(model, eviction=OPTIONS, **{**CACHING, "max_num_batched_tokens": 96}) as llm:
        for at in (1, 3, 6, 9, 13):
            assert_same(read[policy, whole], run_preempted(llm, asks, at), kept=False)
            assert_same(read[policy, whole], run(llm, asks, recorded=False), kept=False)
            assert llm.reset_prefix_cache()
        assert num_preemptions(llm) >= 5


def another(policy: str, **fields: Any) -> Ask:
    """What the first conversation says, by another policy."""
    return turn(policy, SPOKEN[:3], ABLE.index("ada-snapkv"), **fields)


@pytest.mark.engine
def test_who_begins_with_a_first_part(model, read, monkeypatch) -> None:
    """Whoever keeps the same first part whole, with any policy; nobody else."""
    without_tails(monkeypatch)
    with evicting_engine(model, eviction=OPTIONS, **CACHING) as llm:
        run(llm, asked("ada-snapkv", WHOLE)[:1], recorded=False)
        for ask, found in (
            (another("keydiff", whole=WHOLE), WHOLE),
            (another("kvzip", whole=WHOLE), WHOLE),
            (another("ada-snapkv"), 0),
            (another("ada-snapkv", whole=SPOKEN[0][1] + SPOKEN[1][1]), 0),
            (another("ada-snapkv", whole=WHOLE), WHOLE),
        ):
            before = metric(llm, "prefix_cache_hits")
            answer = run(llm, [ask], recorded=False)[0]
            assert metric(llm, "prefix_cache_hits") - before == found, ask
        assert answer.tokens == read["ada-snapkv", WHOLE][1].tokens


@pytest.mark.engine
def test_a_pool_for_one_conversation(model, read) -> None:
    """What is left goes to make room, the ends of chains first, and what is borrowed stays."""
    settings = {**CACHING, "max_model_len": 700, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 7}
    with evicting_engine(model, eviction={**OPTIONS, "decode_reserve": 1}, **settings) as llm:
        for policy, whole in CHAINS:
            asks = asked(policy, whole)
            assert_same(read[policy, whole], [run(llm, [ask], recorded=False)[0] for ask in asks], kept=False)
            assert_same(read[policy, whole], run(llm, asks, recorded=False), kept=False)
        assert metric(llm, "kv_eviction_cache_drops") > 10
        assert metric(llm, "prefix_cache_hits") > 3000
