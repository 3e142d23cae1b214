"""One request's evictions in one phase, on one rank: what they record until then, and what they are made of.

An eviction owns what it has recorded, and ends with its phase; nothing of it is left then. An answer counts only for
the admission that it was given to.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from vllm_kvevict.schedules.evictor import Evictor
from vllm_kvevict.schedules.inputs import Collected, LayerStep, LayerTokens
from vllm_kvevict.schedules.plan import Phase
from vllm_kvevict.schedules.reports import (
    Answered,
    ArbiterAnswer,
    ExtraTokens,
    PartOfEviction,
    Report,
)
from vllm_kvevict.schedules.ring import KeptQueries
from vllm_kvevict.schedules.selection import Selection, StoredRequest
from vllm_kvevict.schedules.step_rows import ExtraRows, QueryRows


@dataclass
class ResidentRequest(StoredRequest):
    """A request that holds pages here, with the eviction that it is in.

    Attributes:
        eviction: of the phase that it is in, None before its first step and between phases.
    """

    eviction: "Eviction | None" = None

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
        selection: what is kept.
        scratch: request slot that the running step's repeat sees instead, if that is not all of the prompt.
    """

    def __init__(self, evictor: Evictor, resident: ResidentRequest, phase: Phase):
        self.evictor, self.resident, self.phase = evictor, resident, phase
        self.collected, self.selection = Collected(), Selection(evictor, resident, phase)
        self.scratch: int | None = None
        self._position = 0
        """Of the eviction that was begun last."""

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
        """Release what was acquired of the rank, if anything was."""

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
        if self.phase.pins:
            self.selection.pin(after)
        # The window may straddle steps: its queries are kept as they come.
        first = self.window(position).start
        target = slice(max(before, first) - first, max(after, first) - first)
        evicts = after == position and self.evicts_after(position)
        if not self.phase.is_of_prompt and target.stop <= 0 and not evicts:
            return None
        return QueryRows(rows, target, self.window(position).stop - first, evicts, extra)

    def repeat_rows(self, extra: ExtraRows) -> QueryRows:
        """What a step that repeats a chunk of the prompt means for the eviction."""
        return QueryRows(slice(0, 0), slice(0, 0), 0, extra.tokens.stop == self.phase.repeated_at, extra)

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
        self.note_held()
        with self.selection.meter.decides():
            self.selection.begin_layer(step.not_stored.get(self.resident.request_slot))
            tokens = self.tokens(step, rows.rows)
            window = self.collected.add(self.evictor.sources, tokens, rows.target, rows.window, rows.evicts)
            self.after_layer(step, rows, window)
        assert self.selection.not_stored is None, "a layer that stores what is kept was not evicted"
        if not rows.evicts or not self.evictor.is_last(step.layer):
            return
        self._position = self.resident.tokens
        if self._position == self.phase.end:
            self.collected = Collected()
        if not self.selection.scores:
            self.report(self._position)

    def note_held(self) -> None:
        """Measure what the request holds before it is evicted."""
        cache = self.evictor.cache
        held = cache.held(self.resident.request_slot) + cache.borrowed(self.resident.request_slot)
        if self.scratch is not None:
            held += cache.held(self.scratch)
        self.selection.meter.note_held(held)

    def answer(self, answer: ArbiterAnswer) -> None:
        """Go on where no rank can decide alone; answers to an older admission do not count."""
        if answer.epoch != self.resident.admission.epoch:
            return
        with self.selection.meter.decides():
            self.on_answer(answer.said)
        if not self.selection.scores:
            self.report(self._position)

    # What `after_layer` and `on_answer` are made of, beside the selection.

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
            None if self.selection.pinned is None else self.selection.pinned[step.layer],
        )

    def score(self, step: LayerStep, rows: slice, window: Tensor | None) -> None:
        """Score a layer by what was collected of it.

        Args:
            rows: of the step's queries, the request's.
            window: queries of the window, [w, Hq, d], where the policy reads them.
        """
        tokens = self.tokens(step, rows)
        self.selection.score(self.collected.of_layer(self.evictor.sources, tokens, window), step.layer)
        if self.evictor.observer is not None:
            self.evictor.observer.on_scores(self.resident.admission, self.selection.scores[-1])

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
            own = cache.lengths.of(slot) - (0 if self.selection.pinned is None else self.selection.pinned)
            cache.truncate([slot], [int(own.max()) - (self.resident.tokens - self.phase.begins)])
            return
        cache.close([self.scratch])
        self.scratch = None

    def report(self, position: int) -> None:
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
        pinned = self.selection.pinned
        return None if pinned is None else (pinned + self.phase.n).tolist()

    def _exempt(self) -> list[list[int]] | None:
        """[layers][KV heads], of these the entries that the eviction could not drop; None where there are none."""
        pinned = self.selection.pinned
        return None if pinned is None else pinned.tolist()

    def _part(self, kept: list[list[int]]) -> PartOfEviction:
        """What was done on this rank since the last complete eviction."""
        meter = self.selection.meter
        part = PartOfEviction(
            policy=self.phase.config.policy,
            freed_pages=meter.freed_pages,
            peak_pages=meter.peak_pages,
            first_layer=self.evictor.first_layer,
            first_head=self.evictor.comm.local_heads.start if self.evictor.comm else 0,
            kept=kept,
            decision_seconds=meter.deciding,
            compaction_seconds=meter.moving,
            stored=self.stored_before(),
            pinned=self._exempt(),
            phase=self.phase.name,
        )
        meter.start()
        return part
