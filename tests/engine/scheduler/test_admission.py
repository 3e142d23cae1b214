"""Admission by arithmetic alone: no scheduler, no request."""

from dataclasses import replace

import pytest

from tests.engine.support.servers import PAGE
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.admission import PATIENCE, AdmissionControl, Shortage
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.bounds import MemoryBounds
from vllm_kvevict.schedules.registry import plan_of

ROWS, PROMPT = 4, 10 * PAGE
WHOLE = plan_of(EvictionConfig("full"), PROMPT)


def control(pages: int, decode_reserve: int = PAGE) -> AdmissionControl:
    """Of one rank with two layers and two KV heads, whose steps have 2048 tokens."""
    rank = RankCapacity(pages, 0, 2, 2, 2, 2)
    return AdmissionControl(MemoryBounds([rank], PAGE, 2048, 1, False), 2048, decode_reserve, 4096)


def decoding(admission: AdmissionControl, max_tokens: int) -> Account:
    """A request that has read its prompt and written nothing."""
    account = admission.open(WHOLE, PROMPT, PROMPT, max_tokens)
    pages = account.need_at(PROMPT)[0]
    return replace(account, tokens=PROMPT, held=pages)


def test_whoever_is_alone_is_admitted() -> None:
    admission = control(1)
    new = admission.open(WHOLE, PROMPT, PROMPT, 10)
    assert admission.shortage(new, []) is None
    assert not admission.can_ever_fit(new)
    assert control(ROWS * 10).can_ever_fit(new)


@pytest.mark.parametrize(
    ("pages", "lacks"),
    [(ROWS * 20, Shortage.PROMPTS), (ROWS * 21, Shortage.ANSWERS), (ROWS * 22, None)],
)
def test_two_moments_decide(pages: int, lacks: Shortage | None) -> None:
    """The other one takes a page in each row by the time the prompt is read; at the end both have."""
    admission = control(pages)
    new = admission.open(WHOLE, PROMPT, PROMPT, PAGE)
    assert admission.shortage(new, [decoding(admission, PAGE)]) is lacks


def test_whoever_was_preempted_too_often_counts_on_its_longest_answer() -> None:
    admission = control(ROWS * 22)
    once = admission.open(WHOLE, PROMPT, PROMPT, 8 * PAGE, preemptions=1)
    often = admission.open(WHOLE, PROMPT, PROMPT, 8 * PAGE, preemptions=PATIENCE)
    running = [decoding(admission, PAGE)]
    assert admission.shortage(once, running) is None
    assert admission.shortage(often, running) is Shortage.ANSWERS


def test_a_replay_expects_what_was_kept_before() -> None:
    admission = control(1000)
    plan = plan_of(EvictionConfig("snapkv", keep_ratio=0.2), PROMPT)
    new = admission.open(plan, PROMPT, PROMPT, 10)
    assert new.terms.by_layer and new.epoch == 1
    kept = [replace(new.counts[0], pages=7, tokens=PROMPT)]
    again = admission.open(plan, PROMPT, PROMPT, 10, preemptions=1, replayed={PROMPT: kept})
    assert again.epoch == 2
    assert admission.expected_pages(again, 0, PROMPT) == 7 != admission.expected_pages(new, 0, PROMPT)
