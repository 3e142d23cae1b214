"""Admission by arithmetic alone: no scheduler, no request."""

from dataclasses import replace

import pytest

from tests.engine.support.servers import PAGE
from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.request_options import plan_for
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


LATE, LONG, KEPT = 32, 64 * PAGE, 409
"""A prompt of so many tokens keeps so many entries of each row, and is evicted so many tokens later."""


def test_a_lookahead_is_promised_the_whole_prompt() -> None:
    """Pages of a row, from its admission to its end."""
    admission = control(ROWS * 1000, decode_reserve=512)
    plan = plan_of(EvictionConfig("snapkv", budget=KEPT), LONG, None, LATE)
    end = LONG + LATE
    new = admission.open(plan, LONG, LONG, 768)
    # No step reads it all up to its eviction, so it is not evicted layer by layer.
    assert not new.terms.by_layer and new.need_at(0) == ([0], [ROWS * 65])
    assert new.need_at(LONG) == ([ROWS * 64], [ROWS])
    assert new.need_at(end) == ([ROWS * 65], [0])
    # The entries that are kept, those of the answer, and half a page of each row.
    last = admission.expected_end(new)
    expected = (LONG + 512, ROWS * (KEPT + 512 + PAGE // 2) // PAGE)
    assert (last, admission.expected_pages(new, 0, last)) == expected
    # Beside others it counts with its promise while that lasts.
    one_more = admission.open(WHOLE, PROMPT, PROMPT, 1)
    reading = replace(new, tokens=LONG, held=[ROWS * 64], promise=[ROWS])
    assert control(ROWS * 75).shortage(one_more, [reading]) is None
    assert control(ROWS * 75 - 1).shortage(one_more, [reading]) is Shortage.PROMPTS
    # Until it is known that it was evicted, it holds all.
    new.hold(new.need_at(end))
    assert new.advance(end, 4096) and new.pending is not None and new.keeps_queries
    assert admission.bounds.after_eviction(plan, end) == [ROWS * 14]
    residues = [0] * PAGE
    residues[(KEPT + LATE) % PAGE] = ROWS
    kept = PageCount.from_residues(ROWS * 14, end, residues)
    assert new.on_report(0, kept, None) == ([ROWS * 14], [0]) and not new.keeps_queries
    assert admission.expected_pages(new, 0, last) == ROWS * 29


def test_an_answer_that_ends_before_its_lookahead_is_whole_at_its_end() -> None:
    options = Options.parse({"policy": "snapkv", "budget": KEPT, "lookahead": LATE})
    plans = [plan_for(options, LONG, None, most) for most in (16, LATE + 1, LATE + 2)]
    assert [plan.evicted_at for plan in plans] == [0, 0, LONG + LATE]
    # A server cannot know how long an answer is that it stops by itself.
    for plan in (plans[0], plans[2]):
        admission = control(ROWS * 1000)
        short = admission.open(plan, LONG, LONG, 16)
        assert admission.expected_pages(short, 0, admission.expected_end(short)) == ROWS * 65
