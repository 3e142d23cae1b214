"""A new way of evicting takes one class and its registration: here, after every 64 tokens of the prompt."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tests.engine.support.masked import masked_logits
from tests.engine.support.running import Ask, evicting_engine, run
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.policies import registry as policies
from vllm_kvevict.schedules import registry as schedules
from vllm_kvevict.schedules.base import RankCapacity, Schedule, pages_for
from vllm_kvevict.schedules.eviction import Eviction, QueryRows
from vllm_kvevict.schedules.inputs import LayerStep
from vllm_kvevict.schedules.plan import Phase

EVERY, SINKS, BUDGET = 64, 4, 40


def survivors(stored: list[int]) -> list[int]:
    """Of entries in stored order, the first ones and the last ones."""
    return stored if len(stored) <= BUDGET else stored[:SINKS] + stored[SINKS - BUDGET :]


class EvictionEvery64(Eviction):
    """Whatever is scored, the first tokens and the last ones stay."""

    def after_layer(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        if rows.evicts:
            cache = self.evictor.cache
            stored = cache.lengths.shortest(self.resident.request_slot, step.layer)
            kept = torch.tensor(survivors(list(range(stored))))
            self.selection.compact(step.layer, [kept] * cache.num_kv_heads)


class Every64(Schedule):
    """After every 64 tokens of the prompt, and at its end."""

    eviction = EvictionEvery64
    holds_whole_prompt = False

    def positions(self, config: EvictionConfig, n: int) -> tuple[int, ...]:
        return (*range(EVERY, n, EVERY), n)

    def peak(self, phase: Phase, rank: RankCapacity, page_size: int, by_layer: bool) -> int:
        return rank.rows * pages_for(BUDGET + EVERY, page_size)


@contextlib.contextmanager
def registered(schedule: Schedule) -> Iterator[None]:
    """A policy, `toy`, that is evicted by a schedule."""
    schedules.register("toy", schedule)
    policies.register(dataclasses.replace(policies.lookup("streaming-llm"), name="toy", schedule="toy"))
    yield
    del schedules._schedules["toy"], policies._policies["toy"]
    schedules.plan_of.cache_clear()


def seen(positions: Sequence[int], tokens: int) -> Tensor:
    """What each token may see if evictions follow so many tokens."""
    mask, stored = torch.zeros(tokens, tokens, dtype=torch.bool), []
    for token in range(tokens):
        stored.append(token)
        mask[token, stored] = True
        if token + 1 in positions:
            stored = survivors(stored)
    return mask


@pytest.mark.engine
@pytest.mark.parametrize("length", [64, 200, 257])
def test_logits_equal_a_masked_model(models, length: int) -> None:
    model, ask = models("llama"), Ask(length, "toy", BUDGET, max_tokens=6)
    with registered(Every64()), evicting_engine(model, max_num_batched_tokens=128, max_model_len=512) as llm:
        (answer,) = run(llm, [ask], logits=True)
    mask = seen([*range(EVERY, length, EVERY), length], length + len(answer.tokens))
    expected = masked_logits(model, ask.prompt, answer.tokens, seen=mask)
    assert torch.allclose(answer.logits, expected, atol=1e-4)
    unlike = masked_logits(model, ask.prompt, answer.tokens)
    assert not torch.allclose(answer.logits, unlike, atol=1e-2)
