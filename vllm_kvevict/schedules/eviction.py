"""One request's evictions in one phase, on one rank: what they record until then, and what they are made of.

An eviction owns what it has recorded, and ends with its phase; nothing of it is left then. An answer counts only for
the admission that it was given to.
"""

import dataclasses
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.policies import Kept, LayerScores, cuts, score_layer, select, whole_model
from vllm_kvevict.schedules.evictor import Evictor
from vllm_kvevict.schedules.inputs import Collected, FreshEntries, LayerStep, LayerTokens
from vllm_kvevict.schedules.plan import Admission, Phase, Plan
from vllm_kvevict.schedules.reports import (
    Answered,
    ArbiterAnswer,
    Claim,
    Claimed,
    ExtraTokens,
    LayerWeights,
    PartOfEviction,
    Report,
)
from vllm_kvevict.schedules.ring import KeptQueries
from vllm_kvevict.schedules.step_rows import ExtraRows, QueryRows


@dataclass
class ResidentRequest:
    """A request that holds pages here.

    Attributes:
        admission: what the scheduler decided.
        request_slot: the request's place in the cache.
        tokens: tokens stored so far, the running step's included.
        eviction: of the phase that it is in, None before its first step and between phases.
    """

    admission: Admission
    request_slot: int
    tokens: int = 0
    eviction: "Eviction | None" = None

    @property
    def plan(self) -> Plan:
        """When and how it is evicted."""
        return self.admission.plan

    def end_eviction(self) -> None:
        """Nothing of its eviction is left: that knows its request, so it would stay until Python looks for circles."""
        eviction, self.eviction = self.eviction, None
        if eviction is not None:
            eviction.end()

    @property
    def starts_by_layer(self) -> bool:
        """Whether its next step is its first, and evicts it layer by layer."""
        return self.admission.by_layer and not self.tokens


