"""Answers that are evicted while they are written: against the plain model, at every position, whatever interrupts."""

import pytest
import torch

from tests.engine.support.answers import Rules
from tests.engine.support.masked import CLOSE, masked_logits
from tests.engine.support.running import Ask, evicting_engine, num_preemptions, run, run_preempted
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.policies.registry import decoding_policies

BUDGET, INTERVAL, WINDOW = 40, 24, 8
RULES = Rules(BUDGET, INTERVAL, WINDOW)
OPTIONS = RULES.options()


@pytest.mark.engine
@pytest.mark.parametrize("policy", decoding_policies())
def test_each_policy(models, policy: str) -> None:
    model = models("llama", heads=4, kv_heads=2)
    asks = [
        Ask(70, max_tokens=150),
        Ask(300, "ada-snapkv", 0.2, max_tokens=120, seed=1),
        Ask(200, "snapkv", 0.3, prefix_len=150, max_tokens=100, seed=2),
        Ask(90, max_tokens=BUDGET + INTERVAL, seed=3),
    ]
    with evicting_engine(model, eviction={**OPTIONS, "decode_policy": policy}) as llm:
        answers = run(llm, asks, logits=True)
    RULES.check(model, asks, answers)
    unevicted = masked_logits(model, asks[0].prompt, answers[0].tokens)
    assert not torch.allclose(answers[0].logits, unevicted, **CLOSE)
    assert not answers[3].kept
    params = {"window": WINDOW} if policy not in ("streaming-llm",) else {"sinks": 0}
    RULES.check_choice(model, EvictionConfig(policy, budget=BUDGET, **params), asks[0], answers[0])


@pytest.mark.engine
@pytest.mark.parametrize("policy", [x for x in ("ada-snapkv", "rkv") if x in decoding_policies()])
def test_preempted_around_a_position(models, policy: str) -> None:
    model, ask = models("llama", heads=4, kv_heads=2), Ask(300, "ada-snapkv", 0.2, max_tokens=150)
    first = BUDGET + INTERVAL
    expected = None
    with evicting_engine(model, eviction={**OPTIONS, "decode_policy": policy}) as llm:
        for times, preempt_at in enumerate((-1, first - 1, first, first + 1, first + INTERVAL + 3)):
            (answer,) = run_preempted(llm, [ask], preempt_at)
            assert num_preemptions(llm) == times
            assert expected in (None, answer.tokens)
            expected = answer.tokens
