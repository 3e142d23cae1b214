"""How many pages a request holds at most, known before it is read: what admission and start-up rely on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_kvevict.schedules.base import RankCapacity, pages_for
from vllm_kvevict.schedules.plan import Plan


@dataclass(frozen=True)
class MemoryBounds:
    """The most pages that requests hold on each rank of a server, whatever their policies choose.

        pages  ^        ______ until_read
               |      /|
               |    /  |         ____ after_eviction, a page more in each row every page_size tokens
               |  /    |____----
               |/_________________________> tokens
                     evict_at

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
        if plan.evict_at is None or plan.evict_at > self.longest_step:
            return False
        return plan.schedule.can_recycle(plan.config, self.num_stages, self.is_asynchronous)

    def by_layer(self, plan: Plan, first_step: int) -> bool:
        """Whether a request is evicted layer by layer if its first step has so many tokens."""
        return first_step == plan.evict_at and self.gains_from_one_step(plan)

    def until_read(self, plan: Plan, tokens: int, by_layer: bool) -> list[int]:
        """The most pages that a request holds on each rank until ``tokens`` tokens are read.

        Args:
            tokens: of the prompt, and of the answer so far if the request was preempted.
            by_layer: whether its first step evicts it layer by layer.
        """
        after = self.after_eviction(plan, tokens)
        n = plan.evict_at
        if n is None:
            return after
        peaks = [plan.schedule.peak(plan.config, n, rank, self.page_size, by_layer) for rank in self.ranks]
        return [max(pair) for pair in zip(peaks, after, strict=True)]

    def after_eviction(self, plan: Plan, tokens: int) -> list[int]:
        """The most pages that a request holds on each rank at ``tokens`` tokens, its eviction done."""
        return [self._after_eviction(plan, tokens, rank) for rank in self.ranks]

    def _after_eviction(self, plan: Plan, tokens: int, rank: RankCapacity) -> int:
        n, unevicted = plan.evict_at, rank.rows * pages_for(tokens, self.page_size)
        if n is None:
            return unevicted
        kept = plan.schedule.kept_pages(plan.config, n, tokens - n, rank, self.page_size, rank.num_layers)
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


def last_that(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from low to high for which something holds that never does again once it does not.

    It is taken to hold for ``low``.
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
