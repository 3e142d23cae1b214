"""How many pages a request holds at most, known before it is read: what admission and start-up rely on."""

from collections.abc import Callable

from vllm_kvevict.schedules.base import RankCapacity, pages_for
from vllm_kvevict.schedules.plan import Plan


def prefill_peak(plan: Plan, tokens: int, rank: RankCapacity, page_size: int, recycles: bool) -> int:
    """The most pages that a request holds on a rank until ``tokens`` tokens are read.

    Args:
        tokens: of the prompt, and of the answer so far if the request was preempted.
        recycles: whether it is evicted layer by layer.
    """
    n, whole = plan.evict_at, rank.rows * pages_for(tokens, page_size)
    if n is None:
        return whole
    peak = plan.schedule.peak(plan.config, n, rank, page_size, recycles)
    return max(peak, pages_after(plan, tokens, rank, page_size))


def pages_after(plan: Plan, tokens: int, rank: RankCapacity, page_size: int) -> int:
    """The most pages that a request holds on a rank at ``tokens`` tokens, its eviction done, whatever the scores."""
    n, whole = plan.evict_at, rank.rows * pages_for(tokens, page_size)
    if n is None:
        return whole
    return min(whole, plan.schedule.kept_pages(plan.config, n, tokens - n, rank, page_size, rank.num_layers))


def most_tokens(plan: Plan, tokens: int, longest: int, rank: RankCapacity, page_size: int) -> int:
    """The most tokens, at least ``tokens`` and at most ``longest``, that a request can store on a rank, its eviction
    done, if nobody else holds pages there; whatever the scores."""
    return last_that(lambda count: pages_after(plan, count, rank, page_size) <= rank.pages, tokens, longest)


def last_that(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from low to high for which something holds that never does again once it does not.

    It is taken to hold for ``low``.
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
