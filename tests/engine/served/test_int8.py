"""Entries in 8 bits: logits are those of a plain model that rounds keys and values alike, without evicted ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.served.test_decisions import LENGTH, prose
from tests.engine.served.test_hits import OF_EACH_SCHEDULE, ROUNDED
from tests.engine.served.test_speculation import NGRAM
from tests.engine.support.answers import Rules
from tests.engine.support.masked import expected_logits, layer_inputs
from tests.engine.support.running import (
    Ask,
    assert_same,
    evicting_engine,
    num_preemptions,
    plain_prompts,
    run,
    run_preempted,
)
from tests.real_model import real_model
from vllm_kvevict.kernels.layout import INT8
from vllm_kvevict.kernels.quantise import dequantise, quantise_reference
from vllm_kvevict.policies import available, score_layer, select

EVICTING = [policy for policy in available() if policy != "full"]
RULES = Rules(budget=48, interval=16, window=16)
SERVERS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_num_batched_tokens": 64},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "ngram": {"speculative_config": NGRAM},
}


def asks_of(name: str) -> list[Ask]:
    """Prompts and prefixes of each policy, prompts too short for the kernel that reads others, and answers that are
    evicted."""
    policies = EVICTING if name == "whole" else OF_EACH_SCHEDULE[1:]
    asks = [Ask(300, policy, 0.2, seed=i, decode_budget=0) for i, policy in enumerate(policies)]
    asks += [Ask(200, policy, 0.3, 150, seed=i, decode_budget=0) for i, policy in enumerate(policies)]
    asks += [Ask(n, policy, 1.0, decode_budget=0) for n, policy in ((1, "snapkv"), (15, "lava"), (16, "h2o"))]
    asks += [Ask(250, decode_budget=0), Ask(7, decode_budget=0), Ask(300, "ada-snapkv", 0.3, max_tokens=100)]
    return asks


def stored(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What is read of keys and values once they were stored."""
    return _rounded(key, is_rotated=True), _rounded(value, is_rotated=False)


def _rounded(x: Tensor, is_rotated: bool) -> Tensor:
    found = quantise_reference(x, is_rotated)
    return dequantise(found.numbers, found.scales, x.dtype, is_rotated)


@pytest.mark.engine
@pytest.mark.parametrize("name", SERVERS)
def test_every_policy_reads_what_is_stored(model, name):
    asks, options = asks_of(name), RULES.options()
    with evicting_engine(model, kv_cache_dtype=INT8, eviction=options, **SERVERS[name]) as llm:
        answers = run(llm, asks, logits=True)
    for ask, answer in zip(asks, answers, strict=True):
        at = RULES.all_positions(ask, answer)
        assert len(answer.kept) == len(at) * (ask.policy != "full" and ask.length > 16)
        torch.testing.assert_close(
            answer.logits, expected_logits(model, ask, answer, at, stored=stored), **ROUNDED
        )
        # The control: the same model with exact entries is further away than what the check allows.
        if ask.length > 16:
            exact = expected_logits(model, ask, answer, at)
            assert (answer.logits - exact).abs().max() > ROUNDED["atol"]


@pytest.mark.engine
def test_policies_choose_by_what_is_stored():
    """On a real model: nearly the entries that they choose from the tensors of one that rounds them alike."""
    tokens = prose()
    asks = [Ask(LENGTH, policy, 0.2, max_tokens=2, tokens=tokens) for policy in EVICTING]
    with evicting_engine(real_model(), kv_cache_dtype=INT8, max_model_len=1024) as llm:
        answers, prompts = run(llm, asks), plain_prompts(llm)
    inputs = layer_inputs(real_model(), tokens, prompts.behind(tokens), stored=stored)
    for place, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        config = ask.config()
        scores = [score_layer(config, x, i, len(inputs)) for i, x in enumerate(inputs)]
        expected = [{*map(int, head)} for heads in select(config, scores, LENGTH) for head in heads]
        kept = [{*head} for heads in answer.kept[0].values() for head in heads]
        others = [{*head} for heads in answers[place - 2].kept[0].values() for head in heads]
        assert _shared(expected, kept) >= 0.98 > _shared(expected, others), ask.policy


def _shared(expected: list[set[int]], kept: list[set[int]]) -> float:
    """The share of entries that are kept as expected."""
    return sum(map(len, map(set.intersection, expected, kept))) / sum(map(len, expected))


@pytest.mark.engine
def test_a_preempted_request_says_the_same(model):
    asks = [ask for ask in asks_of("chunks") if ask.length > 16]
    with evicting_engine(model, kv_cache_dtype=INT8, eviction=RULES.options()) as llm:
        expected = run(llm, asks, logits=True)
        answers = run_preempted(llm, asks, 4, 9, logits=True)
        assert num_preemptions(llm) > len(asks)
    assert_same(expected, answers, kept=False, **ROUNDED)


@pytest.mark.engine
def test_more_prompts_fit_the_same_memory(model):
    """By the size of an entry: 2 * 32 numbers and two scales, in place of 2 * 32 numbers of 4 bytes."""
    blocks = {}
    for dtype in ("auto", INT8):
        with evicting_engine(model, kv_cache_dtype=dtype) as llm:
            blocks[dtype] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert blocks[INT8] / blocks["auto"] == pytest.approx(256 / 72, rel=0.01)
