"""The positions that evictions keep, for those who want to see them: workers themselves know counts alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.engine.worker.runtime import get_runtime
from vllm_kvevict.kernels.layout import KVLayout
from vllm_kvevict.policies import LayerScores
from vllm_kvevict.schedules.evictor import Evictor
from vllm_kvevict.schedules.plan import Admission


@dataclass
class Decision:
    """What one layer of one rank keeps with one eviction of a request.

    Attributes:
        request_id: vLLM's own; it begins with the one that its user knows.
        layer: among all layers of the model that are evicted.
        first_head: the rank's first KV head, among those of the model.
        kept: of each of the rank's heads the positions in the prompt, and in an answer that had begun, ascending int64.
        scores: what the choice was made from, fp32 [Hkv, m]; None if not asked for, or if there are none.
    """

    request_id: str
    layer: int
    first_head: int
    kept: list[Tensor]
    scores: Tensor | None


@dataclass
class KeptByLayer:
    """What all layers and heads of the model keep.

    Attributes:
        kept: by layer, for each KV head the positions, as above.
        scores: by layer [Hkv, m], where they were asked for.
    """

    kept: dict[int, list[Tensor]]
    scores: dict[int, Tensor]


@dataclass
class _Stored:
    """The positions that a layer's rows held after the last eviction, when the prompt had so many tokens."""

    tokens: int
    positions: list[Tensor]


class Recorder:
    """Observes a rank's evictor.

    An eviction names entries by their order in the row. It is their position in the prompt until the first eviction;
    later ones of the same prompt count what the earlier ones kept.
    """

    def __init__(self, evictor: Evictor, with_scores: bool):
        self.evictor = evictor
        self.with_scores = with_scores
        self.decisions: list[Decision] = []
        self._stored: dict[tuple[str, int], dict[int, _Stored]] = {}
        self._scores: dict[tuple[str, int], dict[int, Tensor]] = {}

    def on_scores(self, admission: Admission, scores: LayerScores) -> None:
        if self.with_scores and scores.scores is not None:
            layers = self._scores.setdefault(_key(admission), {})
            layers[scores.layer - self.evictor.first_layer] = scores.scores.cpu().clone()

    def on_compaction(
        self,
        admission: Admission,
        tokens: int,
        layer: int,
        kept: Sequence[Tensor],
        first: IntArray | None,
    ) -> None:
        kept = kept if first is None else _with_pinned(kept, first)
        heads = self.evictor.cache.num_kv_heads
        layers = self._stored.setdefault(_key(admission), {})
        for row in range(0, len(kept), heads):
            index = layer + row // heads
            before = layers.get(index) or _Stored(0, [torch.empty(0, dtype=torch.int64)] * heads)
            new = torch.arange(before.tokens, tokens)
            positions = [
                torch.cat([held, new])[entries.cpu()]
                for held, entries in zip(before.positions, kept[row : row + heads], strict=True)
            ]
            layers[index] = _Stored(tokens, positions)

    def on_eviction(self, admission: Admission, tokens: int) -> None:
        comm, key = self.evictor.comm, _key(admission)
        first_head = comm.local_heads.start if comm else 0
        scores = self._scores.pop(key, {})
        for layer, stored in sorted(self._stored.get(key, {}).items()):
            self.decisions.append(
                Decision(
                    admission.request_id,
                    self.evictor.first_layer + layer,
                    first_head,
                    stored.positions,
                    scores.get(layer),
                )
            )
        if admission.plan.next_eviction(tokens) is None:
            self._stored.pop(key, None)


def _with_pinned(kept: Sequence[Tensor], first: IntArray) -> list[Tensor]:
    """What rows keep, counted within the row, with the entries at their front that stay."""
    pinned = first.ravel().tolist()
    return [torch.cat([torch.arange(n), entries.cpu() + n]) for n, entries in zip(pinned, kept, strict=True)]


def _key(admission: Admission) -> tuple[str, int]:
    return admission.request_id, admission.epoch


# For `collective_rpc`, which calls them in every worker.


def record(worker: Any, with_scores: bool = False) -> None:
    """Record evictions from now on."""
    evictor = get_runtime().rank.evictor
    evictor.observer = Recorder(evictor, with_scores)


def take_decisions(worker: Any) -> list[Decision]:
    """What was recorded since the last call."""
    recorder = get_runtime().rank.evictor.observer
    assert isinstance(recorder, Recorder)
    decisions, recorder.decisions = recorder.decisions, []
    return decisions


def layout(worker: Any) -> tuple[list[int], KVLayout]:
    """Numbers, within the model, of the rank's layers that are evicted; and how they store KV."""
    rank = get_runtime().rank
    return sorted(map(extract_layer_index, rank.layer_index)), rank.cache.memory.layout


def evictions(ranks: Sequence[Sequence[Decision]]) -> dict[str, list[KeptByLayer]]:
    """Join what all ranks recorded: by request id, its evictions in their order.

    Args:
        ranks: of :func:`take_decisions`, as ``collective_rpc`` returns it.
    """
    joined: dict[str, list[KeptByLayer]] = {}
    for decisions in ranks:
        times: dict[tuple[str, int], int] = {}
        for decision in decisions:
            done = joined.setdefault(decision.request_id, [])
            time = times.get((decision.request_id, decision.layer), 0)
            times[decision.request_id, decision.layer] = time + 1
            if time == len(done):
                done.append(KeptByLayer({}, {}))
            _add(done[time], decision)
    return joined


def _add(eviction: KeptByLayer, decision: Decision) -> None:
    """Add a rank's heads behind those of the ranks before it; replicas of the same heads decide the same."""
    layer, first = decision.layer, decision.first_head
    heads = eviction.kept.get(layer, [])
    assert len(heads) >= first, "ranks come in the order of their heads"
    eviction.kept[layer] = heads[:first] + decision.kept
    if decision.scores is not None:
        before = [eviction.scores[layer][:first]] if first else []
        eviction.scores[layer] = torch.cat([*before, decision.scores])


def of_request(joined: Mapping[str, list[KeptByLayer]], request_id: str) -> list[KeptByLayer]:
    """The evictions of a request, by the id that its user knows; none if all of it was kept."""
    found = [name for name in joined if name == request_id or name.startswith(f"{request_id}-")]
    assert len(found) <= 1
    return joined[found[0]] if found else []
