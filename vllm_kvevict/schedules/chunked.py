"""Chunk by chunk while the prompt is read (take): a probe of the prompt's last tokens comes with each chunk's end."""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vllm_kvevict.policies import EvictionConfig, take
from vllm_kvevict.schedules.base import RankCapacity, Schedule, pages_for
from vllm_kvevict.schedules.evictor import Evictor, LayerStep, QueryRows


class Chunked(Schedule):
    """At the end of a chunk every layer holds what it kept so far, the chunk and the probe; then it chooses.

        chunk  |  probe        chunk  |  probe        last chunk, which ends with the probe's own tokens
        -------+------->       -------+------->       --------------------------------------------------> decoding
            keep B or the warm-up budget                                                  keep B

    Layers below the last warm-up layer wait for it and keep what it chose.
    """

    holds_whole_prompt = False
    reads_token_ids = True

    def positions(self, config: EvictionConfig, n: int) -> tuple[int, ...]:
        return tuple(stop for _, stop in take.prompt_chunks(config, n))

    def probe(self, config: EvictionConfig, n: int) -> int:
        return 0 if config.params["take_guide"] == "chunk" else config.window_for(n)

    def most_extra_rows(self, params: Mapping[str, Any]) -> int:
        return int(params["take_probe"])

    def window(self, config: EvictionConfig, n: int, position: int) -> slice:
        positions = self.positions(config, n)
        size = config.window_for(n)
        if len(positions) == 1 or self.probe(config, n):
            return slice(n - size, n)
        earlier = bisect.bisect_left(positions, position)
        start = positions[earlier - 1] if earlier else 0
        return slice(max(start, position - size), position)

    def conflict_with_stages(self, config: EvictionConfig, stages: Sequence[int]) -> str | None:
        warmup = take.warmup_layers(config, sum(stages))
        if warmup <= stages[0]:
            return None
        return (
            f"cannot be combined with --pipeline-parallel-size {len(stages)}: its {warmup} warm-up layers must lie in "
            f"the first stage, which has {stages[0]}, so set take_warmup_layers to {stages[0]} or less, or use fewer "
            "stages"
        )

    def layer_budgets(self, config: EvictionConfig, n: int, num_layers: int) -> list[int]:
        return [take.chunk_budget(config, n, layer, num_layers, True) for layer in range(num_layers)]

    def peak(self, config: EvictionConfig, n: int, rank: RankCapacity, page_size: int, by_layer: bool) -> int:
        layers = range(rank.first_layer, rank.first_layer + rank.num_layers)
        kept, peak, start = dict.fromkeys(layers, 0), 0, 0
        for stop in self.positions(config, n):
            last = stop == n
            new = stop - start + (0 if last else self.probe(config, n))
            pages = sum(pages_for(stored + new, page_size) for stored in kept.values())
            peak = max(peak, rank.num_kv_heads * pages)
            for layer in layers:
                budget = take.chunk_budget(config, n, layer, rank.num_model_layers, last)
                kept[layer] = min(kept[layer] + stop - start, budget)
            start = stop
        return peak

    def after_layer(self, evictor: Evictor, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        """Follow the probe; at the end of a chunk choose by it, for all lower layers too if they wait for this one."""
        resident, config, n = rows.resident, rows.resident.plan.config, rows.resident.plan.evict_at
        assert n is not None
        index, last = evictor.first_layer + step.layer, resident.tokens == n
        leader = take.warmup_layers(config, evictor.num_model_layers) - 1
        if index < leader or not rows.evicts:
            return
        now = step.query[rows.extra.rows] if rows.extra else window
        assert now is not None
        # A chunk's own last tokens are others in each chunk.
        before = resident.probe.get(step.layer) if self.probe(config, n) else None
        probe = take.ema(before, now.transpose(0, 1), config.params["take_alpha"])
        resident.probe[step.layer] = probe
        shortest = evictor.cache.lengths.shortest(resident.request_slot, step.layer)
        stored = shortest - resident.plan.extra_tokens(resident.tokens)
        kept = take.select(
            config,
            probe,
            evictor.cache.read_keys(resident.request_slot, step.layer, stored),
            index,
            evictor.num_model_layers,
            last,
            n=n,
            scale=step.scale,
            logit_softcap=step.softcap or None,
            comm=evictor.comm,
        )
        for layer in range(step.layer + 1) if index == leader else (step.layer,):
            evictor.compact(resident, layer, kept)
