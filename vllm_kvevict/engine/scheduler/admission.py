"""Admission: whether one more request may begin beside those in flight, by what all of them will hold.

Owns nothing, and a question changes nothing: arithmetic on counts alone, without scheduler, workers or requests of
vLLM. The ledger asks it for every waiting request, and ``vllm-kvevict sizing`` for imagined ones.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import repeat

from vllm.utils.math_utils import cdiv

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.scheduler.account import STEPS_AHEAD, Account
from vllm_kvevict.engine.scheduler.nodes import Prefix, Segment, Tail
from vllm_kvevict.engine.scheduler.terms import Terms
from vllm_kvevict.schedules.bounds import Known, MemoryBounds
from vllm_kvevict.schedules.plan import Plan

PATIENCE = 3
"""Preemptions after which a request runs only where it cannot be preempted again."""


@dataclass(frozen=True)
class Found:
    """What of its prompt a request finds cached: a compressed prefix, or segments.

    Attributes:
        tokens: of all of it.
        prefix: the compressed prefix.
        tail: behind that, of which it takes what it has in common; None for none.
        segment: the last segment that it begins with.
    """

    tokens: int
    prefix: Prefix | None = None
    tail: Tail | None = None
    segment: Segment | None = None


class Shortage(Enum):
    """What a pool has too few pages for."""

    PROMPTS = "reading prompts"
    ANSWERS = "answers"


@dataclass(frozen=True)
class AdmissionControl:
    """Decides by two moments whether every rank has pages for one more request.

        pages |                     ______ 2. when all answers are as long as expected: all of them
              |        1.  _______/
              |    ___---'            1. when it and the prefills in flight are read: its peak beside all others
              |---'________________
                 now                 steps

    It may still be wrong about answers, which end when they like: then the last comer is preempted. It is never
    wrong about prefills, which are promised what they take.

    Attributes:
        bounds: what requests hold at most.
        step_tokens: tokens of a step, all requests together.
        decode_reserve: tokens of an answer that are expected at least, if it may have as many.
        max_model_len: the most tokens of a request.
    """

    bounds: MemoryBounds
    step_tokens: int
    decode_reserve: int
    max_model_len: int

    def open(
        self,
        plan: Plan,
        first_step: int,
        prompt_len: int,
        max_tokens: int,
        *,
        prefill_len: int | None = None,
        preemptions: int = 0,
        replayed: Known | None = None,
        begins_with: Found | None = None,
    ) -> Account:
        """The account of a request whose first step has so many tokens; attributes as of :class:`Account`.

        Args:
            begins_with: what it finds cached; with segments it is evicted by copying.
        """
        ranks, to_read = self.bounds.ranks, prompt_len if prefill_len is None else prefill_len
        counts = [PageCount.start(rank.rows, self.bounds.page_size) for rank in ranks]
        found = begins_with or Found(0)
        held, borrowed, replayed = [0] * len(ranks), [0] * len(ranks), replayed or {}
        if found.prefix is not None:
            borrowed, replayed = found.prefix.borrowed, {}
            counts = [found.prefix.kept[rank] for rank in range(len(ranks))]
            until = (self.bounds.most_held(plan, *rank, to_read) for rank in enumerate(counts))
            terms = Terms([pages - shared for pages, shared in zip(until, borrowed, strict=True)])
            held = held if found.tail is None else found.prefix.pages_behind(found.tokens)
        elif found.segment is not None:
            borrowed = [rank.rows * (found.tokens // self.bounds.page_size) for rank in ranks]
            terms = self.copying(plan, to_read, borrowed, replayed)
        else:
            by_layer = self.bounds.by_layer(plan, first_step)
            terms = Terms(self.peaks(plan, to_read, by_layer, replayed), by_layer)
        return Account(
            plan,
            self.bounds,
            terms,
            prompt_len,
            to_read,
            prompt_len + max_tokens - 1,
            preemptions + 1,
            counts,
            replayed,
            held=held,
            promise=[0] * len(ranks),
            borrowed=borrowed,
            prefix=found.prefix,
            tail=found.tail,
            segment=found.segment,
            tokens=found.tokens,
            in_one_step=plan.is_read_by(first_step),
        )

    def copying(self, plan: Plan, tokens: int, borrowed: Sequence[int], replayed: Known) -> Terms:
        """The terms of a request whose pages stay with segments when it is evicted: it holds copies of what it keeps.

        Args:
            tokens: to be read.
            borrowed: pages of each rank that it borrows.
        """
        prompt = plan.prompt
        until = self.bounds.until_read(plan, tokens if prompt is None else prompt.end, False)
        peak = [pages - shared for pages, shared in zip(until, borrowed, strict=True)]
        if prompt is None:
            return Terms(peak)
        copies = self.bounds.after_eviction(plan, prompt.end + STEPS_AHEAD)
        with_copies = [sum(pages) for pages in zip(peak, copies, strict=True)]
        after = self.bounds.after_eviction(plan, tokens, replayed)
        return Terms([max(pair) for pair in zip(with_copies, after, strict=True)], copies=copies)

    def peaks(self, plan: Plan, tokens: int, by_layer: bool, replayed: Known) -> list[int]:
        """The most pages that reading ``tokens`` tokens takes on each rank."""
        if plan.prompt is None or plan.prompt.end not in replayed:
            return self.bounds.until_read(plan, tokens, by_layer)
        until = self.bounds.until_read(plan, plan.prompt.end, by_layer)
        after = self.bounds.after_eviction(plan, tokens, replayed)
        return [max(pair) for pair in zip(until, after, strict=True)]

    def can_ever_fit(self, account: Account) -> bool:
        """Whether empty pools could hold the request until it is read, in this way or in one step."""
        # Alone a request owns what it borrows of a prefix: that may be dropped then.
        if self.bounds.have_room_for(
            [sum(pages) for pages in zip(account.terms.peak, account.borrowed, strict=True)]
        ):
            return True
        if account.terms.by_layer or not self.bounds.gains_from_one_step(account.plan):
            return False
        peaks = self.peaks(account.plan, account.prefill_len, True, account.replayed)
        return self.bounds.have_room_for(peaks)

    def shortage(
        self,
        new: Account,
        running: Collection[Account],
        pinned: Sequence[int] | None = None,
        lasting: Sequence[int] | None = None,
        less_urgent: Collection[Account] = (),
    ) -> Shortage | None:
        """What there would be too few pages for if ``new`` began beside those ``running``; None if it may.

        Args:
            running: whose answers it leaves room for.
            less_urgent: others in flight, which may be preempted: nothing is left for the rest of their answers.
            pinned: pages of each rank in shared entries that could not be dropped while they are read; None for none.
            lasting: those that could not be dropped until answers end; None for as many.
        """
        others = [*running, *less_urgent]
        if not others:
            return None
        pinned = pinned or [0] * len(self.bounds.ranks)
        lasting = lasting or pinned
        waiting = sum(account.prefill_len - account.tokens for account in others if account.is_reading)
        steps = cdiv(new.prefill_len + waiting, self.step_tokens)
        patient = new.epoch > PATIENCE
        everyone = [*others, new]
        ends = [self.expected_end(account, patient) for account in running]
        ends += [max(account.tokens, account.prefill_len) for account in less_urgent]
        ends.append(self.expected_end(new, patient))
        for index, rank in enumerate(self.bounds.ranks):
            if new.terms.peak[index] + self._held_soon(others, index, steps) > rank.pages - pinned[index]:
                return Shortage.PROMPTS
            if sum(map(self.expected_pages, everyone, repeat(index), ends)) > rank.pages - lasting[index]:
                return Shortage.ANSWERS
        return None

    def _held_soon(self, accounts: Collection[Account], index: int, steps: int) -> int:
        """Pages of a rank held or promised when the prefills in flight and the next one are done, in ``steps``."""
        pages = 0
        for account in accounts:
            now = account.held[index] + account.promise[index]
            if account.tokens < account.promised_until:
                pages += now
            else:
                count, soon = account.counts[index], account.tokens + steps
                most = count.at(soon)
                if account.plan.answer is not None:
                    most = self.bounds.most_held(account.plan, index, count, soon)
                # Whose prompt is being repeated holds more now than then.
                pages += max(now, most - account.borrowed[index])
        return pages

    def expected_end(self, account: Account, patient: bool = False) -> int:
        """Tokens an account is expected to have at its end; as many as it may have if it was preempted too often."""
        # However long an answer is that is evicted itself: it never holds more than until its second eviction.
        end = account.last_token + 1
        if not (patient or account.epoch > PATIENCE or account.plan.answer is not None):
            produced = max(account.tokens, account.prefill_len) - account.prompt_len
            # Who has outlived the reserve is expected to double: each wrong guess makes the next preemption rarer.
            end = min(end, account.prompt_len + max(self.decode_reserve, 2 * produced))
        return min(max(account.tokens, end), self.max_model_len)

    def expected_pages(self, account: Account, index: int, end: int) -> int:
        """Pages of a rank that an account is expected to hold until ``end`` tokens: exact once evicted, else by its
        budget."""
        count, plan = account.counts[index], account.plan
        if account.is_evicted_on(index):
            return self.bounds.most_held(plan, index, count, end) - account.borrowed[index]
        n = plan.evicted_at
        if end < n:
            return count.rows * cdiv(end, self.bounds.page_size) - account.borrowed[index]
        if n in account.replayed:
            kept = account.replayed[n][index]
            return self.bounds.most_held(plan, index, kept, max(end, n))
        budgets = sum(part.config.budget_for(part.n) for part in plan.parts)
        entries = budgets + plan.grows_until(n, end) - n
        page_size = self.bounds.page_size
        # Half a page of slack per row is the mean of what ragged rows leave unfilled.
        return count.rows * (2 * entries + page_size) // (2 * page_size)
