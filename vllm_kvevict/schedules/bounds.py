"""How many pages a request holds at most, known before it is read: what admission and start-up rely on.

Owns nothing. No request ever holds more on a rank, whatever its policy chooses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
    """

    ranks: Sequence[RankCapacity]
    page_size: int
    longest_step: int
    num_stages: int
    is_asynchronous: bool

    def gains_from_one_step(self, plan: Plan) -> bool:
        """Whether a request holds less if one step, which may be that long, reads all up to its eviction.

        It is then evicted layer by layer, each layer into the pages of the one before.
        """
        if plan.prompt is None or plan.prompt.end > self.longest_step:
            return False
        return schedule_of(plan.prompt).can_recycle(plan.config, self.num_stages, self.is_asynchronous)

    def by_layer(self, plan: Plan, first_step: int) -> bool:
        """Whether a request is evicted layer by layer if its first step has so many tokens."""
        return plan.prompt is not None and first_step == plan.prompt.end and self.gains_from_one_step(plan)

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
        """The most pages that a request holds on each rank until its prompt is evicted; arguments as above."""
        schedule = schedule_of(prompt)
        return [schedule.peak(prompt, rank, self.page_size, by_layer) for rank in self.ranks]

    def after_eviction(self, plan: Plan, tokens: int, known: Known | None = None) -> list[int]:
        """The most pages that a request holds on each rank from its prompt's eviction until it has so many tokens.

        Args:
            known: what it holds after evictions, where that is no guess.
        """
        start = 0 if plan.prompt is None else plan.prompt.end
        return [self._most_after(plan, index, start, tokens, known or {}) for index in range(len(self.ranks))]

    def most_held(self, plan: Plan, index: int, count: PageCount, tokens: int) -> int:
        """The most pages that a rank holds of a request from ``count`` on until it has so many tokens."""
        end = plan.grows_until(count.tokens, tokens)
        pages = count.at(end)
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
            before: what it held earlier, at least its prompt's eviction done.
        """
        pages, position = 0, start
        while True:
            phase = plan.phase_of(position)
            if phase is not None and phase.pins:
                # Its later evictions leave it as many entries again.
                return max(pages, self._most_of_answer(plan, index, phase, tokens - position, before))
            end, counts = plan.grows_until(position, tokens), known.get(position)
            before = before if counts is None else counts[index]
            held = self._kept(plan, index, position, end) if counts is None else _grown(counts[index], end)
            pages = max(pages, held)
            if end == tokens:
                return pages
            position = end

    def _most_of_answer(
        self, plan: Plan, index: int, answer: Phase, more: int, before: PageCount | None
    ) -> int:
        """The most pages that a rank holds from an eviction of an answer until ``more`` tokens later.

        Args:
            before: what it held earlier, its prompt's eviction done; None if that is not known.
        """
        rank, more, stop = self.ranks[index], min(more, answer.interval), answer.begins
        each, shared = schedule_of(answer).kept_of_answer(answer, rank)
        if plan.prompt is not None:
            schedule, tokens = schedule_of(plan.prompt), stop - plan.prompt.end + each + more
            most = schedule.kept_pages(plan.prompt, tokens, rank, self.page_size, rank.num_layers, shared)
        else:
            always = stop + each + more
            pages = ragged_pages(shared, rank.num_kv_heads, always, always + shared, self.page_size)
            most = rank.num_layers * pages
        if before is None or (plan.prompt is not None and before.tokens < plan.prompt.end):
            return most
        # What rows held does not say where they end once others win, so it may be the looser bound.
        return min(most, self._grown_to(answer, before, rank, each + more, shared))

    def _grown_to(self, answer: Phase, count: PageCount, rank: RankCapacity, each: int, shared: int) -> int:
        """The most pages of a rank whose rows hold other entries of an answer than when they were counted.

        Args:
            each, shared: entries of the answer that each row holds then, and that the rows of a layer share.
        """
        more = each - answer.entries_at(count.tokens)
        if not shared:
            return count.at(count.tokens + max(0, more))
        entries = count.entries + rank.rows * more + rank.num_layers * shared
        return PageCount.most(entries, count.tokens, rank.rows, self.page_size).pages

    def _kept(self, plan: Plan, index: int, position: int, tokens: int) -> int:
        """The most pages at so many tokens, if it is evicted at a position and not since."""
        rank, phase = self.ranks[index], plan.phase_of(position)
        unevicted = rank.rows * pages_for(tokens, self.page_size)
        if phase is None:
            return unevicted
        more = tokens - position
        kept = schedule_of(phase).kept_pages(phase, more, rank, self.page_size, rank.num_layers)
        return min(unevicted, kept)

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


def _grown(count: PageCount, tokens: int) -> int:
    return count.at(max(tokens, count.tokens))


def last_that(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from low to high for which something holds that never does again once it does not.

    It is taken to hold for ``low``.
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
