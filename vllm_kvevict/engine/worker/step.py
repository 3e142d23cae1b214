"""One step on a rank: it begins with the scheduler's message, lays out its batch, and ends with what the rank reports.

Owns what is known for the step alone, and is gone with it. It closes who is gone, drops, answers, stores what was
evicted and opens who was admitted; only then it takes pages.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.engine.messages import Holdings, RankMessage, StepMessage
from vllm_kvevict.engine.worker.attach import Rank
from vllm_kvevict.engine.worker.batch import Batch, Served, lay_out, lay_out_by_layer
from vllm_kvevict.schedules.eviction import Eviction, ResidentRequest
from vllm_kvevict.schedules.plan import Admission
from vllm_kvevict.schedules.registry import eviction_of
from vllm_kvevict.schedules.reports import ExtraTokens
from vllm_kvevict.schedules.ring import KeptQueries, RingStep
from vllm_kvevict.schedules.step_rows import ExtraRows, QueryRows

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput


@dataclass
class StepState:
    """What every layer of a step needs.

    Attributes:
        batch: the step's; None where vLLM only pretends to serve requests.
        evictions: of requests whose rows they have to see, with these.
        ring: queries that they keep, None for none.
    """

    batch: Batch | None
    evictions: Sequence[tuple[Eviction, QueryRows]] = ()
    ring: RingStep | None = None


class WorkerStep:
    """One that a scheduler made.

    Args:
        rank: whose step it is.
        residents: the requests there, which it opens and closes.
        message: the scheduler's.
        scheduled: its tokens by request.
    """

    def __init__(
        self,
        rank: Rank,
        residents: dict[str, ResidentRequest],
        message: StepMessage,
        scheduled: dict[str, int],
    ):
        self.rank, self.residents, self.message, self.scheduled = rank, residents, message, scheduled
        self._state: StepState | None = None
        self._due: list[Eviction] = []
        """That go on once all layers have attended."""

    def begin(self, output: "SchedulerOutput") -> None:
        """Free what finished, was preempted or is dropped, and open what was admitted; before any page is taken.

        Each in its turn: what is dropped may have had borrowers that just finished, and a prefix must be stored before
        the request that it is of goes on.
        """
        message, rank = self.message, self.rank
        self._freeze(output.finished_req_ids)
        self._leave_tails()
        gone = [*output.finished_req_ids, *(output.preempted_req_ids or ())]
        self._close([*gone, *(admission.request_id for admission in message.admissions)])
        self._take_back_drafts(output.scheduled_cached_reqs)
        rank.prefixes.cut(message.cuts)
        rank.prefixes.drop(message.drops)
        self._exchange_blocks()
        rank.cache.pool.fewest_free = rank.cache.num_free
        for name, answer in message.answers.items():
            resident = self.residents.get(name)
            if resident is not None and resident.eviction is not None:
                resident.eviction.answer(answer)
        self._store_prefixes()
        for admission in message.admissions:
            self.residents[admission.request_id] = self._open(admission)
        rank.prefixes.expect(message.stores)

    def _take_back_drafts(self, scheduled: "CachedRequestData") -> None:
        """Drop what was stored of draft tokens that were rejected: such requests have fewer computed tokens."""
        slots, dropped = [], []
        for name, computed in zip(scheduled.req_ids, scheduled.num_computed_tokens, strict=True):
            resident = self.residents.get(name)
            if resident is not None and resident.tokens > computed:
                slots.append(resident.request_slot)
                dropped.append(resident.tokens - computed)
                resident.tokens = computed
        if slots:
            self.rank.cache.truncate(slots, dropped)

    def _exchange_blocks(self) -> None:
        """Use blocks that became pages, and give up those that other layers need, after moving what they hold."""
        if self.rank.block_pages is None:
            return
        cache, pages = self.rank.cache, self.rank.block_pages
        if self.message.new_blocks:
            cache.add_pages(pages.in_blocks(self.message.new_blocks, cache.device))
        if self.message.lost_blocks:
            cache.remove_pages(pages.in_blocks(self.message.lost_blocks, cache.device))

    def _close(self, request_ids: Sequence[str]) -> None:
        names = [name for name in dict.fromkeys(request_ids) if name in self.residents]
        closed = [self.residents.pop(name) for name in names]
        for resident in closed:
            resident.end_eviction()
            self.rank.prefixes.remove(resident.admission.request_id)
        if closed:
            self.rank.cache.close([resident.request_slot for resident in closed])

    def _open(self, admission: Admission) -> ResidentRequest:
        return ResidentRequest(admission, self.rank.prefixes.open(admission), admission.tokens)

    def _freeze(self, request_ids: Iterable[str]) -> None:
        """Make shared entries of requests' pages where the scheduler asks for that."""
        for name in request_ids:
            if name in self.message.freezes and name in self.residents:
                self.rank.prefixes.freeze(self.residents[name].request_slot, self.message.freezes.pop(name))

    def _leave_tails(self) -> None:
        """Keep what the scheduler asks for of requests that have ended."""
        for name, (number, tokens) in self.message.leaves.items():
            resident = self.residents[name]
            self.rank.prefixes.publish_tail(resident.request_slot, number, resident.tokens - tokens)

    def _store_prefixes(self) -> None:
        """Cache those prefixes that were evicted since the last message to the scheduler."""
        for name, reports in self.rank.evictor.reports.items():
            if reports[-1].part is not None and name in self.residents:
                filled = self.rank.prefixes.store(name, self.residents[name].request_slot)
                if filled:
                    reports[-1] = replace(reports[-1], filled=filled)

    def reads_prompts(self) -> bool:
        """Whether the running step has rows that an eviction must see layer by layer, or repeats a prompt."""
        return self.message.extra is not None or any(map(self._reads_prompt, self.scheduled))

    def _reads_prompt(self, name: str) -> bool:
        resident = self.residents.get(name)
        phase = None if resident is None else resident.plan.phase_at(resident.tokens)
        if resident is None or phase is None:
            return False
        before, after = resident.tokens, resident.tokens + self.scheduled[name]
        if phase.after_step:
            return False  # what is left to do comes after the layers
        return phase.is_of_prompt or after >= phase.next_eviction(before)

    def build(self, common: Any, names: Sequence[str]) -> StepState:
        """Take the step's pages and lay out its batch, once for all groups of layers.

        Args:
            common: vLLM's CommonAttentionMetadata.
            names: of the batch's requests, in its order.
        """
        if self._state is None:
            self._state = self._build(common, names)
        return self._state

    def _build(self, common: Any, names: Sequence[str]) -> StepState:
        spans, extra = self._token_rows(common, names)
        by_layer = {name: span for name, span in spans.items() if self.residents[name].starts_by_layer}
        at_once = {name: [span] for name, span in spans.items() if name not in by_layer}
        if extra is not None:
            # To the cache and to attention they are more tokens of their request; the eviction drops them again.
            at_once.setdefault(extra.tokens.request_id, []).append(extra.rows)
        num_tokens = max(
            (span.stop for span in (*spans.values(), *([extra.rows] if extra else []))), default=0
        )
        as_they_are = extra is None and not by_layer
        batch = self._take_pages(at_once, num_tokens, None if as_they_are else _order(at_once, num_tokens))
        for name, span in by_layer.items():
            slot, rank = self.residents[name].request_slot, self.rank
            batch.by_layer.append(lay_out_by_layer(rank.cache, slot, span, rank.fewest_prefilled))
        batch = replayable(self.rank, batch, common.num_reqs)
        kept: list[KeptQueries] = []
        evictions = self._advance(spans, extra, kept)
        return StepState(batch, evictions, self.rank.ring_step(batch, kept, common.num_reqs))

    def _advance(
        self, spans: dict[str, slice], extra: ExtraRows | None, kept: list[KeptQueries]
    ) -> list[tuple[Eviction, QueryRows]]:
        """Count requests' rows as stored; those that their evictions have to see.

        Args:
            kept: gets the queries that the ring keeps.
        """
        extra_of, seen = None if extra is None else extra.tokens.request_id, []
        for name, span in spans.items():
            resident = self.residents[name]
            eviction = eviction_of(self.rank.evictor, resident)
            if eviction is None:
                resident.tokens += span.stop - span.start
                continue
            rows = eviction.rows(span, extra if extra_of == name else None)
            queries = eviction.kept_queries(span)
            resident.tokens += span.stop - span.start
            if rows is not None:
                seen.append((eviction, rows))
            if queries is not None:
                kept.append(queries)
            if eviction.is_due:
                self._due.append(eviction)
        if extra is not None and extra_of not in spans:
            eviction = self._eviction(extra.tokens)
            seen.append((eviction, eviction.repeat_rows(extra)))
        return seen

    def _eviction(self, extra: ExtraTokens) -> Eviction:
        """The eviction that extra tokens are computed for."""
        eviction = eviction_of(self.rank.evictor, self.residents[extra.request_id])
        assert eviction is not None
        return eviction

    def _token_rows(self, common: Any, names: Sequence[str]) -> tuple[dict[str, slice], ExtraRows | None]:
        """Each request's query tokens in the step, by its id, and the extra ones."""
        starts = common.query_start_loc_cpu[: len(names) + 1].tolist()
        spans = {name: slice(*ends) for name, ends in zip(names, itertools.pairwise(starts), strict=True)}
        extra = self.message.extra
        return spans, None if extra is None else ExtraRows(extra, spans.pop(extra.name))

    def _take_pages(
        self, token_rows: dict[str, list[slice]], num_tokens: int, order: IntArray | None
    ) -> Batch:
        """Let requests grow by their tokens in the step, in all layers, and lay out how they attend.

        Args:
            token_rows: of the requests that grow.
            num_tokens: of the step.
            order: as of :func:`lay_out`.
        """
        if not token_rows:
            return Batch(num_tokens, None, [], None)
        lengths = [sum(span.stop - span.start for span in parts) for parts in token_rows.values()]
        slots = {name: self.residents[name].request_slot for name in token_rows}
        extra = self.message.extra
        if extra is not None:
            slots[extra.request_id] = self._eviction(extra).begin_extra(extra)
        rank = self.rank
        step = rank.cache.extend(list(slots.values()), lengths)
        self._freeze(token_rows)
        return lay_out(rank.cache, step, rank.most_new_tokens, num_tokens, order, rank.fewest_prefilled)

    def end(self, number: int, is_checked: bool) -> RankMessage:
        """What the rank, by its global number, tells the scheduler after the step and the evictions that follow it."""
        self._state = None
        for eviction in self._due:
            eviction.after_step()
        self._due = []
        self._store_prefixes()
        rank = self.rank
        reports, claims = rank.evictor.take_news()
        shared, entries = rank.cache.loans.pages, rank.cache.lengths.total_entries
        holdings = self._checked_holdings(number) if is_checked else None
        return RankMessage(
            reports, claims, rank.cache.physical_pages, shared[True], shared[False], entries, holdings
        )

    def _checked_holdings(self, number: int) -> Holdings:
        """All that the rank holds. Raises RuntimeError if that was ever more than the ledger allowed."""
        rank, most = self.rank, self.message.most_pages
        rank.prefixes.verify()
        peak = rank.cache.pool.num_pages - rank.cache.pool.fewest_free
        if most is not None and peak > most[number]:
            raise RuntimeError(
                f"kv eviction check: rank {number} held {peak} pages during a step, the ledger allowed {most[number]}"
            )
        requests = {name: self._holding(resident) for name, resident in self.residents.items()}
        return Holdings(requests, rank.prefixes.holdings())

    def _holding(self, resident: ResidentRequest) -> tuple[int, int, int]:
        """A request's epoch, tokens and pages, borrowed ones among them."""
        cache = self.rank.cache
        pages = cache.held(resident.request_slot) + cache.borrowed(resident.request_slot)
        return resident.admission.epoch, resident.tokens, pages


def replayable(rank: Rank, batch: Batch, num_requests: int) -> Batch:
    """The batch with what CUDA graphs read at its fixed place, padded to ``num_requests``."""
    if not rank.pages.uses_triton or rank.decode_attention is None or batch.decodes is None:
        return batch
    rank.decode_attention.set_arena(rank.cache.tables.arena)
    if batch.decodes.tokens is not None:
        return batch
    count = batch.decodes.request_slots.numel()
    rank.decode_slots[:count] = batch.decodes.request_slots
    rank.decode_slots[count:num_requests] = -1
    return replace(batch, decodes=Served(rank.decode_slots[:num_requests], None))


def _order(token_rows: dict[str, list[slice]], num_tokens: int) -> IntArray | None:
    """Where in the batch the tokens of requests are, one after the other; None if that is all of it, in this order."""
    parts = list(itertools.chain.from_iterable(token_rows.values()))
    ends = [0, *(part.stop for part in parts)]
    if ends[-1] == num_tokens and all(part.start == end for part, end in zip(parts, ends, strict=False)):
        return None
    return np.concatenate([np.arange(part.start, part.stop) for part in parts] or [np.arange(0)])
