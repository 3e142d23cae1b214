"""Evictions on one rank: what a request records until then, and the steps that every schedule is made of.

Owns the records of the requests that are not evicted yet, and the news for the scheduler until they are taken. What a
record holds for an eviction is gone once it is decided, and an answer counts only for the admission that it was given
to.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.parallel import TensorComm
from vllm_kvevict.policies import Kept, LayerScores, Rotary, cuts, score_layer, select, whole_model
from vllm_kvevict.schedules.inputs import Collected, LayerTokens, Sources, WindowAttention
from vllm_kvevict.schedules.inputs import LayerStep as LayerStep
from vllm_kvevict.schedules.reports import Answer, Claim, ExtraTokens, LayerWeights, RankTally, Report

if TYPE_CHECKING:
    from vllm_kvevict.schedules.plan import Admission, Plan


@dataclass
class ResidentRequest:
    """A request that holds pages here.

    Attributes:
        admission: what the scheduler decided.
        request_slot: the request's place in the cache.
        tokens: tokens stored so far, the running step's included.
        collected: what the policy will read.
        scratch: request slot that the running step's repeat sees instead, if that is not all of the prompt.
        stored: by local layer and head the positions stored, while a cascade trims what single steps of it keep.
        probe: by local layer the queries of the request's probe, averaged over chunks, fp32 [Hq, probe, d].
        scores: of the layers done, where the decision needs further ones.
    """

    admission: "Admission"
    request_slot: int
    tokens: int = 0
    collected: Collected = field(default_factory=Collected)
    scratch: int | None = None
    probe: dict[int, Tensor] = field(default_factory=dict)
    scores: list[LayerScores] = field(default_factory=list)
    stored: dict[int, list[Tensor]] = field(default_factory=dict)
    freed_pages: int = 0
    peak_pages: int = 0
    decision_seconds: float = 0.0
    compaction_seconds: float = 0.0

    @property
    def plan(self) -> "Plan":
        """When and how it is evicted."""
        return self.admission.plan

    @property
    def starts_by_layer(self) -> bool:
        """Whether its next step is its first, and evicts it layer by layer."""
        return self.admission.by_layer and not self.tokens


@dataclass(frozen=True)
class ExtraRows:
    """Extra tokens of a request, and their rows in the batch."""

    tokens: ExtraTokens
    rows: slice

    @property
    def count(self) -> int:
        """How many there are."""
        return self.rows.stop - self.rows.start


@dataclass
class QueryRows:
    """Rows of a request that is not evicted yet, in a step.

    Attributes:
        rows: its rows in the batch, none while its prompt is repeated.
        target: where the last of them, which belong to the window, go in :attr:`Collected.window`.
        window: how many rows the window has.
        evicts: whether the step ends at an eviction position, or with the last repeat.
        extra: what the step computes besides: a probe with the end of a chunk that is not the last, or a repeat.
    """

    resident: ResidentRequest
    rows: slice
    target: slice
    window: int
    evicts: bool
    extra: ExtraRows | None

    @property
    def count(self) -> int:
        """How many there are, without the extra ones."""
        return self.rows.stop - self.rows.start


def query_rows(resident: ResidentRequest, rows: slice, extra: ExtraRows | None) -> QueryRows | None:
    """What a step's rows of a request mean for its eviction, None if nothing.

    Args:
        resident: as it was before the step.
        rows: of the batch.
    """
    before, after = resident.tokens, resident.tokens + rows.stop - rows.start
    position = resident.plan.next_eviction(before)
    if position is None:
        return None
    # The window may straddle steps: its queries are kept as they come.
    window = resident.plan.window(position)
    first = window.start
    target = slice(max(before, first) - first, max(after, first) - first)
    evicts = after == position and not resident.plan.schedule.repeats_prompt
    return QueryRows(resident, rows, target, window.stop - first, evicts, extra)


def repeat_rows(resident: ResidentRequest, extra: ExtraRows) -> QueryRows:
    """What a step that repeats a chunk of a request's prompt means for its eviction."""
    is_last = extra.tokens.stop == resident.plan.evict_at
    return QueryRows(resident, slice(0, 0), slice(0, 0), 0, is_last, extra)


class Observer(Protocol):
    """Who wants to see each eviction of a rank."""

    def on_scores(self, resident: ResidentRequest, scores: LayerScores) -> None:
        """A layer was scored."""

    def on_compaction(self, resident: ResidentRequest, layer: int, kept: Sequence[Tensor]) -> None:
        """A layer, or several from it on, is about to be compacted; arguments as of :meth:`Evictor.compact`."""

    def on_eviction(self, resident: ResidentRequest) -> None:
        """All layers of the rank are compacted."""


