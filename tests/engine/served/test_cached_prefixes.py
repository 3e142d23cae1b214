"""A request that begins with a cached prefix says what it would say had it read the prefix itself."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.support.hits_and_misses import (
    BASE,
    POLICIES,
    Question,
    metric,
    questions,
)
from tests.engine.support.running import Answer, evicting_engine, run
from vllm_kvevict.schedules.base import RankCapacity

ASKED = [ask for seed, policy in enumerate(POLICIES) for ask in questions(policy, seed, 200 - seed, 5)]
OF_EACH_SCHEDULE = ("ada-snapkv", "lava", "layer-defensivekv", "kvzip", "keydiff", "take", "h2o")
"""Policies that several ranks are asked about; one rank is asked about all."""


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


def test_there_is_a_request_slot_for_each_cached_prefix() -> None:
    assert RankCapacity(1000, 0, 4, 8, 4, 8).most_prefixes == 31
    assert RankCapacity(1_000_000, 0, 4, 8, 4, 8).most_prefixes == 4096
