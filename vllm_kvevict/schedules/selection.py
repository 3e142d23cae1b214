"""What one eviction keeps on a rank: layers are scored, then chosen from, then compacted; and how long that takes.

Owns the scores of layers that are not decided yet, what of each row is pinned, and what was measured since the last
complete eviction.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.policies import Kept, LayerInputs, LayerScores, cuts, score_layer, select, whole_model
from vllm_kvevict.schedules.evictor import Evictor
from vllm_kvevict.schedules.inputs import FreshEntries
from vllm_kvevict.schedules.plan import Admission, Phase, Plan
from vllm_kvevict.schedules.reports import Claim, Claimed, LayerWeights


@dataclass
class StoredRequest:
    """What a selection knows of a request that holds pages here.

    Attributes:
        admission: what the scheduler decided.
        request_slot: the request's place in the cache.
        tokens: tokens stored so far, the running step's included.
    """

    admission: Admission
    request_slot: int
    tokens: int = 0

    @property
    def plan(self) -> Plan:
        """When and how it is evicted."""
        return self.admission.plan


class Meter:
    """What an eviction costs.

    Attributes:
        deciding, moving: seconds on the host.
        freed_pages, peak_pages: of the request.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Measure the next eviction."""
        self.deciding = self.moving = 0.0
        self.freed_pages = self.peak_pages = 0

    def note_held(self, pages: int) -> None:
        """A request holds so many."""
        self.peak_pages = max(self.peak_pages, pages)

    def note_freed(self, pages: int, seconds: float) -> None:
        """It has freed so many, which took so long."""
        self.freed_pages += pages
        self.moving += seconds

    @contextlib.contextmanager
    def decides(self) -> Iterator[None]:
        """Time what is done meanwhile, without what is moved meanwhile."""
        started, moving = time.perf_counter(), self.moving
        yield
        self.deciding += time.perf_counter() - started - (self.moving - moving)


class Selection:
    """Of one request in one phase.

    Args:
        evictor: the rank's.
        resident: the request.
        phase: of the request.

    Attributes:
        scores: of the layers done, where the decision needs further ones.
        pinned: int64 [layers, KV heads] of the rank, entries at the front of each row that stay since they were stored
            before the phase; None while nothing is pinned, or it is not known yet.
        not_stored: what the layer has that has just attended, until it stores what it keeps of that.
        meter: what that costs.
    """

    def __init__(self, evictor: Evictor, resident: StoredRequest, phase: Phase):
        self.evictor, self.resident, self.phase, self.meter = evictor, resident, phase, Meter()
        self.scores: list[LayerScores] = []
        self.pinned: IntArray | None = None
        self.not_stored: FreshEntries | None = None
        self._trimmed: dict[int, list[Tensor]] = {}
        """By local layer and head the positions stored, while a cascade trims what single steps of it keep."""

    def pin(self, tokens: int) -> IntArray:
        """What stands before the phase's own entries stays; found at the first call, with rows of so many tokens."""
        if self.pinned is None:
            lengths = self.evictor.cache.lengths.of(self.resident.request_slot)
            self.pinned = lengths - (tokens - self.phase.begins)
        return self.pinned

    def begin_layer(self, entries: FreshEntries | None) -> None:
        """A layer has attended, and has these entries that are not stored; None if all are."""
        self.not_stored = entries

    def score(self, inputs: LayerInputs, layer: int) -> None:
        """Add a layer's scores to those before.

        Args:
            layer: of the rank's.
        """
        evictor = self.evictor
        number = evictor.first_layer + layer
        scores = score_layer(self.phase.config, inputs, number, evictor.num_model_layers, evictor.comm)
        self.scores.append(scores)

    def decide(self, n: int | None = None, at_once: bool = False) -> None:
        """Decide for the layers scored so far and move their survivors.

        Args:
            n: entries that compete in a row, the most of any; those of the phase if it is not given.
            at_once: whether all layers are compacted by one call, which needs more memory than one after the other.
        """
        n = self.phase.n if n is None else n
        self._settle(select(self.phase.config, self.scores, n, self.evictor.comm), at_once)

    def decide_by_budgets(self, budgets: Sequence[int]) -> None:
        """As :meth:`decide`.

        Args:
            budgets: candidates per KV head of every layer of the model.
        """
        self.scores = [dataclasses.replace(x, budget=budgets[x.layer]) for x in self.scores]
        self.decide()

    def decide_by_cut(self, cut: int) -> None:
        """As :meth:`decide`, for candidates of the whole model from an order key on."""
        config, n = self.phase.config, self.phase.n
        self._settle(whole_model.select_above(config, self.scores, n, cut, self.evictor.comm))

    def _settle(self, chosen: Kept, at_once: bool = False) -> None:
        """Move the survivors of the layers scored so far; the eviction is decided with that."""
        self._keep(self.scores, chosen, at_once)
        self.scores, self._trimmed = [], {}

    def trim(self, budgets: Sequence[int]) -> None:
        """Compact the layers scored so far to what they may still keep once all are.

        Args:
            budgets: candidates per KV head of each of them.
        """
        layers = [dataclasses.replace(x, budget=y) for x, y in zip(self.scores, budgets, strict=True)]
        chosen = select(self.phase.config, layers, self.phase.n, self.evictor.comm)
        self._keep(layers, chosen)
        first = self.evictor.first_layer
        self._trimmed = {x.layer - first: kept for x, kept in zip(layers, chosen, strict=True)}

    def send_weights(self) -> None:
        """Tell the scheduler what this stage's layers are worth; it answers with budgets."""
        weights = torch.stack([torch.as_tensor(x.weight, dtype=torch.float64) for x in self.scores])
        self._claim(LayerWeights(self.evictor.first_layer, weights.tolist()))

    def send_tally(self, question: cuts.CutQuery) -> None:
        """Tell the scheduler how this rank's candidates answer a question; it answers with another one, or the cut."""
        comm, told = self.evictor.comm, cuts.NO_KEYS
        if comm is None or comm.is_first_replica:
            order = whole_model.order_of(self.phase.config, self.scores, self.phase.n, comm)
            told = cuts.tally(order, question)
        self._claim(told)

    def _claim(self, said: Claimed) -> None:
        admission = self.resident.admission
        self.evictor.claims[admission.request_id] = Claim(admission.epoch, said)

    def compact(self, layer: int, kept: Sequence[Tensor], first: IntArray | None = None) -> None:
        """Move what a layer keeps to the front of its rows, or what several layers from it on do; or store it.

        Args:
            kept: of each row, layer by layer, the entries that stay: int64, ascending, counted within the row.
            first: of each row, the entries at its front that stay where they are; ``kept`` counts those behind them.
        """
        evictor, resident = self.evictor, self.resident
        if evictor.observer is not None:
            evictor.observer.on_compaction(resident.admission, resident.tokens, layer, kept, first)
        started, entries = time.perf_counter(), self.not_stored
        if entries is None or entries.layer != layer:
            freed = evictor.cache.compact(resident.request_slot, layer, kept, first)
        else:
            freed = evictor.cache.store(resident.request_slot, layer, entries.fields, kept)
            self.not_stored = None
        self.meter.note_freed(freed, time.perf_counter() - started)

    def _keep(self, layers: Sequence[LayerScores], chosen: Kept, at_once: bool = False) -> None:
        """Compact layers to the chosen positions."""
        first = self.evictor.first_layer
        if at_once or (self.evictor.cache.uses_triton and not self._trimmed):
            # The layers scored are consecutive. On a CPU one after the other needs less memory.
            self._compact_scored(layers[0].layer - first, list(itertools.chain.from_iterable(chosen)))
            return
        for scores, kept in zip(layers, chosen, strict=True):
            layer = scores.layer - first
            if layer in self._trimmed:
                kept = [torch.searchsorted(*pair) for pair in zip(self._trimmed[layer], kept, strict=True)]
            self._compact_scored(layer, kept)

    def _compact_scored(self, layer: int, kept: Sequence[Tensor]) -> None:
        """As :meth:`compact`; what is kept counts from the phase's first entry."""
        row = layer * self.evictor.cache.num_kv_heads
        self.compact(layer, kept, None if self.pinned is None else self.pinned.ravel()[row : row + len(kept)])
