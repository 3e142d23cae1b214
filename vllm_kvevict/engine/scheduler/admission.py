"""Admission: whether one more request may begin beside those in flight, by what all of them will hold.

Arithmetic on counts alone: no scheduler, no workers, no requests of vLLM. The ledger asks it for every waiting
request, and ``vllm-kvevict sizing`` for imagined ones.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat

from vllm.utils.math_utils import cdiv

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.scheduler.prefixes import Prefix
from vllm_kvevict.engine.scheduler.segments import Segment
from vllm_kvevict.schedules.base import Arbiter
from vllm_kvevict.schedules.bounds import MemoryBounds
from vllm_kvevict.schedules.plan import Plan
from vllm_kvevict.schedules.sums import HeadDims

PATIENCE = 3
"""Preemptions after which a request runs only where it cannot be preempted again."""

STEPS_AHEAD = 3
"""Steps that may be dispatched before what the first of them evicts is reported, and one more."""


Need = tuple[list[int], list[int]]
"""What a request takes of each rank: pages that it holds, and pages that are kept free for the rest of its prefill."""


@dataclass
class Account:
    """One request in flight: what it holds, what is promised to its prefill, what it may hold at its end.

    Attributes:
        by_layer: whether its first step evicts it, layer by layer.
        prompt_len: tokens of the prompt.
        prefill_len: tokens to read: the prompt, and the answer so far if the request was preempted.
        max_tokens: of the answer.
        preemptions: how often it was preempted.
        counts: of each rank, exact up to the next eviction; until an eviction is reported, a bound. What it borrows is
            counted as its own.
        peak: the most pages of each rank that the prefill holds itself.
        replayed: what each rank kept of it in an earlier admission, and will keep again; None if it had none.
        tokens: stored once the steps dispatched so far are done.
        held, promise: pages of each rank that it holds, and that are kept free for the rest of its prefill.
        unreported: ranks whose report of a dispatched eviction is still to come.
        undecided: whether it is still to be decided, over all stages, what it keeps.
        to_repeat: chunks of the prompt that steps must repeat before it is evicted, (start, stop) each.
        waits_for_stages: whether pipeline stages decide together what it keeps.
        arbiter: by which that is decided, once the ranks have claimed something.
        in_one_step: whether its first step reads all up to its eviction.
        reserved_at: where its place in the reserve begins; None if it needs none.
        beside: blocks that layers which are not evicted hold of it at most, while it is read and afterwards.
        prefix: the cached prefix that it borrows pages of.
        segment: the last of the segments that it borrows pages of.
        lent: pages of each rank that it borrows.
        copies: the most pages of each rank that copies of what it keeps take, from its eviction's step until that is
            reported, since its own pages stay with segments; the first tokens of its answer have room in them. None
            where it is evicted in place.
        is_stale: whether the cache was reset after it was admitted: it goes on, and leaves nothing for others.
    """

    plan: Plan
    by_layer: bool
    prompt_len: int
    prefill_len: int
    max_tokens: int
    preemptions: int
    counts: list[PageCount]
    peak: list[int]
    replayed: list[PageCount] | None
    held: list[int]
    promise: list[int]
    lent: list[int]
    prefix: Prefix | None = None
    segment: Segment | None = None
    copies: list[int] | None = None
    tokens: int = 0
    unreported: set[int] = field(default_factory=set)
    undecided: bool = False
    to_repeat: list[tuple[int, int]] = field(default_factory=list)
    waits_for_stages: bool = False
    arbiter: Arbiter | None = None
    in_one_step: bool = False
    reserved_at: int | None = None
    beside: tuple[int, int] = (0, 0)
    is_stale: bool = False

    @property
    def epoch(self) -> int:
        """Which of the request's admissions it is: 1 for the first."""
        return self.preemptions + 1

    @property
    def last_token(self) -> int:
        """Tokens it will have stored when its answer is as long as it may be; the answer's last one is not stored."""
        return self.prompt_len + self.max_tokens - 1

    def reserved(self, dims: HeadDims) -> int:
        """What it needs of the workers' reserve until its eviction, as of :meth:`Plan.reserved`."""
        is_over = self.tokens >= (self.plan.evict_at or 0) and not self.to_repeat
        return 0 if is_over else self.plan.reserved(dims, self.in_one_step)

    @property
    def is_reading(self) -> bool:
        """Whether its prefill is still to be completed."""
        return self.tokens < self.prefill_len

    @property
    def is_evicted(self) -> bool:
        """Whether its counts are final and exact: it was evicted for the last time, or never is."""
        evict_at = self.plan.evict_at
        return evict_at is None or (not self.unreported and self.counts[0].tokens >= evict_at)

    @property
    def bounded(self) -> bool:
        """Whether it is not known how much it holds once it is evicted, until that is reported: it does not hold all
        that was read, or it holds copies besides."""
        return self.by_layer or self.copies is not None or not self.plan.schedule.holds_whole_prompt

    @property
    def may_go_ahead(self) -> bool:
        """Whether a step more takes no more pages than its bound, though its eviction is not reported."""
        if not self.bounded:
            return True
        if self.copies is None or self.is_reading:
            return False
        return self.tokens < self.counts[0].tokens + STEPS_AHEAD

    @property
    def is_lasting(self) -> bool:
        """Whether it uses to its end what it borrows of segments."""
        return self.plan.evict_at is None

    def pages_at(self, tokens: int) -> list[int]:
        """The most pages that the request holds on each rank during a step that ends at ``tokens`` tokens."""
        if self.by_layer and self.tokens < (self.plan.evict_at or 0) <= tokens:
            return list(self.peak)
        stored = tokens + self.plan.extra_tokens(tokens)
        stored += self.plan.extra_entries(tokens, self.counts[0].page_size)
        own = [count.at(stored) - lent for count, lent in zip(self.counts, self.lent, strict=True)]
        if self.copies is None or not self._is_evicted_by(tokens):
            return own
        return [sum(pair) for pair in zip(own, self.copies, strict=True)]

    def growth(self, tokens: int, later: int) -> list[int]:
        """Pages of each rank that the request takes from ``tokens`` to ``later`` tokens of its answer."""
        return [count.at(later) - count.at(tokens) for count in self.counts]

    def _is_evicted_by(self, tokens: int) -> bool:
        """Whether a step that ends at ``tokens`` tokens is the one that evicts it."""
        n = self.plan.evict_at
        return n is not None and self.counts[0].tokens < n <= tokens

    def take_chunk(self) -> tuple[int, int]:
        """The next chunk of its prompt, which the step that is being scheduled repeats."""
        chunk = self.to_repeat.pop(0)
        self.undecided = bool(self.to_repeat) or self.waits_for_stages
        return chunk

    def need_at(self, tokens: int) -> Need:
        """What the request takes during a step that ends at ``tokens`` tokens."""
        held = self.pages_at(tokens)
        return held, self.promised_at(tokens, held)

    def promised_at(self, tokens: int, held: Sequence[int]) -> list[int]:
        """Pages that the prefill is still promised on each rank when it holds ``held`` at ``tokens`` tokens."""
        if tokens >= self.prefill_len:
            return [0] * len(held)
        return [max(0, peak - pages) for peak, pages in zip(self.peak, held, strict=True)]


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
        replayed: list[PageCount] | None = None,
    ) -> Account:
        """The account of a request whose first step has so many tokens; attributes as of :class:`Account`."""
        ranks, by_layer = self.bounds.ranks, self.bounds.by_layer(plan, first_step)
        to_read = prompt_len if prefill_len is None else prefill_len
        return Account(
            plan,
            by_layer,
            prompt_len,
            to_read,
            max_tokens,
            preemptions,
            counts=[PageCount.start(rank.rows, self.bounds.page_size) for rank in ranks],
            peak=self.peaks(plan, to_read, by_layer, replayed),
            replayed=replayed,
            held=[0] * len(ranks),
            promise=[0] * len(ranks),
            lent=[0] * len(ranks),
            in_one_step=first_step == plan.evict_at,
            waits_for_stages=plan.schedule.decides_across_stages(self.bounds.num_stages),
        )

    def open_with(
        self,
        prefix: Prefix,
        plan: Plan,
        prompt_len: int,
        max_tokens: int,
        *,
        prefill_len: int,
        preemptions: int = 0,
    ) -> Account:
        """The account of a request that begins with a cached prefix; attributes as of :class:`Account`."""
        counts = [prefix.kept[rank] for rank in range(len(self.bounds.ranks))]
        nothing = [0] * len(counts)
        return Account(
            plan,
            False,
            prompt_len,
            prefill_len,
            max_tokens,
            preemptions,
            counts=counts,
            peak=[count.at(prefill_len) - lent for count, lent in zip(counts, prefix.lent, strict=True)],
            replayed=None,
            held=nothing,
            promise=nothing,
            lent=list(prefix.lent),
            prefix=prefix,
            tokens=prefix.tokens,
        )

    def share(self, account: Account, segment: Segment, columns: int) -> None:
        """Let a new account begin with the first columns of segments; it is evicted by copying."""
        account.by_layer, account.segment = False, segment
        account.tokens = columns * self.bounds.page_size
        account.lent = [rank.rows * columns for rank in self.bounds.ranks]
        self.let_copy(account)

    def let_copy(self, account: Account) -> None:
        """Let an account's pages stay with segments when it is evicted: it then holds copies of what it keeps."""
        plan, n = account.plan, account.plan.evict_at
        until = self.bounds.until_read(plan, n or account.prefill_len, False)
        account.peak = [pages - lent for pages, lent in zip(until, account.lent, strict=True)]
        if n is not None:
            account.by_layer = False
            account.copies = self.bounds.after_eviction(plan, n + STEPS_AHEAD)
            with_copies = [sum(pages) for pages in zip(account.peak, account.copies, strict=True)]
            after = self._after_eviction(plan, account.prefill_len, account.replayed)
            account.peak = [max(pair) for pair in zip(with_copies, after, strict=True)]

    def peaks(
        self, plan: Plan, tokens: int, by_layer: bool, replayed: Sequence[PageCount] | None
    ) -> list[int]:
        """The most pages that reading ``tokens`` tokens takes on each rank."""
        if replayed is None or plan.evict_at is None:
            return self.bounds.until_read(plan, tokens, by_layer)
        until = self.bounds.until_read(plan, plan.evict_at, by_layer)
        after = self._after_eviction(plan, tokens, replayed)
        return [max(pair) for pair in zip(until, after, strict=True)]

    def _after_eviction(self, plan: Plan, tokens: int, replayed: Sequence[PageCount] | None) -> list[int]:
        """The most pages of each rank that a request holds at ``tokens`` tokens, its eviction done."""
        if replayed is None:
            return self.bounds.after_eviction(plan, tokens)
        # What a replay holds after its eviction is no guess.
        return [count.at(max(tokens, count.tokens)) for count in replayed]

    def can_ever_fit(self, account: Account) -> bool:
        """Whether empty pools could hold the request until it is read, in this way or in one step."""
        # Alone a request owns what a prefix lends it: that may be dropped then.
        if self.bounds.hold([sum(pages) for pages in zip(account.peak, account.lent, strict=True)]):
            return True
        if account.by_layer or not self.bounds.gains_from_one_step(account.plan):
            return False
        peaks = self.peaks(account.plan, account.prefill_len, True, account.replayed)
        return self.bounds.hold(peaks)

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
            pinned: pages of each rank in cached prefixes that could not be dropped while they are read; None for none.
            lasting: those that could not be dropped until answers end; None for as many.
        """
        others = [*running, *less_urgent]
        if not others:
            return None
        pinned = pinned or [0] * len(self.bounds.ranks)
        lasting = lasting or pinned
        waiting = sum(account.prefill_len - account.tokens for account in others if account.is_reading)
        steps = cdiv(new.prefill_len + waiting, self.step_tokens)
        patient = new.preemptions >= PATIENCE
        everyone = [*others, new]
        ends = [self.expected_end(account, patient) for account in running]
        ends += [max(account.tokens, account.prefill_len) for account in less_urgent]
        ends.append(self.expected_end(new, patient))
        for index, rank in enumerate(self.bounds.ranks):
            if new.peak[index] + self._held_soon(others, index, steps) > rank.pages - pinned[index]:
                return Shortage.PROMPTS
            if sum(map(self.expected_pages, everyone, repeat(index), ends)) > rank.pages - lasting[index]:
                return Shortage.ANSWERS
        return None

    def _held_soon(self, accounts: Collection[Account], index: int, steps: int) -> int:
        """Pages of a rank held or promised when the prefills in flight and the next one are done, in ``steps``."""
        pages = 0
        for account in accounts:
            now = account.held[index] + account.promise[index]
            if account.is_reading:
                pages += now
            else:
                # Whose prompt is being repeated holds more now than then.
                pages += max(now, account.counts[index].at(account.tokens + steps) - account.lent[index])
        return pages

    def expected_end(self, account: Account, patient: bool = False) -> int:
        """Tokens an account is expected to have at its end; as many as it may have if it was preempted too often."""
        if patient or account.preemptions >= PATIENCE:
            reserve = account.max_tokens
        else:
            produced = max(account.tokens, account.prefill_len) - account.prompt_len
            # Who has outlived the reserve is expected to double: each wrong guess makes the next preemption rarer.
            reserve = max(self.decode_reserve, 2 * produced)
        end = max(account.tokens, account.prompt_len + min(account.max_tokens, reserve))
        return min(end, self.max_model_len)

    def expected_pages(self, account: Account, index: int, end: int) -> int:
        """Pages of a rank that an account is expected to hold at ``end`` tokens: exact once evicted, else by its
        budget."""
        count, evict_at = account.counts[index], account.plan.evict_at
        if evict_at is None or (count.tokens >= evict_at and index not in account.unreported):
            return count.at(end) - account.lent[index]
        if account.replayed is not None:
            kept = account.replayed[index]
            return kept.at(max(end, kept.tokens))
        entries = account.plan.config.budget_for(evict_at) + end - evict_at
        page_size = self.bounds.page_size
        # Half a page of slack per row is the mean of what ragged rows leave unfilled.
        return count.rows * (2 * entries + page_size) // (2 * page_size)