class Evictor:
    """Decides and compacts for the layers of one rank, in the steps that a schedule asks for.

    Args:
        cache: the rank's pages.
        first_layer: the rank's first layer in the model.
        num_model_layers: layers of the whole model.
        comm: the tensor-parallel group, None where it has one member.
        is_asynchronous: whether the device runs behind the host.
        output_projection, window_attention, rotary, reserve, kernel_windows: as of :class:`Sources`.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        first_layer: int,
        num_model_layers: int,
        comm: TensorComm | None,
        output_projection: Callable[[int], Tensor],
        is_asynchronous: bool,
        window_attention: WindowAttention | None,
        rotary: Callable[[], Rotary],
        reserve: Tensor | None = None,
        kernel_windows: Collection[int] | None = None,
    ):
        self.cache = cache
        self.first_layer = first_layer
        self.num_model_layers = num_model_layers
        self.comm = comm
        self.is_asynchronous = is_asynchronous
        self.sources = Sources(cache, output_projection, rotary, window_attention, kernel_windows, reserve)
        self.reports: dict[str, Report] = {}
        self.claims: dict[str, Claim] = {}
        self.observer: Observer | None = None

    def after_attention(self, step: LayerStep, rows: QueryRows) -> None:
        """Take from a layer what the decision will need; decide once that is all there.

        step before the position     collect: the window's queries, sums of attention
        step that ends there         collect, then the schedule goes on (Schedule.after_layer):

          layers on their own        score, decide, compact   in each layer
          layers that compete        score                    in each layer; after the last: decide, compact
            by repeats of the prompt likewise, in the last of them; until then notes what the prompt receives
            evicted layer by layer   score, trim              in each layer
            over pipeline stages     score, send_weights      later: decide by the budgets that come back, compact
                                     or send_tally            or by the cut, found in a few such rounds

        after the last layer         report; where an answer is still to come, once it is decided by that
        """
        resident = rows.resident
        n = resident.plan.evict_at
        assert n is not None
        held = self.cache.held(resident.request_slot) + self.cache.borrowed(resident.request_slot)
        if resident.scratch is not None:
            held += self.cache.held(resident.scratch)
        resident.peak_pages = max(resident.peak_pages, held)
        started, moving = time.perf_counter(), resident.compaction_seconds
        tokens = self.tokens(step, rows.resident, rows.rows)
        window = resident.collected.add(self.sources, tokens, rows.target, rows.window, rows.evicts)
        resident.plan.schedule.after_layer(self, step, rows, window)
        over = rows.evicts and self.is_last(step.layer)
        if over and resident.tokens == n:
            resident.collected = Collected()
            resident.probe = {}
        moving = resident.compaction_seconds - moving
        resident.decision_seconds += time.perf_counter() - started - moving
        if over and not resident.scores:
            self._report(resident, resident.tokens)

    def on_answer(self, resident: ResidentRequest, answer: Answer) -> None:
        """Go on with an eviction that no rank can decide alone; answers to an older admission do not count."""
        n = resident.plan.evict_at
        if answer.epoch != resident.admission.epoch or n is None:
            return
        started, moving = time.perf_counter(), resident.compaction_seconds
        resident.plan.schedule.on_answer(self, resident, answer)
        moving = resident.compaction_seconds - moving
        resident.decision_seconds += time.perf_counter() - started - moving
        if not resident.scores:
            self._report(resident, n)

    # What a schedule's `after_layer` and `on_answer` are made of.

    def is_last(self, layer: int) -> bool:
        """Whether a layer is the rank's last."""
        return layer == self.cache.num_layers - 1

    @property
    def has_all_layers(self) -> bool:
        """Whether all of the model's layers are on this rank."""
        return self.cache.num_layers == self.num_model_layers

    def tokens(self, step: LayerStep, resident: ResidentRequest, rows: slice) -> LayerTokens:
        """A request's rows in a layer, as its inputs are collected from them."""
        n = resident.plan.evict_at
        assert n is not None
        query, first = step.query[rows].transpose(0, 1), resident.tokens - (rows.stop - rows.start)
        place = resident.admission.reserved_at
        return LayerTokens(resident.plan.config, n, resident.request_slot, place, step, first, query)

    def score(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> int:
        """Add a layer's scores to the request's; how many tokens they are of, its window included.

        Args:
            window: queries of the window, [w, Hq, d], where the policy reads them.
        """
        resident, tokens, layer = (
            rows.resident,
            self.tokens(step, rows.resident, rows.rows),
            self.first_layer + step.layer,
        )
        inputs = resident.collected.of_layer(self.sources, tokens, window)
        scores = score_layer(resident.plan.config, inputs, layer, self.num_model_layers, self.comm)
        resident.scores.append(scores)
        if self.observer is not None:
            self.observer.on_scores(resident, scores)
        return tokens.n

    def decide(self, resident: ResidentRequest) -> None:
        """Decide for the layers scored so far and move their survivors."""
        assert resident.plan.evict_at is not None
        self._settle(
            resident, select(resident.plan.config, resident.scores, resident.plan.evict_at, self.comm)
        )

    def decide_by_budgets(self, resident: ResidentRequest, budgets: Sequence[int]) -> None:
        """As :meth:`decide`.

        Args:
            budgets: candidates per KV head of every layer of the model.
        """
        resident.scores = [dataclasses.replace(x, budget=budgets[x.layer]) for x in resident.scores]
        self.decide(resident)

    def decide_by_cut(self, resident: ResidentRequest, cut: int) -> None:
        """As :meth:`decide`, for candidates of the whole model from an order key on."""
        config, n = resident.plan.config, resident.plan.evict_at
        assert n is not None
        self._settle(resident, whole_model.select_above(config, resident.scores, n, cut, self.comm))

    def _settle(self, resident: ResidentRequest, chosen: Kept) -> None:
        """Move the survivors of the layers scored so far; the eviction is decided with that."""
        self._keep(resident, resident.scores, chosen)
        resident.scores, resident.stored = [], {}

    def trim(self, resident: ResidentRequest, budgets: Sequence[int]) -> None:
        """Compact the layers scored so far to what they may still keep once all are.

        Args:
            budgets: candidates per KV head of each of them.
        """
        assert resident.plan.evict_at is not None
        layers = [dataclasses.replace(x, budget=y) for x, y in zip(resident.scores, budgets, strict=True)]
        chosen = select(resident.plan.config, layers, resident.plan.evict_at, self.comm)
        self._keep(resident, layers, chosen)
        resident.stored = {x.layer - self.first_layer: kept for x, kept in zip(layers, chosen, strict=True)}

    def send_weights(self, resident: ResidentRequest) -> None:
        """Tell the scheduler what this stage's layers are worth; it answers with budgets."""
        weights = torch.stack([torch.as_tensor(x.weight, dtype=torch.float64) for x in resident.scores])
        self.claims[resident.admission.request_id] = LayerWeights(
            resident.admission.epoch, self.first_layer, weights.tolist()
        )

    def send_tally(self, resident: ResidentRequest, question: cuts.Question) -> None:
        """Tell the scheduler how this rank's candidates answer a question; it answers with another one, or the cut."""
        config, n = resident.plan.config, resident.plan.evict_at
        assert n is not None
        told = cuts.NO_KEYS
        if self.comm is None or self.comm.is_first_replica:
            told = cuts.tally(whole_model.order_of(config, resident.scores, n, self.comm), question)
        self.claims[resident.admission.request_id] = RankTally(resident.admission.epoch, told)

    def compact(self, resident: ResidentRequest, layer: int, kept: Sequence[Tensor]) -> None:
        """Move what a layer keeps to the front of its rows, or what several consecutive layers from it on do.

        Args:
            kept: of each row, layer by layer, the entries that stay: int64, ascending, counted within the row.
        """
        if self.observer is not None:
            self.observer.on_compaction(resident, layer, kept)
        started = time.perf_counter()
        resident.freed_pages += self.cache.compact(resident.request_slot, layer, kept)
        resident.compaction_seconds += time.perf_counter() - started

    def open_scratch(self, resident: ResidentRequest, entries: Tensor) -> int:
        """Open a request slot with copies of some of a request's entries (int64, of each row), for one step."""
        resident.scratch = self.cache.open()
        self.cache.copy_entries(resident.request_slot, resident.scratch, entries)
        return resident.scratch

    def drop_extra_entries(self, resident: ResidentRequest) -> None:
        """Drop what the running step stored beside the prompt's own entries."""
        if resident.scratch is None:
            stored = int(self.cache.lengths.of(resident.request_slot).max())
            self.cache.truncate([resident.request_slot], [stored - resident.tokens])
            return
        self.cache.close([resident.scratch])
        resident.scratch = None

    def _keep(self, resident: ResidentRequest, layers: Sequence[LayerScores], chosen: Kept) -> None:
        """Compact layers to the chosen positions."""
        if self.cache.uses_triton and not resident.stored:
            # The layers scored are consecutive. On a CPU one after the other needs less memory.
            every = list(itertools.chain.from_iterable(chosen))
            self.compact(resident, layers[0].layer - self.first_layer, every)
            return
        for scores, kept in zip(layers, chosen, strict=True):
            layer = scores.layer - self.first_layer
            if layer in resident.stored:
                kept = [torch.searchsorted(*pair) for pair in zip(resident.stored[layer], kept, strict=True)]
            self.compact(resident, layer, kept)

    def _report(self, resident: ResidentRequest, n: int) -> None:
        if self.observer is not None:
            self.observer.on_eviction(resident)
        pages, residues, kept = self.cache.settle(resident.request_slot)
        self.reports[resident.admission.request_id] = Report(
            policy=resident.plan.config.label,
            epoch=resident.admission.epoch,
            tokens=n,
            last=n == resident.plan.evict_at,
            pages=pages,
            freed_pages=resident.freed_pages,
            peak_pages=resident.peak_pages,
            residues=residues.tolist(),
            first_layer=self.first_layer,
            first_head=self.comm.local_heads.start if self.comm else 0,
            kept=kept.tolist(),
            decision_seconds=resident.decision_seconds,
            compaction_seconds=resident.compaction_seconds,
        )

    def take_news(self) -> tuple[dict[str, Report], dict[str, Claim]]:
        """Reports and claims since the last call, by request id."""
        news = self.reports, self.claims
        self.reports, self.claims = {}, {}
        return news
