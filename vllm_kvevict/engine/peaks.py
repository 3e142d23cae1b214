"""How many pages a request holds at most, known before it is read: what admission and start-up rely on."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm.utils.math_utils import cdiv

from vllm_kvevict.engine.config import Plan
from vllm_kvevict.engine.devices import this_device
from vllm_kvevict.policies import EvictionConfig, most_candidates, take


@dataclass(frozen=True)
class RankCapacity:
    """What one rank can hold, and its share of the model.

    Attributes:
        pages: of its pool.
        first_layer, num_layers: its layers; of the model's num_model_layers.
        num_kv_heads: its KV heads; of the model's num_model_kv_heads.
    """

    pages: int
    first_layer: int
    num_layers: int
    num_kv_heads: int
    num_model_layers: int
    num_model_kv_heads: int

    @property
    def rows(self) -> int:
        """Rows (layers x KV heads) that each request has there."""
        return self.num_layers * self.num_kv_heads


def can_recycle(plan: Plan, num_stages: int) -> bool:
    """Whether the request can be evicted layer by layer (see :class:`Plan`)."""
    config, device = plan.config, this_device()
    assert device is not None
    # With alpha, rounded head budgets may grow by a token as a layer's budget shrinks.
    cascades = config.weighted and num_stages == 1 and not config.params.get("alpha")
    cascades = cascades and not device.is_asynchronous
    return plan.evict_at is not None and (device.compacts_early(config) or cascades)


def prefill_peak(plan: Plan, tokens: int, room: RankCapacity, page_size: int, recycles: bool) -> int:
    """The most pages that a request holds on a rank until ``tokens`` tokens are read.

    Args:
        tokens: of the prompt, and of the answer so far if the request was preempted.
        recycles: whether it is evicted layer by layer.
    """
    n, whole = plan.evict_at, room.rows * cdiv(tokens, page_size)
    if n is None:
        return whole
    if plan.config.chunked:
        peak = _chunked_peak(plan, n, room, page_size)
    elif recycles:
        peak = _recycled_peak(plan, n, room, page_size)
    else:
        peak = room.rows * cdiv(n, page_size)
    return max(peak, pages_after(plan, tokens, room, page_size))


def pages_after(plan: Plan, tokens: int, room: RankCapacity, page_size: int) -> int:
    """The most pages that a request holds on a rank at ``tokens`` tokens, its eviction done, whatever the scores."""
    n, whole = plan.evict_at, room.rows * cdiv(tokens, page_size)
    if n is None:
        return whole
    return min(whole, _kept_pages(plan.config, n, tokens - n, room, page_size, room.num_layers))


def most_tokens(plan: Plan, tokens: int, longest: int, room: RankCapacity, page_size: int) -> int:
    """The most tokens, at least ``tokens`` and at most ``longest``, that a request can store on a rank, its eviction
    done, if nobody else holds pages there; whatever the scores."""
    return last_that(lambda count: pages_after(plan, count, room, page_size) <= room.pages, tokens, longest)


def last_that(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from low to high for which something holds that never does again once it does not.

    It is taken to hold for ``low``.
    """
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _chunked_peak(plan: Plan, n: int, room: RankCapacity, page_size: int) -> int:
    """At the end of a chunk every layer holds what it kept so far, the chunk, and the probe."""
    config, peak = plan.config, 0
    layers = range(room.first_layer, room.first_layer + room.num_layers)
    kept = dict.fromkeys(layers, 0)
    for start, stop in take.prompt_chunks(config, n):
        last = stop == n
        new = stop - start + (0 if last else plan.probe)
        pages = sum(cdiv(stored + new, page_size) for stored in kept.values())
        peak = max(peak, room.num_kv_heads * pages)
        for layer in layers:
            budget = take.chunk_budget(config, n, layer, room.num_model_layers, last)
            kept[layer] = min(kept[layer] + stop - start, budget)
    return peak


def _recycled_peak(plan: Plan, n: int, room: RankCapacity, page_size: int) -> int:
    """One layer is whole while those below it hold what they keep."""
    layer, below = room.num_kv_heads * cdiv(n, page_size), room.num_layers - 1
    return min(room.rows * cdiv(n, page_size), layer + _kept_pages(plan.config, n, 0, room, page_size, below))


def _kept_pages(
    config: EvictionConfig, n: int, more: int, room: RankCapacity, page_size: int, num_layers: int
) -> int:
    """The most pages that the rank's lowest ``num_layers`` layers hold ``more`` tokens after the eviction at n.

    Where layers share a budget and only some are asked for, the others may not have been scored yet: then each
    layer's share is rounded up.
    """
    heads, window = room.num_kv_heads, config.window_for(n)
    b, m = config.budget_for(n) - window, n - window
    longest = cdiv(n + more, page_size)

    def pages(candidates: int, rows: int) -> int:
        """Of rows that share candidates, besides what each keeps anyway, and end anywhere in a page."""
        entries = candidates + rows * (window + more)
        return min((entries + rows * (page_size - 1)) // page_size, rows * longest)

    def layer_candidates(budget: int) -> int:
        return most_candidates(config, budget, m, heads, room.num_model_kv_heads)

    if not num_layers:
        return 0
    if config.one_stage:
        shared = room.num_model_layers * room.num_model_kv_heads * b
        return pages(min(shared, num_layers * heads * m), num_layers * heads)
    if config.weighted:
        # The others may be left with nothing, and what competing heads win grows less than a layer's budget does: so
        # the worst is to share evenly.
        rounding = num_layers if num_layers < room.num_layers else 0
        budget = min(m, cdiv(room.num_model_layers * b + rounding, num_layers))
        if config.heads_compete:
            return pages(num_layers * layer_candidates(budget), num_layers * heads)
        return heads * pages(num_layers * budget, num_layers)
    budgets = _layer_budgets(config, n, room)[:num_layers]
    if config.heads_compete:
        return sum(pages(layer_candidates(budget - window), heads) for budget in budgets)
    return sum(heads * cdiv(budget + more, page_size) for budget in budgets)


def _layer_budgets(config: EvictionConfig, n: int, room: RankCapacity) -> list[int]:
    """Tokens per KV head that each of the rank's layers keeps of n, where no scores decide that."""
    if config.chunked:
        every = [
            take.chunk_budget(config, n, layer, room.num_model_layers, True)
            for layer in range(room.num_model_layers)
        ]
    else:
        every = config.layer_budgets(n, room.num_model_layers)
    return every[room.first_layer :][: room.num_layers]
