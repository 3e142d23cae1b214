"""A conversation goes on from what earlier turns have left of it, and says what it would say had it read all of it.

In some conversations the first part stays whole, and what follows is evicted beside it.
"""

from typing import Any

import pytest
import torch

from tests.engine.served.test_cached_prefixes import SERVERS
from tests.engine.support.answers import CLOSE
from tests.engine.support.conversations import SPOKEN, Turn, conversation, found_by, turn
from tests.engine.support.hits_and_misses import aborted_after, metric
from tests.engine.support.running import (
    Answer,
    evicting_engine,
    num_preemptions,
    run,
    run_preempted,
)
from vllm_kvevict.engine.scheduler.shared import prefixes
from vllm_kvevict.engine.scheduler.shared.tails import Tails
from vllm_kvevict.policies.registry import policies_for_parts

ABLE = [policy for policy in policies_for_parts() if policy != "full"]
OF_EACH_SCHEDULE = ("ada-snapkv", "lava", "layer-defensivekv", "kvzip", "keydiff", "h2o")
OPTIONS = {"min_turn": 16, "check": True}
BASE: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "enable_prefix_caching": True,
}


WHOLE = SPOKEN[0][1]
"""Tokens of a first part that stays whole."""
CHAINS = [(policy, 0) for policy in ABLE] + [
    (policy, WHOLE) for policy in ("ada-snapkv", "kvzip", "lava", "h2o")
]
"""Policies, and what stays whole."""


def asked(policy: str, whole: int = 0) -> list[Turn]:
    return conversation(policy, ABLE.index(policy), whole=whole)


@pytest.fixture(scope="module")
def read(model):
    """What each request says that reads its whole prompt."""
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, "enable_prefix_caching": False}) as llm:
        return {chain: run(llm, asked(*chain), logits=True, recorded=False) for chain in CHAINS}


def check(answers: list[Answer], expected: list[Answer]) -> None:
    for index, (answer, one) in enumerate(zip(answers, expected, strict=True)):
        assert answer.tokens == one.tokens, index
        if len(answer.logits):
            torch.testing.assert_close(answer.logits, one.logits, **CLOSE)


def without_tails(monkeypatch) -> None:
    monkeypatch.setattr(Tails, "part_from", lambda tails, request, account, untold: None)


@pytest.mark.engine
@pytest.mark.parametrize("name", SERVERS)
def test_hits_say_what_misses_say(name: str, model, read, monkeypatch) -> None:
    """Turn by turn, then all at once again, and all at once after a reset, when some wait for others; without tails."""
    without_tails(monkeypatch)
    is_whole = name == "whole"
    policies = ABLE if is_whole else OF_EACH_SCHEDULE if name == "chunks" else ("ada-snapkv", "lava", "kvzip")
    chains = [chain for chain in CHAINS if chain[0] in policies]
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, **SERVERS[name]}) as llm:
        for chain in chains:
            asks, before = asked(*chain), metric(llm, "prefix_cache_hits")
            check([run(llm, [ask], logits=is_whole, recorded=False)[0] for ask in asks], read[chain])
            assert metric(llm, "prefix_cache_hits") - before == found_by(asks)
            before = metric(llm, "prefix_cache_hits")
            check(run(llm, asks, logits=is_whole, recorded=False), read[chain])
            assert metric(llm, "prefix_cache_hits") - before == sum(ask.turns[-1] for ask in asks)
        for chain in (*chains[:3], *chains[-3:]):
            assert llm.reset_prefix_cache()
            check(run(llm, asked(*chain), logits=is_whole, recorded=False), read[chain])
        assert num_preemptions(llm) == 0


@pytest.mark.engine
@pytest.mark.parametrize(
    "policy, whole", [("ada-snapkv", 0), ("kvzip", 0), ("h2o", 0), ("lava", WHOLE), ("kvzip", WHOLE)]
)
def test_preempted(model, read, policy: str, whole: int) -> None:
    """All at once in small steps, thrown out and begun anew with nothing cached; then again, when all is."""
    asks = asked(policy, whole)
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, "max_num_batched_tokens": 96}) as llm:
        for at in (1, 3, 6, 9, 13):
            check(run_preempted(llm, asks, at), read[policy, whole])
            check(run(llm, asks, recorded=False), read[policy, whole])
            assert llm.reset_prefix_cache()
        assert num_preemptions(llm) >= 5


@pytest.mark.engine
@pytest.mark.parametrize("policy", ["ada-snapkv", "kvzip"])
def test_a_reader_that_goes(model, read, policy: str) -> None:
    """The second of two requests that share three parts, whatever the first has left of them by then."""
    first, second = asked(policy)[4:6]
    aborts = 0
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, "max_num_batched_tokens": 64}) as llm:
        for steps in range(16):
            tokens, was_aborted = aborted_after(llm, first, second, steps)
            assert tokens == read[policy, 0][5].tokens, steps
            aborts += was_aborted
            assert llm.reset_prefix_cache()
    assert aborts >= 10


def another(policy: str, **fields: Any) -> Turn:
    """What the first conversation says, by another policy."""
    return turn(policy, SPOKEN[:3], ABLE.index("ada-snapkv"), **fields)


@pytest.mark.engine
def test_who_begins_with_a_first_part(model, read, monkeypatch) -> None:
    """Whoever keeps the same first part whole, with any policy; nobody else."""
    without_tails(monkeypatch)
    with evicting_engine(model, eviction=OPTIONS, **BASE) as llm:
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
def test_a_compressed_part_in_its_place_is_noticed(model, read, monkeypatch) -> None:
    """The control: were it found by its tokens alone, what another request has compressed would be taken for it."""
    monkeypatch.setattr(prefixes, "_how", lambda part: (part.begins, part.end))
    with evicting_engine(model, eviction=OPTIONS, **BASE) as llm:
        run(llm, [another("ada-snapkv")], recorded=False)
        answer = run(llm, [another("ada-snapkv", whole=WHOLE)], recorded=False)[0]
        assert answer.tokens != read["ada-snapkv", WHOLE][1].tokens


@pytest.mark.engine
def test_a_pool_for_one_conversation(model, read) -> None:
    """What is left goes to make room, the ends of chains first, and what is borrowed stays."""
    settings = {**BASE, "max_model_len": 700, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 7}
    with evicting_engine(model, eviction={**OPTIONS, "decode_reserve": 1}, **settings) as llm:
        for policy in OF_EACH_SCHEDULE:
            asks = asked(policy)
            check([run(llm, [ask], recorded=False)[0] for ask in asks], read[policy, 0])
            check(run(llm, asks, recorded=False), read[policy, 0])
        assert metric(llm, "kv_eviction_cache_drops") > 10
        assert metric(llm, "prefix_cache_hits") > 3000
