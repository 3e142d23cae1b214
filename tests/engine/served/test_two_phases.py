"""Phases carry evictions of an answer: here once more after 64 of its tokens, as a schedule that only this test has."""

import json
from pathlib import Path

import pytest
import torch

from tests.engine.served.test_new_schedule import BUDGET, EvictionEvery64, registered, seen
from tests.engine.support.masked import masked_logits
from tests.engine.support.running import Answer, Ask, evicting_engine, num_preemptions, run_preempted
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.base import Schedule
from vllm_kvevict.schedules.plan import Phase

AFTER = 64
PROMPT, ANSWER = 100, 400
POOL = {"num_gpu_blocks_override": 3, "max_model_len": 512, "max_num_batched_tokens": 512}
ROOM = 3 * 128
"""Tokens of each row that the pool holds: enough for ``BUDGET`` and the answer only if that is evicted as well."""


class Twice(Schedule):
    """Once at the end of the prompt, layer by layer if one step reads it, and once in the answer."""

    eviction = EvictionEvery64

    def phases(self, config: EvictionConfig, name: str, n: int) -> tuple[Phase, ...]:
        return (*super().phases(config, name, n), Phase(config, name, (n + AFTER,), begins=n))

    def can_recycle(self, config: EvictionConfig, num_stages: int, is_asynchronous: bool) -> bool:
        return True


class Once(Twice):
    """The control: the answer is not evicted."""

    def phases(self, config: EvictionConfig, name: str, n: int) -> tuple[Phase, ...]:
        return super().phases(config, name, n)[:1]


def answer_of(model: Path, log: Path, preempt_at: int = -1) -> tuple[Answer, list[int], int]:
    """An answer, and after how many tokens it was evicted and how often preempted, which step ``preempt_at`` does."""
    options = {"policy": "toy", "budget": BUDGET, "eviction_log": str(log)}
    with evicting_engine(model, eviction=options, **POOL) as llm:
        ask = Ask(PROMPT, "toy", BUDGET, max_tokens=ANSWER)
        (answer,) = run_preempted(llm, [ask], preempt_at, logits=True)
        return answer, [json.loads(line)["tokens"] for line in log.open()], num_preemptions(llm)


@pytest.mark.engine
def test_an_answer_is_evicted(models, tmp_path: Path) -> None:
    model, second = models("llama"), PROMPT + AFTER
    evictions = {-1: [PROMPT, second], 30: [PROMPT, PROMPT, second], 100: [PROMPT, second] * 2}
    tokens = None
    for preempt_at, expected in evictions.items():
        with registered(Twice()):
            answer, positions, preemptions = answer_of(model, tmp_path / f"log {preempt_at}", preempt_at)
        assert (positions, preemptions) == (expected, int(preempt_at > 0))
        assert len(answer.tokens) == ANSWER and answer.tokens == (tokens or answer.tokens)
        tokens = answer.tokens
        for after, is_alike in (([PROMPT, second], True), ([PROMPT], False)):
            mask = seen(after, PROMPT + ANSWER)
            expected_logits = masked_logits(model, answer.prompt, tokens, seen=mask)
            assert torch.allclose(answer.logits, expected_logits, atol=1e-4) == is_alike


@pytest.mark.engine
def test_without_that_the_answer_ends_where_the_memory_does(models, tmp_path: Path) -> None:
    with registered(Once()):
        answer, positions, _ = answer_of(models("llama"), tmp_path / "log")
    assert positions == [PROMPT] and len(answer.tokens) == ROOM - BUDGET + 1 < ANSWER
