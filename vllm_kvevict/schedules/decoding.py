"""Again and again while an answer is written: what is left of the prompt stays, the answer's own entries compete.

    tokens   0 --------- P ----------------- p_1 = P+D+I ------- p_2 = p_1+I ------- p_3 ...
    a row    |  prompt   |  D+I entries      |  D, then D+I      |  D, then D+I      |  D ...
             |  pinned   |  of the answer    evicted             evicted             evicted

D is the budget of the answer and I the interval. Positions follow from the request's own tokens, so an answer does not
depend on its neighbours, and a replay is evicted at the same ones. An eviction comes after its step's forward pass, all
layers together.

The selection owns how much of each row is pinned. The schedule owns nothing.
"""

from typing import Any

import torch
from torch import Tensor

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.policies import LayerInputs, most_candidates
from vllm_kvevict.schedules.base import RankCapacity, Schedule
from vllm_kvevict.schedules.by_ring import EvictionByRing
from vllm_kvevict.schedules.inputs import LayerStep
from vllm_kvevict.schedules.plan import Phase
from vllm_kvevict.schedules.step_rows import QueryRows


class DecodingEviction(EvictionByRing):
    """Of one answer."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._stored: list[list[int]] | None = None
        """[layers][KV heads], entries before the last eviction."""

    def after_layer(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        raise AssertionError("an answer is evicted after a step")

    def after_step(self) -> None:
        """Choose in all layers, and move what stays of the answer behind what is pinned."""
        self.note_held()
        with self.selection.meter.decides():
            lengths = self.evictor.cache.lengths.of(self.resident.request_slot)
            counts, windows = lengths - self.selection.pin(self.resident.tokens), self.windows()
            self._stored = lengths.tolist()
            for layer, of_layer in enumerate(counts):
                window = None if windows is None else windows[layer]
                self.selection.score(self._inputs(layer, of_layer, window), layer)
            # So few entries are moved of each layer that a call for each takes longer than to move them.
            self.selection.decide(int(counts.max()), at_once=True)
        self.report(self.resident.tokens)

    def stored_before(self) -> list[list[int]] | None:
        return self._stored

    def _inputs(self, layer: int, counts: IntArray, window: Tensor | None) -> LayerInputs:
        evictor, slot = self.evictor, self.resident.request_slot
        keys = evictor.cache.read_last("key", slot, layer, counts)
        scale, softcap = evictor.logits[layer]
        return LayerInputs(
            window,
            keys,
            scale=scale,
            logit_softcap=softcap or None,
            lengths=torch.from_numpy(counts) if self.phase.config.heads_compete else None,
        )


class Decoding(Schedule):
    """Of answers; the prompt has a schedule of its own, or is kept whole."""

    eviction = DecodingEviction

    def kept_entries(self, phase: Phase, rank: RankCapacity) -> tuple[int, int]:
        config = phase.config
        assert config.budget is not None
        if not config.heads_compete:
            return config.budget, 0
        window = phase.window
        free = config.budget - window
        heads = rank.num_model_kv_heads
        return window, most_candidates(config, free, heads * free, rank.num_kv_heads, heads)
