"""How many pages a request holds at most, known before it is read: what admission and start-up rely on.

Owns nothing. No request ever holds more on a rank, whatever its policy chooses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.schedules.base import RankCapacity, pages_for, ragged_pages
from vllm_kvevict.schedules.plan import Phase, Plan
from vllm_kvevict.schedules.registry import schedule_of

Known = Mapping[int, Sequence[PageCount]]
"""What each rank holds of a request after evictions, by their positions."""


@dataclass(frozen=True)
class MemoryBounds:
    """The most pages that requests hold on each rank of a server, whatever their policies choose.

        pages  ^        ______ until_read
               |      /|
               |    /  |         ____ after_eviction, a page more in each row every page_size tokens
               |  /    |____----     |_____ until the next eviction, where there is one
               |/_________________________> tokens
                     prompt.end

    Attributes:
        ranks: what each can hold; where several would be equal, one stands for them.
        page_size: tokens of one KV head in a page.
        longest_step: the most tokens of one request in a step.
        num_stages: pipeline stages.
        is_asynchronous: whether the device runs behind the host.
        most_drafts: tokens that a draft model may store in layers of its own, behind those of a step.
    """

    ranks: Sequence[RankCapacity]
    page_size: int
    longest_step: int
    num_stages: int
    is_asynchronous: bool
    most_drafts: int = 0

    def gains_from_one_step(self, plan: Plan) -> bool:
        """Whether a request holds less if one step, which may be that long, reads all up to its eviction.

        It is then evicted layer by layer, each layer into the pages of the one before.
        """
        prompt = plan.prompt
        if prompt is None or prompt.after_step or prompt.end > self.longest_step:
            return False
        if not plan.is_read_by(prompt.end):
            return False
        return schedule_of(prompt).can_recycle(plan.config, self.num_stages, self.is_asynchronous)

    def by_layer(self, plan: Plan, first_step: int) -> bool:
        """Whether a request is evicted layer by layer if its first step has so many tokens."""
        return plan.is_read_by(first_step) and self.gains_from_one_step(plan)

    def until_read(self, plan: Plan, tokens: int, by_layer: bool) -> list[int]:
        """The most pages that a request holds on each rank until ``tokens`` tokens are read.

        Args:
            tokens: of the prompt, and of the answer so far if the request was preempted.
            by_layer: whether its first step evicts it layer by layer.
        """
        after = self.after_eviction(plan, tokens)
        if plan.prompt is None:
            return after
        return [max(pair) for pair in zip(self.until_evicted(plan.prompt, by_layer), after, strict=True)]

    def until_evicted(self, prompt: Phase, by_layer: bool) -> list[int]:
        """The most pages that a request holds on each rank until its prompt's first phase ends; arguments as above."""
        schedule = schedule_of(prompt)
        return [schedule.peak(prompt, rank, self.page_size, by_layer) for rank in self.ranks]

    def after_eviction(self, plan: Plan, tokens: int, known: Known | None = None) -> list[int]:
        """The most pages that a request holds on each rank from its prompt's first eviction until ``tokens`` tokens.

        Args:
            known: what it holds after evictions, where that is no guess.
        """
        start = 0 if plan.prompt is None else plan.prompt.end
        return [self._most_after(plan, index, start, tokens, known or {}) for index in range(len(self.ranks))]

    def most_held(self, plan: Plan, index: int, count: PageCount, tokens: int) -> int:
        """The most pages that a rank holds of a request from ``count`` on until it has so many tokens."""
        end = plan.grows_until(count.tokens, tokens)
        pages = count.at(end + self._extra_entries(plan, count.tokens, end))
        if end == tokens:
            return pages
        return max(pages, self._most_after(plan, index, end, tokens, {}, count))

    def _most_after(
        self,
        plan: Plan,
        index: int,
        start: int,
        tokens: int,
        known: Known,
        before: PageCount | None = None,
    ) -> int:
        """The same from the eviction at ``start`` on, or from a prompt's first token.

        Args:
            before: what it held earlier, at least its prompt's first eviction done.
        """
        if before is not None and plan.prompt is not None and before.tokens < plan.prompt.end:
            before = None
        left = _Left.of(plan, self.ranks[index], start, before)
        pages, position = 0, start
        while True:
            phase = plan.phase_of(position)
            if phase is not None:
                left = left.after(phase)
            if phase is not None and phase.of_answer:
                # Its later evictions leave it as many entries again.
                more = min(tokens - position, phase.interval + self.steps_unreported(phase, index))
                return max(pages, self._most_left(left, phase.begins - plan.evicted_at + more))
            if position in known:
                left = left.known(known[position][index])
            end = plan.grows_until(position, tokens)
            stored = end + self._extra_entries(plan, position, end)
            pages = max(pages, self._most_left(left, stored - left.evicted_at, stored))
            if end == tokens:
                return pages
            position = end

    def steps_unreported(self, answer: Phase, index: int) -> int:
        """Steps that may be dispatched after one that evicts an answer, until the ledger knows what a rank has dropped.

        That is known at once unless a rank may keep more than its share. Steps in flight are one for each stage, and
        one more if they are scheduled ahead.
        """
        is_ragged = schedule_of(answer).is_ragged(answer.config)
        return self.num_stages if is_ragged and self.ranks[index].has_some_heads else 0

    def _extra_entries(self, plan: Plan, before: int, tokens: int) -> int:
        """Entries that each row may hold beside so many tokens, if a part of the prompt ends with these.

        Args:
            before: tokens before them that it held earlier.
        """
        phase = plan.phase_of(tokens)
        if phase is None or not phase.is_of_prompt or tokens == before:
            return 0
        return schedule_of(phase).extra_entries(phase, self.page_size)

    def _most_left(self, left: "_Left", more: int, tokens: int | None = None) -> int:
        """The most pages of a rank that holds what evictions have left and so many entries more of each row.

        Args:
            tokens: of the request, if no row holds more.
        """
        rank, others = left.rank, left.others
        if left.last is not None:
            schedule = schedule_of(left.last)
            most = schedule.kept_pages(
                left.last, others.each + more, rank, self.page_size, rank.num_layers, others.shared
            )
        else:
            always = others.each + more
            in_layer = ragged_pages(
                others.shared, rank.num_kv_heads, always, always + others.shared, self.page_size
            )
            most = rank.num_layers * in_layer
        if tokens is not None:
            most = min(most, rank.rows * pages_for(tokens, self.page_size))
        if left.before is None:
            return most
        # What rows held does not say where they end once others win, so it may be the looser bound.
        return min(most, left.grown(more))

    def have_room_for(self, pages: Sequence[int]) -> bool:
        """Whether the ranks, if empty, can hold so many pages each."""
        return all(most <= rank.pages for most, rank in zip(pages, self.ranks, strict=True))

    def fits(self, plan: Plan, tokens: int, in_one_step: bool = True) -> bool:
        """Whether the ranks, if empty, can hold a request until ``tokens`` tokens are read.

        Args:
            in_one_step: whether one step may read all up to its eviction, if steps can be that long.
        """
        by_layer = in_one_step and self.gains_from_one_step(plan)
        return self.have_room_for(self.until_read(plan, tokens, by_layer))

    def longest_prompt(self, plan_for: Callable[[int], Plan], most: int, in_one_step: bool = True) -> int:
        """The longest prompt, at most ``most`` tokens, that fits; longer ones need more.

        Args:
            plan_for: the plan of a prompt of so many tokens.
            in_one_step: as in :meth:`fits`.
        """
        return last_that(lambda length: self.fits(plan_for(length), length, in_one_step), 0, most)

    def most_tokens(self, plan: Plan, tokens: int, most: int) -> int:
        """The most tokens, from ``tokens`` to ``most``, that a request can have stored, its eviction done, alone."""
        return last_that(lambda count: self.have_room_for(self.after_eviction(plan, count)), tokens, most)

    def most_tokens_from(self, plan: Plan, counts: Sequence[PageCount], most: int) -> int:
        """The same, ``most`` at most, of a request that is evicted.

        Args:
            counts: what each rank holds of it now.
        """

        def fits(tokens: int) -> bool:
            held = [self.most_held(plan, index, count, tokens) for index, count in enumerate(counts)]
            return self.have_room_for(held)

        now = counts[0].tokens
        return most if most <= now or fits(most) else last_that(fits, now, most)


