"""A turn begins with the last question and answer that the turn before has left, and says what it would say without."""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine.served.test_cached_prefixes import SERVERS
from tests.engine.served.test_chains import ABLE, BASE, OF_EACH_SCHEDULE, OPTIONS, check
from tests.engine.served.test_speculation import NGRAM
from tests.engine.support.conversations import Turn, turn
from tests.engine.support.hits_and_misses import metric
from tests.engine.support.running import Answer, evicting_engine, run, run_preempted
from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.scheduler.shared.tails import Tails

PAGE = Options.parse({"policy": "ada-snapkv"}).page_size
SYSTEM, QUESTIONS, ANSWER = (1, 90), ((2, 65), (3, 40), (4, 77), (5, 50)), 24


@dataclass
class Spoken(Turn):
    """A turn whose prompt has answers in it."""

    said: tuple[int, ...] = ()

    @property
    def prompt(self) -> list[int]:
        return list(self.said)


def spoken(policy: str, said: list[int], ends: list[int]) -> Spoken:
    """The request that goes on from what was said by both."""
    return Spoken(
        len(said),
        policy,
        0.3,
        turns=tuple(ends),
        max_tokens=ANSWER,
        seed=ABLE.index(policy),
        said=tuple(said),
    )


def words(policy: str, part: tuple[int, int]) -> list[int]:
    return turn(policy, (part, (0, 1)), ABLE.index(policy)).prompt[:-1]


def led(llm: Any, policy: str) -> tuple[list[Spoken], list[Answer]]:
    """Lead a conversation: what was asked, with what was answered before, and the answers."""
    said, ends = words(policy, SYSTEM), [SYSTEM[1]]
    asks: list[Spoken] = []
    answers: list[Answer] = []
    for question in QUESTIONS:
        said = said + words(policy, question)
        asks.append(spoken(policy, said, list(ends)))
        answers += run(llm, asks[-1:], logits=True, recorded=False)
        said = said + list(answers[-1].tokens)
        ends.append(len(said))
    return asks, answers


@pytest.fixture(scope="module")
def read(model):
    """By policy what each turn of a conversation asks, and is answered where it reads its whole prompt."""
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, "enable_prefix_caching": False}) as llm:
        return {policy: led(llm, policy) for policy in ABLE}


def found_so_far(llm: Any) -> Counter[str]:
    """Tokens of prompts that were found, by kind."""
    name = "vllm:kv_eviction_found_tokens"
    return Counter({m.labels["kind"]: int(m.value) for m in llm.get_metrics() if m.name == name})


def found_behind(policy: str, before: Spoken, ask: Spoken) -> int:
    """Tokens that a turn finds of the last question and answer: whole pages, but not what chooses among them."""
    begins, end = ask.turns[-2:]
    options = Options.parse({"policy": policy, "budget": 0.3, **OPTIONS, "policies": "all"})
    plan = options.plan(len(ask.prompt), {"kv_turns": list(ask.turns)})
    stored = len(before.prompt) + ANSWER - 1
    assert end == stored + 1
    return max(0, min(plan.most_cached(len(ask.prompt), begins), stored) - begins) // PAGE * PAGE


@pytest.mark.engine
@pytest.mark.parametrize("name", SERVERS)
def test_a_turn_goes_on_from_the_one_before(name: str, model, read) -> None:
    """Each by itself, then the last one again."""
    policies = (
        ABLE if name == "whole" else OF_EACH_SCHEDULE if name == "chunks" else ("ada-snapkv", "lava", "kvzip")
    )
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, **SERVERS[name]}) as llm:
        for count, policy in enumerate(policies, 1):
            (asks, expected), before = read[policy], found_so_far(llm)
            for ask, one in zip(asks, expected, strict=True):
                check(run(llm, [ask], logits=True, recorded=False), [one])
            tails = sum(found_behind(policy, *pair) for pair in itertools.pairwise(asks))
            assert found_so_far(llm) - before == Counter(turns=sum(x.turns[-2] for x in asks[1:]), tail=tails)
            assert metric(llm, "kv_eviction_cached_conversations") == count
            before = found_so_far(llm)
            check(run(llm, asks[-1:], logits=True, recorded=False), expected[-1:])
            question = len(asks[-1].prompt) - asks[-1].turns[-1]
            again = Counter(turns=asks[-1].turns[-1], tail=(question - 1) // PAGE * PAGE)
            assert found_so_far(llm) - before == again


@pytest.mark.engine
def test_all_turns_at_once_preempted_and_with_drafts(model, read) -> None:
    """Whoever takes what by then."""
    policies = ("ada-snapkv", "kvzip", "h2o")
    with evicting_engine(model, eviction=OPTIONS, **{**BASE, "max_num_batched_tokens": 96}) as llm:
        for policy in policies:
            asks, expected = read[policy]
            for at in (2, 5, 11):
                answers = run_preempted(llm, asks, at)
                assert [answer.tokens for answer in answers] == [one.tokens for one in expected]
                check(run(llm, asks, logits=True, recorded=False), expected)
                check(run(llm, asks[2:3], logits=True, recorded=False), expected[2:3])
            assert llm.reset_prefix_cache()
    with evicting_engine(model, eviction=OPTIONS, **BASE, speculative_config=NGRAM) as llm:
        for policy in policies:
            asks, expected = read[policy]
            for ask, one in zip(asks, expected, strict=True):
                assert run(llm, [ask], recorded=False)[0].tokens == one.tokens
        assert metric(llm, "spec_decode_num_accepted_tokens") > 10


@pytest.mark.engine
def test_what_another_request_has_left_is_noticed(model, read, monkeypatch) -> None:
    """A tail of other tokens makes the answer another one."""
    asks, expected = read["ada-snapkv"]
    find, others = Tails.find, spoken("ada-snapkv", [7] * len(asks[0].prompt), list(asks[0].turns))
    prompt = asks[0].prompt[: SYSTEM[1]] + others.prompt[SYSTEM[1] :]
    monkeypatch.setattr(
        Tails, "find", lambda tails, request, prefix: find(tails, request, prefix) or _any(tails)
    )
    with evicting_engine(model, eviction=OPTIONS, **BASE) as llm:
        run(llm, [spoken("ada-snapkv", prompt, list(asks[0].turns))], recorded=False)
        assert run(llm, asks[1:2], recorded=False)[0].tokens != expected[1].tokens


def _any(tails: Tails) -> Any:
    return next(((tail, PAGE) for tail in tails), None)
