"""A turn begins with the last question and answer that the turn before has left, and says what it would say without."""

import itertools
from collections import Counter
from typing import Any

import pytest

from tests.engine.served.test_hits import (
    ABLE,
    CACHING,
    EIGHT_BITS,
    OF_EACH_SCHEDULE,
    OPTIONS,
    ROUNDED,
    SERVERS,
    chosen,
)
from tests.engine.served.test_speculation import NGRAM
from tests.engine.support.conversations import Part, said
from tests.engine.support.running import Answer, Ask, assert_same, evicting_engine, metric, run, run_preempted
from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.request_options import plan_for

PAGE = Options.parse({"policy": "ada-snapkv"}).page_size
SYSTEM, QUESTIONS, ANSWER = (1, 90), ((2, 65), (3, 40), (4, 77), (5, 50)), 24


def spoken(policy: str, tokens: list[int], ends: list[int]) -> Ask:
    """The request that goes on from what was said by both."""
    return Ask(len(tokens), policy, 0.3, turns=tuple(ends), max_tokens=ANSWER, tokens=tuple(tokens))


def words(policy: str, part: Part) -> list[int]:
    return said(ABLE.index(policy), part)


def led(llm: Any, policy: str) -> tuple[list[Ask], list[Answer]]:
    """Lead a conversation: what was asked, with what was answered before, and the answers."""
    tokens, ends = words(policy, SYSTEM), [SYSTEM[1]]
    asks: list[Ask] = []
    answers: list[Answer] = []
    for question in QUESTIONS:
        tokens = tokens + words(policy, question)
        asks.append(spoken(policy, tokens, list(ends)))
        answers += run(llm, asks[-1:], logits=True, recorded=False)
        tokens = tokens + list(answers[-1].tokens)
        ends.append(len(tokens))
    return asks, answers


@pytest.fixture(scope="module")
def read(model):
    """By policy what each turn of a conversation asks, and is answered where it reads its whole prompt."""
    return led_without_cache(model)


def led_without_cache(model, policies=ABLE, **settings):
    settings = {**CACHING, "enable_prefix_caching": False, **settings}
    with evicting_engine(model, eviction=OPTIONS, **settings) as llm:
        return {policy: led(llm, policy) for policy in policies}


def found_so_far(llm: Any) -> Counter[str]:
    """Tokens of prompts that were found, by kind."""
    name = "vllm:kv_eviction_found_tokens"
    return Counter({m.labels["kind"]: int(m.value) for m in llm.get_metrics() if m.name == name})


def found_behind(policy: str, before: Ask, ask: Ask) -> int:
    """Tokens that a turn finds of the last question and answer: whole pages, but not what chooses among them."""
    begins, end = ask.turns[-2:]
    options = Options.parse({"policy": policy, "budget": 0.3, **OPTIONS, "policies": "all"})
    plan = plan_for(options, len(ask.prompt), {"kv_turns": list(ask.turns)})
    stored = len(before.prompt) + ANSWER - 1
    assert end == stored + 1
    return max(0, min(plan.most_cached(len(ask.prompt), begins), stored) - begins) // PAGE * PAGE


@pytest.mark.engine
@pytest.mark.parametrize("name", SERVERS)
def test_a_turn_goes_on_from_the_one_before(name: str, model, read) -> None:
    """Each by itself, then the last one again."""
    policies = [policy for policy in chosen(name, "turns") if policy in ABLE]
    with evicting_engine(model, eviction=OPTIONS, **{**CACHING, **SERVERS[name]}) as llm:
        for count, policy in enumerate(policies, 1):
            (asks, expected), before = read[policy], found_so_far(llm)
            for ask, one in zip(asks, expected, strict=True):
                assert_same([one], run(llm, [ask], logits=True, recorded=False), kept=False)
            tails = sum(found_behind(policy, *pair) for pair in itertools.pairwise(asks))
            assert found_so_far(llm) - before == Counter(turns=sum(x.turns[-2] for x in asks[1:]), tail=tails)
            assert metric(llm, "kv_eviction_cached_conversations") == count
            before = found_so_far(llm)
            assert_same(expected[-1:], run(llm, asks[-1:], logits=True, recorded=False), kept=False)
            question = len(asks[-1].prompt) - asks[-1].turns[-1]
            again = Counter(turns=asks[-1].turns[-1], tail=(question - 1) // PAGE * PAGE)
            assert found_so_far(llm) - before == again


@pytest.mark.engine
def test_a_turn_in_8_bits(model) -> None:
    """The last question and answer move with their scales."""
    found, settings = 0, EIGHT_BITS["8 bits"]
    read = led_without_cache(model, OF_EACH_SCHEDULE[1:5], **settings)
    with evicting_engine(model, eviction=OPTIONS, **CACHING, **settings) as llm:
        for asks, expected in read.values():
            for ask, one in zip(asks, expected, strict=True):
                assert_same([one], run(llm, [ask], logits=True, recorded=False), kept=False, **ROUNDED)
            found, before = found_so_far(llm)["tail"], found
            assert found > before


@pytest.mark.engine
def test_all_turns_at_once_preempted_and_with_drafts(model, read) -> None:
    """Whoever takes what by then."""
    policies = ("ada-snapkv", "kvzip", "h2o")
    with evicting_engine(model, eviction=OPTIONS, **{**CACHING, "max_num_batched_tokens": 96}) as llm:
        for policy in policies:
            asks, expected = read[policy]
            for at in (2, 5, 11):
                answers = run_preempted(llm, asks, at)
                assert_same(expected, answers, kept=False)
                assert_same(expected, run(llm, asks, logits=True, recorded=False), kept=False)
                assert_same(expected[2:3], run(llm, asks[2:3], logits=True, recorded=False), kept=False)
            assert llm.reset_prefix_cache()
    with evicting_engine(model, eviction=OPTIONS, **CACHING, speculative_config=NGRAM) as llm:
        for policy in policies:
            asks, expected = read[policy]
            for ask, one in zip(asks, expected, strict=True):
                assert run(llm, [ask], recorded=False)[0].tokens == one.tokens
        assert metric(llm, "spec_decode_num_accepted_tokens") > 10
