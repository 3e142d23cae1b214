"""How many pages a request holds at most, known before it is read: what admission and start-up rely on."""

from dataclasses import dataclass

from vllm.utils.math_utils import cdiv

from vllm_kvevict.engine.config import Plan
from vllm_kvevict.engine.devices import this_device
from vllm_kvevict.policies import EvictionConfig, take


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
    """Pages that a request holds on a rank at ``tokens`` tokens, its eviction done; at most, if ranks keep alike."""
    n, whole = plan.evict_at, room.rows * cdiv(tokens, page_size)
    if n is None:
        return whole
    # However ragged, no row holds more than one page beyond the mean.
    return min(whole, room.rows * (cdiv(plan.config.budget_for(n) + tokens - n, page_size) + 1))


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
    config, heads = plan.config, room.num_kv_heads
    layer = heads * cdiv(n, page_size)
    if config.weighted:
        # The layers below share what all layers will keep, each rounded up, in rows that end anywhere in a page.
        entries = room.num_model_kv_heads * room.num_model_layers * (config.budget_for(n) + 1)
        below = entries // page_size + room.rows
    else:
        budgets = config.layer_budgets(n, room.num_model_layers)[room.first_layer :][: room.num_layers]
        below = sum(min(layer, _ragged_pages(config, budget, room, page_size)) for budget in budgets[:-1])
    return min(room.rows * cdiv(n, page_size), layer + below)


def _ragged_pages(config: EvictionConfig, budget: int, room: RankCapacity, page_size: int) -> int:
    """The most pages of a layer whose heads keep ``budget`` entries each, or share them."""
    heads = room.num_kv_heads
    if not config.heads_compete:
        return heads * cdiv(budget, page_size)
    sharing = heads if config.params["tp_local"] else room.num_model_kv_heads
    return (sharing * budget + heads * (page_size - 1)) // page_size
