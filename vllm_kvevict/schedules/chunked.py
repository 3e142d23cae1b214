"""Chunk by chunk while the prompt is read (take): a probe of the prompt's last tokens comes with each chunk's end.

An eviction owns the probes of its prompt's layers, which follow the chunks; the schedule owns nothing.
"""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vllm_kvevict.policies import EvictionConfig, take
from vllm_kvevict.schedules.base import RankCapacity, Schedule, pages_for
from vllm_kvevict.schedules.eviction import Eviction
from vllm_kvevict.schedules.inputs import LayerStep
from vllm_kvevict.schedules.plan import Phase
from vllm_kvevict.schedules.step_rows import QueryRows


class ChunkedEviction(Eviction):
    """Of one prompt.

    Attributes:
        probe: by local layer the queries that chose so far, averaged over chunks, fp32 [Hq, probe, d].
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.probe: dict[int, Tensor] = {}

    def window(self, position: int) -> slice:
        positions, n = self.phase.positions, self.phase.end
        size = self.phase.config.window_for(n)
        if len(positions) == 1 or self.phase.probe:
            return slice(n - size, n)
        earlier = bisect.bisect_left(positions, position)
        start = positions[earlier - 1] if earlier else 0
        return slice(max(start, position - size), position)

    def after_layer(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        """Follow the probe; at the end of a chunk choose by it, for all lower layers too if they wait for this one."""
        layer = self.evictor.first_layer + step.layer
        leader = take.warmup_layers(self.phase.config, self.evictor.num_model_layers) - 1
        if layer < leader or not rows.evicts:
            return
        kept = self._choose(step, self._follow(step, rows, window))
        for lower in range(step.layer + 1) if layer == leader else (step.layer,):
            self.selection.compact(lower, kept)

    def _follow(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> Tensor:
        """A layer's probe, with that of this chunk."""
        now = step.query[rows.extra.rows] if rows.extra else window
        assert now is not None
        # A chunk's own last tokens are others in each chunk.
        before = self.probe.get(step.layer) if self.phase.probe else None
        self.probe[step.layer] = take.ema(before, now.transpose(0, 1), self.phase.config.params["take_alpha"])
        return self.probe[step.layer]

    def _choose(self, step: LayerStep, probe: Tensor) -> list[Tensor]:
        evictor, resident, n = self.evictor, self.resident, self.phase.end
        shortest = evictor.cache.lengths.shortest(resident.request_slot, step.layer)
        stored = shortest - self.phase.extra_tokens(resident.tokens)
        return take.select(
            self.phase.config,
            probe,
            evictor.cache.read("key", resident.request_slot, step.layer, stored),
            evictor.first_layer + step.layer,
            evictor.num_model_layers,
            resident.tokens == n,
            n=n,
            scale=step.scale,
            logit_softcap=step.softcap or None,
            comm=evictor.comm,
        )


class Chunked(Schedule):
    """At the end of a chunk every layer holds what it kept so far, the chunk and the probe; then it chooses.

        chunk  |  probe        chunk  |  probe        last chunk, which ends with the probe's own tokens
        -------+------->       -------+------->       --------------------------------------------------> decoding
            keep B or the warm-up budget                                                  keep B

    Layers below the last warm-up layer wait for it and keep what it chose.
    """

    eviction = ChunkedEviction
    holds_whole_prompt = False
    reads_token_ids = True

    def positions(self, config: EvictionConfig, n: int) -> tuple[int, ...]:
        return tuple(stop for _, stop in take.prompt_chunks(config, n))

    def probe(self, config: EvictionConfig, n: int) -> int:
        return 0 if config.params["take_guide"] == "chunk" else config.window_for(n)

    def most_extra_rows(self, params: Mapping[str, Any]) -> int:
        return int(params["take_probe"])

    def conflict_with_stages(self, config: EvictionConfig, stages: Sequence[int]) -> str | None:
        warmup = take.warmup_layers(config, sum(stages))
        if warmup <= stages[0]:
            return None
        return (
            f"cannot be combined with --pipeline-parallel-size {len(stages)}: its {warmup} warm-up layers must lie in "
            f"the first stage, which has {stages[0]}, so set take_warmup_layers to {stages[0]} or less, or use fewer "
            "stages"
        )

    def layer_budgets(self, phase: Phase, num_layers: int) -> list[int]:
        return [take.chunk_budget(phase.config, phase.end, x, num_layers, True) for x in range(num_layers)]

    def peak(self, phase: Phase, rank: RankCapacity, page_size: int, by_layer: bool) -> int:
        config, n = phase.config, phase.end
        layers = range(rank.first_layer, rank.first_layer + rank.num_layers)
        kept, peak, start = dict.fromkeys(layers, 0), 0, 0
        for stop in phase.positions:
            new = stop - start + phase.extra_tokens(stop)
            pages = sum(pages_for(stored + new, page_size) for stored in kept.values())
            peak = max(peak, rank.num_kv_heads * pages)
            for layer in layers:
                budget = take.chunk_budget(config, n, layer, rank.num_model_layers, stop == n)
                kept[layer] = min(kept[layer] + stop - start, budget)
            start = stop
        return peak