class Eviction(ABC):
    """What a schedule does on a rank: a subclass says what follows a layer, and is made of the methods below.

    Args:
        evictor: the rank's.
        resident: the request.
        phase: of the request.

    Attributes:
        collected: what the policy will read.
        scores: of the layers done, where the decision needs further ones.
        scratch: request slot that the running step's repeat sees instead, if that is not all of the prompt.
        pinned: int64 [layers, KV heads] of the rank, entries at the front of each row that stay since they were stored
            before the phase; None while nothing is pinned, or it is not known yet.
    """

    def __init__(self, evictor: Evictor, resident: ResidentRequest, phase: Phase):
        self.evictor, self.resident, self.phase = evictor, resident, phase
        self.collected = Collected()
        self.scores: list[LayerScores] = []
        self.scratch: int | None = None
        self.pinned: IntArray | None = None
        self._trimmed: dict[int, list[Tensor]] = {}
        """By local layer and head the positions stored, while a cascade trims what single steps of it keep."""
        self._not_stored: FreshEntries | None = None
        """What the layer has that has just attended, until it stores what it keeps of that."""
        self._position = 0
        """Of the eviction that was begun last."""
        self._freed_pages = self._peak_pages = 0
        self._deciding = self._moving = 0.0

    # What a schedule says.

    @abstractmethod
    def after_layer(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        """Go on once a layer has attended.

        Args:
            rows: the request's query tokens in the step.
            window: queries of the window's tokens so far, [rows, Hq, d], where the policy reads them.
        """

    def window(self, position: int) -> slice:
        """Tokens whose queries choose at a position, if they are not a probe's."""
        end = self.phase.end
        return slice(end - self.phase.config.window_for(self.phase.n), end)

    def evicts_after(self, position: int) -> bool:
        """Whether the step that ends at a position evicts, or a later one that repeats the prompt."""
        return True

    def begin_extra(self, extra: ExtraTokens) -> int:
        """Make ready for a step that computes extra tokens.

        Returns:
            The request slot which they join.
        """
        return self.resident.request_slot

    def kept_queries(self, rows: slice) -> KeptQueries | None:
        """Queries of a step's rows that are kept in the ring, of a request as it was before the step."""
        return None

    @property
    def is_due(self) -> bool:
        """Whether the running step, whose tokens are counted, is followed by :meth:`after_step`."""
        return False

    def after_step(self) -> None:
        """Go on once all layers have attended, where :attr:`is_due`."""
        raise NotImplementedError(f"{type(self).__name__} is never due")

    def end(self) -> None:  # noqa: B027
        """Give back what was taken of the rank, if anything was."""

    def on_answer(self, answer: Answered) -> None:
        """Go on once the arbiter has answered what this rank claimed last."""
        raise NotImplementedError(f"{type(self).__name__} decides on each stage alone")

    # What the worker calls.

    def rows(self, rows: slice, extra: ExtraRows | None) -> QueryRows | None:
        """What a step's rows mean for the eviction, None if nothing.

        Args:
            rows: of the batch, of a request as it was before the step.
        """
        before, after = self.resident.tokens, self.resident.tokens + rows.stop - rows.start
        position = self.phase.next_eviction(before)
        if self.phase.pins and self.pinned is None:
            self.pin(after)
        # The window may straddle steps: its queries are kept as they come.
        first = self.window(position).start
        target = slice(max(before, first) - first, max(after, first) - first)
        evicts = after == position and self.evicts_after(position)
        if not self.phase.is_of_prompt and target.stop <= 0 and not evicts:
            return None
        return QueryRows(rows, target, self.window(position).stop - first, evicts, extra)

    def repeat_rows(self, extra: ExtraRows) -> QueryRows:
        """What a step that repeats a chunk of the prompt means for the eviction."""
        return QueryRows(slice(0, 0), slice(0, 0), 0, extra.tokens.stop == self.phase.end, extra)

    def after_attention(self, step: LayerStep, rows: QueryRows) -> None:
        """Take from a layer what the decision will need; decide once that is all there.

        step before the position     collect: the window's queries, sums of attention
        step that ends there         collect, then the schedule goes on (after_layer):

          layers on their own        score, decide, compact   in each layer
          layers that compete        score                    in each layer; after the last: decide, compact
            by repeats of the prompt likewise, in the last of them; until then notes what the prompt receives
            evicted layer by layer   score, trim              in each layer
            over pipeline stages     score, send_weights      later: decide by the budgets that come back, compact
                                     or send_tally            or by the cut, found in a few such rounds
        after the last layer         report; where an answer is still to come, once it is decided by that
        """
        self._note_peak()
        started, moving = time.perf_counter(), self._moving
        self._not_stored = step.not_stored.get(self.resident.request_slot)
        tokens = self.tokens(step, rows.rows)
        window = self.collected.add(self.evictor.sources, tokens, rows.target, rows.window, rows.evicts)
        self.after_layer(step, rows, window)
        assert self._not_stored is None, "a layer that stores what is kept was not evicted"
        self._deciding += time.perf_counter() - started - (self._moving - moving)
        if not rows.evicts or not self.evictor.is_last(step.layer):
            return
        self._position = self.resident.tokens
        if self._position == self.phase.end:
            self.collected = Collected()
        if not self.scores:
            self._report(self._position)

    def _note_peak(self) -> None:
        cache = self.evictor.cache
        held = cache.held(self.resident.request_slot) + cache.borrowed(self.resident.request_slot)
        if self.scratch is not None:
            held += cache.held(self.scratch)
        self._peak_pages = max(self._peak_pages, held)

    def answer(self, answer: ArbiterAnswer) -> None:
        """Go on where no rank can decide alone; answers to an older admission do not count."""
        if answer.epoch != self.resident.admission.epoch:
            return
        started, moving = time.perf_counter(), self._moving
        self.on_answer(answer.said)
        self._deciding += time.perf_counter() - started - (self._moving - moving)
        if not self.scores:
            self._report(self._position)

    # What `after_layer` and `on_answer` are made of.

    def pin(self, tokens: int) -> None:
        """What stands before the phase's own entries stays, of a request with rows of so many tokens."""
        lengths = self.evictor.cache.lengths.of(self.resident.request_slot)
        self.pinned = lengths - (tokens - self.phase.begins)

    def tokens(self, step: LayerStep, rows: slice) -> LayerTokens:
        """The request's rows in a layer, as its inputs are collected from them."""
        resident = self.resident
        phase, query = self.phase, step.query[rows].transpose(0, 1)
        return LayerTokens(
            phase.config,
            phase.n,
            resident.request_slot,
            resident.admission.reserved_at,
            step,
            resident.tokens - phase.begins - query.shape[1],
            query,
            phase.begins,
            None if self.pinned is None else self.pinned[step.layer],
        )

    def score(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        """Add a layer's scores to those before.

        Args:
            window: queries of the window, [w, Hq, d], where the policy reads them.
        """
        evictor, tokens = self.evictor, self.tokens(step, rows.rows)
        inputs = self.collected.of_layer(evictor.sources, tokens, window)
        layer = evictor.first_layer + step.layer
        scores = score_layer(self.phase.config, inputs, layer, evictor.num_model_layers, evictor.comm)
        self.scores.append(scores)
        if evictor.observer is not None:
            evictor.observer.on_scores(self.resident.admission, scores)

    def decide(self) -> None:
        """Decide for the layers scored so far and move their survivors."""
        self._settle(select(self.phase.config, self.scores, self.phase.n, self.evictor.comm))

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

    def _settle(self, chosen: Kept) -> None:
        """Move the survivors of the layers scored so far; the eviction is decided with that."""
        self._keep(self.scores, chosen)
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
        started, entries = time.perf_counter(), self._not_stored
        if entries is None or entries.layer != layer:
            self._freed_pages += evictor.cache.compact(resident.request_slot, layer, kept, first)
        else:
            self._freed_pages += evictor.cache.store(resident.request_slot, *entries, kept)
            self._not_stored = None
        self._moving += time.perf_counter() - started

    def open_scratch(self, entries: Tensor) -> int:
        """Open a request slot with copies of some of the request's entries (int64, of each row), for one step."""
        cache = self.evictor.cache
        self.scratch = cache.open()
        cache.copy_entries(self.resident.request_slot, self.scratch, entries)
        return self.scratch

    def drop_extra_entries(self) -> None:
        """Drop what the running step stored beside the prompt's own entries."""
        cache, slot = self.evictor.cache, self.resident.request_slot
        if self.scratch is None:
            own = cache.lengths.of(slot) - (0 if self.pinned is None else self.pinned)
            cache.truncate([slot], [int(own.max()) - self.phase.n])
            return
        cache.close([self.scratch])
        self.scratch = None

    def _keep(self, layers: Sequence[LayerScores], chosen: Kept) -> None:
        """Compact layers to the chosen positions."""
        first = self.evictor.first_layer
        if self.evictor.cache.uses_triton and not self._trimmed:
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

    def _report(self, position: int) -> None:
        """Tell the scheduler what the request holds now; and what was done, if the eviction is complete."""
        evictor, admission = self.evictor, self.resident.admission
        if evictor.observer is not None:
            evictor.observer.on_eviction(admission, position)
        pages, residues, kept = evictor.cache.settle(self.resident.request_slot)
        # What is pinned of an answer's request may be borrowed, and stays so.
        pages += evictor.cache.borrowed(self.resident.request_slot)
        is_complete = position in self.phase.evictions
        part = self._part(kept.tolist()) if is_complete else None
        report = Report(admission.epoch, position, pages, residues.tolist(), part)
        evictor.reports.setdefault(admission.request_id, []).append(report)
        if position == self.phase.end:
            self.resident.end_eviction()

    def stored_before(self) -> list[list[int]] | None:
        """[layers][KV heads], entries before the eviction; None where these were all tokens of each row."""
        stored: list[list[int]] | None = (
            None if self.pinned is None else (self.pinned + self.phase.n).tolist()
        )
        return stored

    def _part(self, kept: list[list[int]]) -> PartOfEviction:
        """What was done on this rank since the last complete eviction."""
        part = PartOfEviction(
            policy=self.phase.config.label,
            freed_pages=self._freed_pages,
            peak_pages=self._peak_pages,
            first_layer=self.evictor.first_layer,
            first_head=self.evictor.comm.local_heads.start if self.evictor.comm else 0,
            kept=kept,
            decision_seconds=self._deciding,
            compaction_seconds=self._moving,
            stored=self.stored_before(),
            pinned=None if self.pinned is None else self.pinned.tolist(),
            phase="decode" if self.phase.of_answer else "prefill",
        )
        self._freed_pages = self._peak_pages = 0
        self._deciding = self._moving = 0.0
        return part
