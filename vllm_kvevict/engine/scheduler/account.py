"""One admission of one request: what it holds on each rank, and what is promised to its prefill.

An account owns what is known of its admission. What it says it holds is never less than what the workers hold, and
exact from an eviction's last report to the next eviction. What happens to a request is a method here, or of its
:class:`PendingEviction`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.scheduler.nodes import Prefix, Segment, Tail
from vllm_kvevict.engine.scheduler.terms import Need, Terms
from vllm_kvevict.schedules.base import Arbiter, RankCapacity
from vllm_kvevict.schedules.bounds import Known, MemoryBounds
from vllm_kvevict.schedules.inputs import HeadDims
from vllm_kvevict.schedules.plan import Phase, Plan
from vllm_kvevict.schedules.registry import schedule_of
from vllm_kvevict.schedules.reports import Answered, Claim

STEPS_AHEAD = 3
"""Steps that may be dispatched before what the first of them evicts is reported, and one more."""


@dataclass
class PendingEviction:
    """An eviction of a prompt, or of a part of it, that was dispatched and that some rank has not reported.

    Attributes:
        phase: that is evicted.
        unreported: indices of the ranks that have not reported it.
        chunks: of its prompt, which steps must repeat before.
        waits_for_stages: whether all pipeline stages are still to decide together what it keeps.
        by_bound: whether the counts of these ranks are upper bounds until they report: it does not hold all that was
            read, or it holds copies besides.
    """

    phase: Phase
    unreported: set[int]
    chunks: list[tuple[int, int]]
    waits_for_stages: bool
    by_bound: bool
    _arbiter: Arbiter | None = None

    @property
    def is_undecided(self) -> bool:
        """Whether it is still to be decided, over all stages, what it keeps."""
        return self.waits_for_stages or bool(self.chunks)

    def next_chunk(self) -> tuple[int, int]:
        """The next chunk of its prompt, which the step that is being scheduled repeats."""
        return self.chunks.pop(0)

    def on_claims(self, claims: Sequence[Claim], rank: RankCapacity) -> Answered:
        """Answer what all ranks said of it; the last answer decides it.

        Args:
            rank: any of them, for the size of the model.
        """
        if self._arbiter is None:
            self._arbiter = schedule_of(self.phase).arbiter(self.phase, rank)
        said = self._arbiter.on_claims([claim.said for claim in claims])
        self.waits_for_stages = not self._arbiter.is_done
        return said


@dataclass(slots=True)
class Account:
    """One request in flight: what it holds, what is promised to its prefill, what it may hold at its end.

    Attributes:
        bounds: what requests hold at most.
        terms: how it is read.
        prompt_len: tokens of the prompt.
        prefill_len: tokens to read: the prompt, and the answer so far if the request was preempted.
        last_token: tokens that it will have stored when its answer is as long as it may be; the answer's last one is
            not stored.
        epoch: which of the request's admissions it is: 1 for the first.
        counts: of each rank, exact up to the next eviction; until an eviction is reported, an upper bound. What it
            borrows is counted as its own.
        replayed: what each rank kept of it in an earlier admission, and will keep again.
        held, promise: pages of each rank that it holds, and that are kept free for the rest of its prefill.
        borrowed: pages of each rank that it borrows.
        prefix: the last compressed prefix that it borrows pages of; it borrows those of its parents, too.
        tail: with which it began, behind that prefix; what it took of it is its own.
        segment: the last of the segments that it borrows pages of.
        tokens: stored once the steps dispatched so far are done.
        in_one_step: whether its first step reads all up to its eviction.
        beside: blocks that layers which are not evicted hold of it at most, while it is read and afterwards.
        is_invalid: whether the cache was reset after it was admitted: it goes on, and leaves nothing for others.
        pending: the eviction of its prompt that is not reported; None if there is none.
        promised_until: tokens up to which it is promised its pages: until it is read, and evicted if that comes later.
    """

    plan: Plan
    bounds: MemoryBounds
    terms: Terms
    prompt_len: int
    prefill_len: int
    last_token: int
    epoch: int
    counts: list[PageCount]
    replayed: Known
    held: list[int]
    promise: list[int]
    borrowed: list[int]
    prefix: Prefix | None = None
    tail: Tail | None = None
    segment: Segment | None = None
    tokens: int = 0
    in_one_step: bool = False
    beside: tuple[int, int] = (0, 0)
    is_invalid: bool = False
    pending: PendingEviction | None = None
    promised_until: int = field(init=False)
    _answer_evicted_at: int = 0

    def __post_init__(self) -> None:
        # Asked in every step. An answer's end is moved only once its prompt is evicted, when nothing is promised.
        self.promised_until = max(self.prefill_len, min(self.plan.evicted_at, self.last_token))

    # What is known.

    @property
    def is_reading(self) -> bool:
        """Whether its prefill is still to be completed."""
        return self.tokens < self.prefill_len

    @property
    def is_evicted(self) -> bool:
        """Whether its prompt is evicted for good, or never is, and its counts are exact until the next eviction."""
        return self.pending is None and self.is_evicted_on(0)

    def is_evicted_on(self, index: int) -> bool:
        """Whether that is so on a rank, by its index."""
        pending = self.pending
        is_reported = pending is None or index not in pending.unreported
        return is_reported and self.counts[index].tokens >= self.plan.evicted_at

    @property
    def must_wait(self) -> bool:
        """Whether it was evicted in a step in flight and must not go on before more is known of that: what it keeps;
        or, where it never held all that was read or has parts to read, what it holds."""
        pending = self.pending
        return pending is not None and (pending.is_undecided or not self._may_go_ahead(pending))

    def _may_go_ahead(self, pending: PendingEviction) -> bool:
        """Whether a step more takes no more pages than its bound, though its eviction is not reported."""
        if self.tokens < self.plan.evicted_at:
            return False  # what it is promised counts on what the part before has freed
        if not pending.by_bound:
            return True
        if self.terms.copies is None or self.is_reading:
            return False
        return self.tokens < self.counts[0].tokens + STEPS_AHEAD

    @property
    def is_lasting(self) -> bool:
        """Whether it uses to its end what it borrows of segments."""
        return self.plan.prompt is None

    @property
    def keeps_queries(self) -> bool:
        """As of :meth:`Plan.keeps_queries`; the step that evicts its prompt still reads them."""
        pending = self.pending
        if pending is not None and pending.phase.keeps_queries and self.tokens == pending.phase.end:
            return True
        return self.plan.keeps_queries(self.last_token, self.tokens)

    def reserved(self, dims: HeadDims) -> int:
        """What it needs of the workers' reserve until its eviction, as of :meth:`Plan.reserved`."""
        is_repeating = self.pending is not None and self.pending.chunks
        if self.tokens >= self.plan.evicted_at and not is_repeating:
            return 0
        return self.plan.reserved(dims, self.in_one_step)

    def need_at(self, tokens: int, terms: Terms | None = None) -> Need:
        """What the request takes during a step that ends at ``tokens`` tokens.

        Args:
            terms: on which it would be read, if not on its own.
        """
        terms = terms or self.terms
        held = self._pages_at(tokens, terms)
        return held, self._promised_at(tokens, held, terms)

    def _pages_at(self, tokens: int, terms: Terms) -> list[int]:
        """The most pages that the request holds on each rank during a step that ends at ``tokens`` tokens."""
        part, stored, counted = None, tokens, self.counts[0].tokens
        if counted < self.plan.evicted_at:  # some rank has not reported that phase's eviction
            part = self.plan.part_of(counted)
            if terms.by_layer and self.tokens < part.end <= tokens:
                return list(terms.peak)
            stored += self._extra_entries(part, tokens)
        own = [count.at(stored) - pages for count, pages in zip(self.counts, self.borrowed, strict=True)]
        if terms.copies is None or part is None or tokens < part.end:
            return own
        return [sum(pair) for pair in zip(own, terms.copies, strict=True)]

    def _extra_entries(self, prompt: Phase, tokens: int) -> int:
        """Entries that each row may hold beside so many tokens, until the prompt is evicted."""
        extra = prompt.extra_tokens(tokens)
        if tokens == prompt.repeated_at:
            extra += schedule_of(prompt).extra_entries(prompt, self.counts[0].page_size)
        return extra

    def _promised_at(self, tokens: int, held: Sequence[int], terms: Terms) -> list[int]:
        """Pages that it is still promised on each rank when it holds ``held`` at ``tokens`` tokens."""
        if tokens >= self.promised_until:
            return [0] * len(held)
        return [max(0, peak - pages) for peak, pages in zip(terms.peak, held, strict=True)]

    def growth(self, tokens: int, later: int) -> list[int]:
        """Pages of each rank that the request takes from ``tokens`` to ``later`` tokens of its answer."""
        return [count.at(later) - count.at(tokens) for count in self.counts]

    # What happens to it.

    def set_beside(self, beside: tuple[int, int]) -> None:
        """It is admitted, and other layers will hold so many blocks of it."""
        self.beside = beside

    def set_terms(self, terms: Terms) -> None:
        """It is read on other terms."""
        self.terms = terms

    def hold(self, need: Need) -> None:
        """It holds, and is promised, so many pages of each rank; called by :class:`Books` alone, which add them up."""
        self.held, self.promise = need

    def advance(self, tokens: int, longest: int) -> bool:
        """A step computes it up to so many tokens, and evicts it if that is due.

        If so, it holds no more than now until all ranks have reported that.

        Args:
            longest: tokens that workers have room for in a request.

        Returns:
            Whether its prompt, or a part of it, is evicted with that.
        """
        before, self.tokens = self.tokens, tokens
        phase = self.plan.phase_at(before)
        if phase is None or phase.next_eviction(before) > tokens:
            return False
        if phase.of_answer:
            for index in range(len(self.counts)):
                self._drop_of_answer(index, phase, phase.interval, tokens)
            self._answer_evicted_at = tokens
            return False
        schedule, is_copied = schedule_of(phase), self.terms.copies is not None
        self.pending = PendingEviction(
            phase,
            set(range(len(self.counts))),
            schedule.chunks(phase, longest) if tokens == phase.repeated_at else [],
            tokens == phase.end and schedule.decides_across_stages(self.bounds.num_stages),
            self.terms.by_layer or is_copied or not schedule.holds_whole_prompt,
        )
        if self.pending.by_bound:
            self.counts = self._bounds_until_reported(tokens, is_copied)
        return phase.is_of_prompt and tokens == phase.end

    def _drop_of_answer(self, index: int, answer: Phase, dropped: int, tokens: int) -> None:
        """Count what a rank holds at most once an eviction of its answer at ``tokens`` tokens is done: it goes on
        without waiting for the report of that.

        Args:
            dropped: entries of each row, on average, that go since its count was taken.
        """
        if self.bounds.steps_unreported(answer, index):
            return  # It may keep more than its share: until the report it counts as if it had dropped nothing.
        count = self.counts[index]
        if count.is_upper_bound or not schedule_of(answer).is_ragged(answer.config):
            self.counts[index] = count.after_dropping(dropped, tokens)
        else:
            entries = count.entries + count.rows * (tokens - dropped - count.tokens)
            self.counts[index] = PageCount.most(entries, tokens, count.rows, count.page_size)

    def _bounds_until_reported(self, tokens: int, is_copied: bool) -> list[PageCount]:
        """Counts that do not say where its rows end: any row may need a page for its next token.

        Copies have room for some more tokens, so that their rows count as if they had just begun a page.
        """
        residues = [0] * self.bounds.page_size
        counts = []
        for held, borrowed, count in zip(self.held, self.borrowed, self.counts, strict=True):
            residues[1 % len(residues) if is_copied else 0] = count.rows
            counts.append(PageCount.from_residues(held + borrowed, tokens, residues))
        return counts

    def on_report(self, index: int, count: PageCount, left: Prefix | None) -> Need | None:
        """A rank has evicted it and holds so much; what it needs now. Tokens may be ahead: steps in flight.

        Args:
            left: the prefix of what it keeps, if that is cached.

        Returns:
            None if its answer was evicted again meanwhile and the share that is left of it is known: what it held in
            between says nothing any more. Where the share is not known, it is an upper bound: from then on rows only
            grow or drop entries.
        """
        phase, evicted_at = self.plan.phase_of(count.tokens), self._answer_evicted_at
        answer = self.plan.answer if count.tokens < evicted_at else None
        if answer is not None and phase is answer and not self.bounds.steps_unreported(answer, index):
            return None
        if phase is not None and not phase.of_answer:
            self._promise_rest(index, count, left)
        self.counts[index] = count
        if self.pending is not None:
            self.pending.unreported.discard(index)
            if not self.pending.unreported:
                self.pending = None
        if answer is not None:
            # Steps in flight have evicted its answer since, of a replay even before its prompt's report.
            kept = answer.begins + answer.entries_at(evicted_at)
            self._drop_of_answer(index, answer, evicted_at - kept, evicted_at)
        held = list(self.held)
        held[index] = self.counts[index].at(self.tokens) - self.borrowed[index]
        return held, self._promised_at(self.tokens, held, self.terms)

    def _promise_rest(self, index: int, count: PageCount, left: Prefix | None) -> None:
        """An eviction is complete: the rest of a replay is promised by what is known now."""
        if left is not None:
            self.borrowed[index] = left.borrowed[index]
        elif self.prefix is None:
            self.borrowed[index] = 0  # of segments, which it has copied
        tokens, peak = max(self.prefill_len, self.tokens), list(self.terms.peak)
        peak[index] = self.bounds.most_held(self.plan, index, count, tokens) - self.borrowed[index]
        self.terms = replace(self.terms, peak=peak)

    def end_answer(self, last_token: int) -> None:
        """It has no more than so many tokens stored at its end."""
        self.last_token = last_token

    def invalidate(self) -> None:
        """The cache was reset."""
        self.is_invalid = True

    # What it borrows.

    def retain(self, prefix: Prefix) -> None:
        """It retains a compressed prefix, and borrows its pages."""
        self.prefix = prefix

    def own_prefix(self) -> Need:
        """What it borrows of the last prefix becomes its own; it goes on behind that one's parent. Its need then."""
        prefix = self.prefix
        assert prefix is not None
        self.prefix = prefix.parent
        before = prefix.borrowed_before
        return self._lend([others - pages for others, pages in zip(before, self.borrowed, strict=True)])

    def publish(self, segment: Segment, pages: Sequence[int]) -> Need:
        """Pages of its own, so many of each rank, become segments, of which it borrows them; what it needs then."""
        self.segment = segment
        return self._lend(pages)

    def _lend(self, pages: Sequence[int]) -> Need:
        """It borrows so many pages of each rank that were its own; below 0, they become its own. What it needs then."""
        self.borrowed = [sum(pair) for pair in zip(self.borrowed, pages, strict=True)]
        # Else what was given away would be promised anew.
        peak = [most - fewer for most, fewer in zip(self.terms.peak, pages, strict=True)]
        self.terms = replace(self.terms, peak=peak)
        return [held - fewer for held, fewer in zip(self.held, pages, strict=True)], self.promise

    def end_copying(self) -> None:
        """It was evicted on every rank: it borrows nothing of segments any more."""
        self.terms, self.segment = replace(self.terms, by_layer=False, copies=None), None
