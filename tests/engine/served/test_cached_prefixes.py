"""A request that begins with a cached prefix says what it would say had it read the prefix itself."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.support.hits_and_misses import (
    BASE,
    POLICIES,
    TIGHT,
    Outcome,
    Question,
    aborted_after,
    metric,
    name_of,
    questions,
    servers,
)
from tests.engine.support.running import Answer, evicting_engine, num_preemptions, run
from vllm_kvevict.schedules.base import RankCapacity

ASKED = [ask for seed, policy in enumerate(POLICIES) for ask in questions(policy, seed, 200 - seed, 5)]
OF_EACH_KIND = ("ada-snapkv", "lava", "take")
OF_EACH_SCHEDULE = ("ada-snapkv", "lava", "layer-defensivekv", "kvzip", "keydiff", "take", "h2o")
"""Policies that several ranks are asked about; one rank is asked about all."""
LONG = [ask for seed, policy in enumerate(OF_EACH_KIND) for ask in questions(policy, seed, 300, 110)]


@pytest.fixture(scope="module")
def model(models):
    return models("llama", heads=8, kv_heads=4, layers=4)


@pytest.fixture(scope="module")
def read(model):
    """What each request says that reads its whole prompt, alone."""
    with evicting_engine(model, **BASE) as llm:
        return {id(ask): run(llm, [ask], logits=True, recorded=False)[0] for ask in ASKED}


def check(asks: Sequence[Question], answers: Sequence[Answer], expected: dict[int, Answer]) -> None:
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.tokens == expected[id(ask)].tokens, ask
        torch.testing.assert_close(answer.logits, expected[id(ask)].logits, atol=1e-4, rtol=1e-4)


SERVERS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 64},
    "TP 2": {"tensor_parallel_size": 2, "max_num_batched_tokens": 128},
    "PP 2": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 128},
}


@pytest.mark.engine
@pytest.mark.parametrize("name", SERVERS)
def test_hits_say_what_misses_say(name: str, model, read) -> None:
    """All at once, so that some wait for others, then once more, so that all hit, then alone after a reset."""
    ranks = name in ("TP 2", "PP 2")
    asks = [ask for ask in ASKED if ask.policy in OF_EACH_SCHEDULE or not ranks]
    documents = len(asks) // 3
    computed = sum(ask.prefix_len for ask in asks[::3])
    prompts = sum(ask.length for ask in asks)
    with evicting_engine(model, **{**BASE, **SERVERS[name]}, enable_prefix_caching=True) as llm:
        check(asks, run(llm, asks, logits=True, recorded=False), read)
        assert metric(llm, "kv_eviction_evictions") == documents
        assert metric(llm, "prefix_cache_queries") == prompts
        assert metric(llm, "prefix_cache_hits") == 2 * computed
        assert metric(llm, "kv_eviction_cached_entries") == documents
        check(asks, run(llm, asks, logits=True, recorded=False), read)
        assert metric(llm, "prefix_cache_hits") == 5 * computed
        assert metric(llm, "kv_eviction_evictions") == documents
        assert llm.reset_prefix_cache()
        one = [ask for ask in asks if ask.question == 1]
        check(one, run(llm, one, logits=True, recorded=False), read)
        assert metric(llm, "kv_eviction_evictions") == 2 * documents


@pytest.fixture(scope="module")
def alone(model) -> list[list[int]]:
    """What each long request says that reads its whole prompt, alone."""
    with evicting_engine(model, **BASE, eviction=TIGHT["eviction"]) as llm:
        return [run(llm, [ask], recorded=False)[0].tokens for ask in LONG]


@pytest.mark.engine
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_preempted_borrowers_and_donors(size: str, model, alone) -> None:
    """The pool holds one request as long as can be, and answers are far longer than admission expects."""
    settings = {**BASE, **TIGHT, "max_num_batched_tokens": 128}
    with evicting_engine(model, **settings, **{size: 2}, enable_prefix_caching=True) as llm:
        answers = run(llm, LONG, recorded=False)
        assert [answer.tokens for answer in answers] == alone
        assert num_preemptions(llm) > 0
        assert metric(llm, "prefix_cache_hits") > 0
        assert metric(llm, "kv_eviction_cache_drops") > 0


@pytest.mark.engine
def test_a_producer_that_is_aborted_at_every_step(model) -> None:
    """Whoever waits gets its answer, and nothing is left but what is cached."""
    asks = [questions(policy, 0)[:2] for policy in ("ada-snapkv", "lava", "take")]
    settings = {**BASE, "max_num_batched_tokens": 64}
    with evicting_engine(model, **settings) as llm:
        expected = [run(llm, [second], recorded=False)[0].tokens for _, second in asks]
    with evicting_engine(model, **settings, enable_prefix_caching=True) as llm:
        for (first, second), tokens in zip(asks, expected, strict=True):
            for steps in range(1, 9):
                assert aborted_after(llm, first, second, steps)[0] == tokens, (first.policy, steps)
                assert llm.reset_prefix_cache()


@pytest.mark.engine
def test_salts_and_prompt_logprobs(model, read) -> None:
    """Another salt reads for itself; who asks for the prompt's logprobs reads it all."""
    (ask, *_), prompts = questions("ada-snapkv", 0), []
    for salt in ("a", "b", "a", None, "b"):
        prompts.append({"prompt_token_ids": ask.prompt, **({"cache_salt": salt} if salt else {})})
    with evicting_engine(model, **BASE, enable_prefix_caching=True) as llm:
        cached = []
        for prompt in prompts:
            (output,) = llm.generate([prompt], ask.sampling(logits=False), use_tqdm=False)
            cached.append(output.num_cached_tokens)
        assert cached == [0, 0, 200, 0, 200]
        fields = ask.sampling(logits=False).extra_args
        sampling = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, extra_args=fields)
        (output,) = llm.generate([prompts[0]], sampling, use_tqdm=False)
        assert output.num_cached_tokens == 0 and len(output.prompt_logprobs) == ask.length


def test_every_combination_is_played_and_a_wrong_answer_named() -> None:
    """`python -m tests.engine.support.hits_and_misses` plays them all."""
    assert len(set(servers("V1"))) == 4 * 3 + 4 and len(set(servers("V2"))) == 4 * 2 + 2
    outcome, ask = Outcome(), questions("lava", 0)[0]
    outcome.compare(ask, [1, 2], {name_of(ask): [1, 2]})
    outcome.compare(ask, [1, 3], {name_of(ask): [1, 2]})
    assert (outcome.answers, outcome.wrong) == (2, ["lava, question 0, 12 tokens"])


def test_there_is_a_request_slot_for_each_cached_prefix() -> None:
    assert RankCapacity(1000, 0, 4, 8, 4, 8).most_prefixes == 31
    assert RankCapacity(1_000_000, 0, 4, 8, 4, 8).most_prefixes == 4096
