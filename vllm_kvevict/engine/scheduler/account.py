"""One admission of one request: what it holds on each rank, and what is promised to its prefill.

An account owns what is known of its admission. What it says it holds is never less than what the workers hold, and
exact from an eviction's last report to the next eviction. Nobody else writes to it: what happens to a request is a
method here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.scheduler.nodes import Prefix, Segment, Tail
from vllm_kvevict.engine.scheduler.terms import Need, Terms
from vllm_kvevict.schedules.base import Arbiter, RankCapacity
from vllm_kvevict.schedules.bounds import Known
from vllm_kvevict.schedules.inputs import HeadDims
from vllm_kvevict.schedules.plan import Phase, Plan
from vllm_kvevict.schedules.registry import schedule_of
from vllm_kvevict.schedules.reports import ArbiterAnswer, Claim

STEPS_AHEAD = 3
"""Steps that may be dispatched before what the first of them evicts is reported, and one more."""


@dataclass
class Account:
    """One request in flight: what it holds, what is promised to its prefill, what it may hold at its end.

    Attributes:
        terms: how it is read.
        prompt_len: tokens of the prompt.
        prefill_len: tokens to read: the prompt, and the answer so far if the request was preempted.
        max_tokens: of the answer.
        preemptions: how often it was preempted.
        counts: of each rank, exact up to the next eviction; until an eviction is reported, a bound. What it borrows is
            counted as its own.
        replayed: what each rank kept of it in an earlier admission, and will keep again.
        tokens: stored once the steps dispatched so far are done.
        held, promise: pages of each rank that it holds, and that are kept free for the rest of its prefill.
        borrowed: pages of each rank that it borrows.
        prefix: the last compressed prefix that it borrows pages of; it borrows those of its parents, too.
        tail: with which it began, behind that prefix; what it took of it is its own.
        segment: the last of the segments that it borrows pages of.
        in_one_step: whether its first step reads all up to its eviction.
        num_stages: pipeline stages, which decide together what some policies keep.
        reserved_at: where its place in the reserve begins; None if it needs none.
        beside: blocks that layers which are not evicted hold of it at most, while it is read and afterwards.
        is_invalid: whether the cache was reset after it was admitted: it goes on, and leaves nothing for others.
        is_undecided: whether it is still to be decided, over all stages, what it keeps.
        promised_until: tokens up to which it is promised its pages: until it is read, and evicted if that comes later.
    """

    plan: Plan
    terms: Terms
    prompt_len: int
    prefill_len: int
    max_tokens: int
    preemptions: int
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
    num_stages: int = 1
    reserved_at: int | None = None
    beside: tuple[int, int] = (0, 0)
    is_invalid: bool = False
    is_undecided: bool = False
    _unreported: set[int] = field(default_factory=set)
    _to_repeat: list[tuple[int, int]] = field(default_factory=list)
    _evicting: Phase | None = None
    """The phase of the eviction that was dispatched last."""
    _arbiter: Arbiter | None = None
    _waits_for_stages: bool = False
    _answer_evicted_at: int = 0
    _estimated: set[int] = field(default_factory=set)
    """Ranks whose counts are a bound since its answer was evicted last."""
    _crowded: set[int] = field(default_factory=set)
    """Ranks that may hold more of its answer than their share: their counts are what they reported last, and only a
    report lowers them."""

    promised_until: int = field(init=False)

    def __post_init__(self) -> None:
        # Asked in every step. An answer's end is moved only once its prompt is evicted, when nothing is promised.
        self.promised_until = max(self.prefill_len, min(self.plan.evicted_at, self.last_token))

    # What is known.

    @property
    def epoch(self) -> int:
        """Which of the request's admissions it is: 1 for the first."""
        return self.preemptions + 1

    @property
    def last_token(self) -> int:
        """Tokens it will have stored when its answer is as long as it may be; the answer's last one is not stored."""
        return self.prompt_len + self.max_tokens - 1

    @property
    def waits_for_repeats(self) -> bool:
        """Whether its prompt is read, and steps must repeat it before it is evicted."""
        return bool(self._to_repeat)

    @property
    def is_reading(self) -> bool:
        """Whether its prefill is still to be completed."""
        return self.tokens < self.prefill_len

    @property
    def awaits_reports(self) -> bool:
        """Whether ranks have not reported a dispatched eviction yet."""
        return bool(self._unreported)

    def awaits_report_of(self, index: int) -> bool:
        """Whether a rank has not, by its index."""
        return index in self._unreported

    @property
    def is_evicted(self) -> bool:
        """Whether its prompt is evicted for good, or never is, and its counts are exact until the next eviction."""
        return not self._unreported and self.is_evicted_on(0)

    def is_evicted_on(self, index: int) -> bool:
        """Whether that is so on a rank, by its index."""
        if self.plan.prompt is None:
            return True
        return self.counts[index].tokens >= self.plan.evicted_at and index not in self._unreported

    @property
    def is_bounded(self) -> bool:
        """Whether it is not known how much it holds once it is evicted, until that is reported: it does not hold all
        that was read, or it holds copies besides."""
        if self.terms.by_layer or self.terms.copies is not None:
            return True
        return self._evicting is not None and not schedule_of(self._evicting).holds_whole_prompt

    @property
    def must_wait(self) -> bool:
        """Whether it was evicted in a step in flight and must not go on before more is known of that: what it keeps;
        or, where it never held all that was read or has parts to read, what it holds."""
        return self.is_undecided or (self.awaits_reports and not self._may_go_ahead)

    @property
    def _may_go_ahead(self) -> bool:
        """Whether a step more takes no more pages than its bound, though its eviction is not reported."""
        if self.tokens < self.plan.evicted_at:
            return False  # what it is promised counts on what the part before has freed
        if not self.is_bounded:
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
        """As of :meth:`Plan.keeps_queries`."""
        return self.plan.keeps_queries(self.last_token)

    def reserved(self, dims: HeadDims) -> int:
        """What it needs of the workers' reserve until its eviction, as of :meth:`Plan.reserved`."""
        if self.tokens >= self.plan.evicted_at and not self._to_repeat:
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

    def need_with(self, held: list[int]) -> Need:
        """The same at its present tokens, if it holds so many pages of each rank."""
        return held, self._promised_at(self.tokens, held, self.terms)

    def _pages_at(self, tokens: int, terms: Terms) -> list[int]:
        """The most pages that the request holds on each rank during a step that ends at ``tokens`` tokens."""
        part, stored = self._unreported_part, tokens
        if part is not None:
            if terms.by_layer and self.tokens < part.end <= tokens:
                return list(terms.peak)
            stored += self._extra_entries(part, tokens)
        own = [count.at(stored) - pages for count, pages in zip(self.counts, self.borrowed, strict=True)]
        if terms.copies is None or part is None or tokens < part.end:
            return own
        return [sum(pair) for pair in zip(own, terms.copies, strict=True)]

    @property
    def _unreported_part(self) -> Phase | None:
        """The first phase of its prompt whose eviction some rank has not reported; None if there is none."""
        counted = self.counts[0].tokens
        return self.plan.part_of(counted) if counted < self.plan.evicted_at else None

    def _extra_entries(self, prompt: Phase, tokens: int) -> int:
        """Entries that each row may hold beside so many tokens, until the prompt is evicted."""
        if tokens != prompt.end:
            return prompt.extra_tokens(tokens)
        return schedule_of(prompt).extra_entries(prompt, self.counts[0].page_size)

    def _promised_at(self, tokens: int, held: Sequence[int], terms: Terms) -> list[int]:
        """Pages that it is still promised on each rank when it holds ``held`` at ``tokens`` tokens."""
        if tokens >= self.promised_until:
            return [0] * len(held)
        return [max(0, peak - pages) for peak, pages in zip(terms.peak, held, strict=True)]

    def growth(self, tokens: int, later: int) -> list[int]:
        """Pages of each rank that the request takes from ``tokens`` to ``later`` tokens of its answer."""
        return [count.at(later) - count.at(tokens) for count in self.counts]

    # What happens to it.

    def set_seat(self, reserved_at: int | None, beside: tuple[int, int]) -> None:
        """It may begin, with a place in the reserve and blocks of other layers; see the attributes."""
        self.reserved_at, self.beside = reserved_at, beside

    def set_terms(self, terms: Terms) -> None:
        """It is read on other terms."""
        self.terms = terms

    def hold(self, need: Need) -> None:
        """It holds, and is promised, so many pages of each rank; called by :class:`Books` alone, which add them up."""
        self.held, self.promise = need

    def advance(self, tokens: int, longest: int, ranks: Sequence[RankCapacity]) -> bool:
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
            self._evict_answer(phase, tokens, ranks)
            return False
        self._evicting, self._arbiter = phase, None
        self._waits_for_stages = schedule_of(phase).decides_across_stages(self.num_stages)
        self._unreported = set(range(len(ranks)))
        self._to_repeat = schedule_of(phase).chunks(phase, longest) if tokens == phase.end else []
        self.is_undecided = bool(self._to_repeat) or self._waits_for_stages
        if self.is_bounded:
            self.counts = self._bounds_until_reported(tokens, ranks)
        return phase.is_of_prompt and tokens == phase.end

    def _evict_answer(self, answer: Phase, tokens: int, ranks: Sequence[RankCapacity]) -> None:
        """Count what it holds at most once the step is done; it goes on without waiting for the report of that."""
        is_ragged = schedule_of(answer).is_ragged(answer.config)
        for index, rank in enumerate(ranks):
            if is_ragged and rank.has_some_heads:
                self._crowded.add(index)
            self._drop_of_answer(index, answer, answer.interval, tokens)
        self._answer_evicted_at = tokens

    def _drop_of_answer(self, index: int, answer: Phase, dropped: int, tokens: int) -> None:
        """Count what a rank holds at most once an eviction of its answer at ``tokens`` tokens is done.

        Args:
            dropped: entries of each row, on average, that go since its count was taken.
        """
        if index in self._crowded:
            return  # Until the report it counts as if it had dropped nothing.
        count, is_bound = self.counts[index], index in self._estimated
        is_ragged = schedule_of(answer).is_ragged(answer.config)
        if is_ragged:
            self._estimated.add(index)
        if is_ragged and not is_bound:
            entries = count.entries + count.rows * (tokens - dropped - count.tokens)
            self.counts[index] = PageCount.most(entries, tokens, count.rows, count.page_size)
        else:
            self.counts[index] = count.after_dropping(dropped, tokens)

    def _bounds_until_reported(self, tokens: int, ranks: Sequence[RankCapacity]) -> list[PageCount]:
        """Counts that do not say where its rows end: any row may need a page for its next token.

        Copies have room for some more tokens, so that their rows count as if they had just begun a page.
        """
        residues = [0] * self.counts[0].page_size
        counts = []
        for held, borrowed, rank in zip(self.held, self.borrowed, ranks, strict=True):
            residues[0 if self.terms.copies is None else 1 % len(residues)] = rank.rows
            counts.append(PageCount.from_residues(held + borrowed, tokens, residues))
        return counts

    def next_chunk(self) -> tuple[int, int]:
        """The next chunk of its prompt, which the step that is being scheduled repeats."""
        chunk = self._to_repeat.pop(0)
        self.is_undecided = bool(self._to_repeat) or self._waits_for_stages
        return chunk

    def on_claims(self, claims: Sequence[Claim], rank: RankCapacity) -> ArbiterAnswer:
        """Answer what all ranks said of its eviction; the last answer decides it.

        Args:
            rank: any of them, for the size of the model.
        """
        if self._arbiter is None:
            assert self._evicting is not None
            self._arbiter = schedule_of(self._evicting).arbiter(self._evicting, rank)
        answer = ArbiterAnswer(self.epoch, self._arbiter.on_claims([claim.said for claim in claims]))
        self.is_undecided = not self._arbiter.is_done
        return answer

    def on_report(self, index: int, count: PageCount) -> Need:
        """A rank has evicted it and holds so much; what it needs now. Tokens may be ahead: steps in flight."""
        self.counts[index] = count
        self._unreported.discard(index)
        answer, evicted_at = self.plan.answer, self._answer_evicted_at
        if answer is not None and count.tokens < evicted_at:
            # Of its prompt, when steps in flight of a replay have evicted its answer as well.
            self._estimated.discard(index)
            left = answer.begins + answer.entries_at(evicted_at)
            self._drop_of_answer(index, answer, evicted_at - left, evicted_at)
        now = self.counts[index].at(self.tokens) - self.borrowed[index]
        return self.need_with([*self.held[:index], now, *self.held[index + 1 :]])

    def on_answer_report(self, index: int, count: PageCount) -> Need | None:
        """A rank has evicted its answer and holds so much; what it needs now.

        None if it was evicted again meanwhile and the share that is left of it is known: what it held in between says
        nothing any more. Where the share is not known, it is a bound: from then on rows only grow or drop entries.
        """
        if count.tokens < self._answer_evicted_at and index not in self._crowded:
            return None
        self._estimated.discard(index)
        return self.on_report(index, count)

    def on_complete_report(self, index: int, count: PageCount, most: int, left: Prefix | None) -> Need:
        """As :meth:`on_report`, of a complete eviction: the rest of a replay is promised by what is known now.

        Args:
            most: pages that it holds there until it is read.
            left: the prefix of what it keeps, if that is cached.
        """
        if left is not None:
            self.borrowed[index] = left.borrowed[index]
        elif self.prefix is None:
            self.borrowed[index] = 0  # of segments, which it has copied
        peak = list(self.terms.peak)
        peak[index] = most - self.borrowed[index]
        self.terms = replace(self.terms, peak=peak)
        return self.on_report(index, count)

    def end_answer(self, max_tokens: int) -> None:
        """Its answer has no more tokens than so many."""
        self.max_tokens = max_tokens

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
        before = prefix.borrowed_before
        own = [pages - others for pages, others in zip(self.borrowed, before, strict=True)]
        peak = [sum(pair) for pair in zip(self.terms.peak, own, strict=True)]
        self.terms, self.borrowed, self.prefix = replace(self.terms, peak=peak), before, prefix.parent
        return [sum(pair) for pair in zip(self.held, own, strict=True)], self.promise

    def follow(self, segment: Segment | None) -> None:
        """The last segment that it borrows of is another."""
        self.segment = segment

    def publish(self, segment: Segment, pages: Sequence[int]) -> Need:
        """Pages of its own, so many of each rank, become segments, of which it borrows them; what it needs then."""
        self.segment = segment
        self.borrowed = [sum(pair) for pair in zip(self.borrowed, pages, strict=True)]
        # Else what was given away would be promised anew.
        peak = [most - fewer for most, fewer in zip(self.terms.peak, pages, strict=True)]
        self.terms = replace(self.terms, peak=peak)
        return [held - fewer for held, fewer in zip(self.held, pages, strict=True)], self.promise

    def end_copying(self) -> None:
        """It was evicted on every rank: it borrows nothing of segments any more."""
        self.terms, self.segment = replace(self.terms, by_layer=False, copies=None), None
