"""Admission by arithmetic alone: no scheduler, no request."""

from dataclasses import replace

import pytest

from tests.engine.support.servers import PAGE
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.admission import PATIENCE, AdmissionControl, Shortage
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.bounds import MemoryBounds
from vllm_kvevict.schedules.plan import Phase, Plan
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


LATE, LONG = 32, 64 * PAGE
"""Tokens of an answer after which a prompt of so many tokens is evicted, in the test below."""


def evicted_late() -> Plan:
    """A prompt that stays whole until so many tokens of its answer are written, and shares what it has read."""
    config = EvictionConfig("snapkv", budget=409 + LATE, window=LATE)
    return Plan(config, (Phase(config, "whole", (LONG + LATE,), leaves_at=LONG, after_step=True),))


def test_a_promise_lasts_until_the_prompt_is_evicted() -> None:
    """Pages of a row: the promise covers what the answer adds before the eviction, and ends with that."""
    admission, plan = control(ROWS * 1000, decode_reserve=512), evicted_late()
    assert (plan.leaves(LONG), plan.leaves(LONG + LATE)) == (LONG, LONG)
    new = admission.open(plan, LONG, LONG, 768)
    assert not new.terms.by_layer and new.need_at(0) == ([0], [ROWS * 65])
    assert new.need_at(LONG) == ([ROWS * 64], [ROWS])
    assert new.need_at(LONG + LATE) == ([ROWS * 65], [0])
    # The entries that are kept, and half a page of each row.
    end = admission.expected_end(new)
    assert (end, admission.expected_pages(new, 0, end)) == (
        LONG + 512,
        ROWS * (409 + 512 + PAGE // 2) // PAGE,
    )
    # Beside others it counts with its promise while that lasts.
    reading = replace(new, tokens=LONG, held=[ROWS * 64], promise=[ROWS])
    one_more = admission.open(WHOLE, PROMPT, PROMPT, 1)
    fits = replace(
        admission,
        bounds=replace(admission.bounds, ranks=[replace(admission.bounds.ranks[0], pages=ROWS * 75)]),
    )
    assert fits.shortage(one_more, [reading]) is None
    tight = replace(
        fits, bounds=replace(fits.bounds, ranks=[replace(fits.bounds.ranks[0], pages=ROWS * 75 - 1)])
    )
    assert tight.shortage(one_more, [reading]) is Shortage.PROMPTS
    # An answer that ends before is never evicted.
    short = admission.open(plan, LONG, LONG, 16)
    assert short.need_at(LONG) == ([ROWS * 64], [ROWS]) and short.need_at(short.promised_until)[1] == [0]
    assert admission.expected_pages(short, 0, admission.expected_end(short)) == ROWS * 65