class EntryBound(NamedTuple):
    """Entries of a rank's rows: those of each, and those that the rows of a layer share in any way."""

    each: int = 0
    shared: int = 0

    def and_of(self, phase: Phase, rank: RankCapacity) -> "EntryBound":
        """With those that a phase has left."""
        each, shared = schedule_of(phase).kept_entries(phase, rank)
        return EntryBound(self.each + each, self.shared + shared)


NOTHING = EntryBound()


@dataclass(frozen=True)
class _Left:
    """What evictions have left of a request on a rank.

    Attributes:
        last: the phase of the prompt that was evicted last.
        others: what other phases have left at most.
        before: what the rank held at some earlier time, if that is no guess.
        since: what phases have left at most that were evicted after that.
        own_before: entries of each row, at that time, that no eviction had chosen among, or that an answer's had left.
    """

    rank: RankCapacity
    last: Phase | None
    others: EntryBound
    before: PageCount | None = None
    since: EntryBound = NOTHING
    own_before: int = 0

    @classmethod
    def of(cls, plan: Plan, rank: RankCapacity, start: int, before: PageCount | None) -> "_Left":
        """What is left by the evictions before ``start`` tokens."""
        done = [part for part in plan.parts if part.end < start]
        others = NOTHING
        for part in done[:-1]:
            others = others.and_of(part, rank)
        own = 0 if before is None else plan.unevicted_at(before.tokens)
        return cls(rank, done[-1] if done else None, others, before, own_before=own)

    @property
    def evicted_at(self) -> int:
        """Tokens after which the prompt was evicted last."""
        return 0 if self.last is None else self.last.end

    def after(self, phase: Phase) -> "_Left":
        """The same once one more phase has evicted."""
        since = self.since.and_of(phase, self.rank)
        if phase.of_answer:
            return replace(self, others=self.others.and_of(phase, self.rank), since=since)
        pinned = self.last is not None and phase.pins
        others = self.others.and_of(self.last, self.rank) if self.last and pinned else NOTHING
        return replace(self, last=phase, others=others, since=since)

    def known(self, count: PageCount) -> "_Left":
        """The same if it is known what the rank holds after the last of the evictions."""
        return replace(self, before=count, since=NOTHING, own_before=count.tokens - self.evicted_at)

    def grown(self, more: int) -> int:
        """The most pages by what was known before, with so many entries more of each row."""
        count = self.before
        assert count is not None
        more += self.since.each - self.own_before
        if not self.since.shared:
            return count.at(count.tokens + max(0, more))
        entries = count.entries + count.rows * more + self.rank.num_layers * self.since.shared
        return PageCount.most(entries, count.tokens, count.rows, count.page_size).pages


def last_that(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from low to high for which something holds that never does again once it does not.

    It is taken to hold for ``low``.
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
