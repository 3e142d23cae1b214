"""Evictions on one rank: what a request records until then, and the steps that every schedule is made of."""

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
from vllm_kvevict.policies import (
    Kept,
    LayerInputs,
    LayerScores,
    Rotary,
    cuts,
    score_layer,
    select,
    whole_model,
)
from vllm_kvevict.policies.attention import add_column_sums
from vllm_kvevict.policies.sinks import num_sinks
from vllm_kvevict.policies.tiles import add_query_moments, add_tile_sums
from vllm_kvevict.schedules.reports import Answer, Claim, ExtraTokens, LayerWeights, RankTally, Report
from vllm_kvevict.schedules.sums import SUMMED_AS_READ, PromptSums

if TYPE_CHECKING:
    from vllm_kvevict.schedules.plan import Admission, Plan

WindowAttention = Callable[[Tensor, Tensor, int, float, float, str], Tensor]
"""Of (window's queries [w, Hq, d], page table int32 [Hkv, pages], n, scale, softcap, how the queries are combined):
fp32 [Hq, n - w]."""


@dataclass
class ResidentRequest:
    """A request that holds pages here.

    Attributes:
        admission: what the scheduler decided.
        request_slot: the request's place in the cache.
        tokens: tokens stored so far, the running step's included.
        window: last queries before the eviction position, [local layers, window, Hq, d], as far as computed, if no
            step has all of them, or a later one chooses by them.
        sums: what its prompt adds up to so far, in the rank's reserve; not if one step reads it all.
        scratch: request slot that the running step's repeat sees instead, if that is not all of the prompt.
        stored: by local layer and head the positions stored, while a cascade trims what single steps of it keep.
        probe: by local layer the queries of the request's probe, averaged over chunks, fp32 [Hq, probe, d].
        scores: of the layers done, where the decision needs further ones.
    """

    admission: "Admission"
    request_slot: int
    tokens: int = 0
    window: Tensor | None = None
    sums: PromptSums | None = None
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
        target: where the last of them, which belong to the window, go in :attr:`ResidentRequest.window`.
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

    @property
    def must_be_summed_up(self) -> bool:
        """Whether the policy scores by the queries of all tokens, and these are a part of them."""
        plan = self.resident.plan
        return self.count != plan.evict_at and not plan.config.needs.isdisjoint(SUMMED_AS_READ)


@dataclass(frozen=True)
class LayerStep:
    """What a layer's attention computed in a step.

    Attributes:
        layer: index among the rank's layers.
        query: [tokens, Hq, d] of the step, after RoPE.
        scale, softcap: of its logits; a softcap of 0 is none.
    """

    layer: int
    query: Tensor
    scale: float
    softcap: float


def query_rows(resident: ResidentRequest, rows: slice, extra: ExtraRows | None) -> QueryRows | None:
    """What a step's rows of a request mean for its eviction, None if nothing; counts them into ``resident.tokens``.

    Args:
        rows: of the batch.
    """
    before, resident.tokens = resident.tokens, resident.tokens + rows.stop - rows.start
    position = resident.plan.next_eviction(before)
    if position is None:
        return None
    # The window may straddle steps: its queries are kept as they come.
    window = resident.plan.window(position)
    first = window.start
    target = slice(max(before, first) - first, max(resident.tokens, first) - first)
    evicts = resident.tokens == position and not resident.plan.schedule.repeats_prompt
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
        output_projection: gives w_o of a local layer, [Hq, d, hidden].
        is_asynchronous: whether the device runs behind the host.
        window_attention: computes what tokens receive of the window's attention (:attr:`LayerInputs.window_mean`,
            :attr:`LayerInputs.window_max`, :attr:`LayerInputs.window_recent`) from pages, where the device
            has a kernel for it.
        rotary: gives how the model turns queries and keys by their positions.
        reserve: fp32 [size, local layers * Hq], for :attr:`ResidentRequest.sums`; None where no policy needs it.
        kernel_windows: numbers of a window's rows that `window_attention` is compiled for; None: it is for any. Others
            are scored from queries and keys, since compiling would hold up all requests.
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
        self.output_projection = output_projection
        self.is_asynchronous = is_asynchronous
        self.window_attention = window_attention
        self.rotary = rotary
        self.reserve = reserve
        self.kernel_windows = kernel_windows
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
        held = self.cache.held(resident.request_slot) + self.cache.lent(resident.request_slot)
        if resident.scratch is not None:
            held += self.cache.held(resident.scratch)
        resident.peak_pages = max(resident.peak_pages, held)
        started, moving = time.perf_counter(), resident.compaction_seconds
        window = self._collect(step, rows, n)
        resident.plan.schedule.after_layer(self, step, rows, window)
        over = rows.evicts and self.is_last(step.layer)
        if over and resident.tokens == n:
            resident.window = resident.sums = None
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

    def score(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> int:
        """Add a layer's scores to the request's; how many tokens they are of, its window included.

        Args:
            window: queries of the window, [w, Hq, d], where the policy reads them.
        """
        resident, n = rows.resident, rows.resident.plan.evict_at
        assert n is not None
        config, layer = resident.plan.config, step.layer
        received = self._received(step, resident, window, n)
        if received or ("repeated" in config.needs and "q_window" not in config.needs):
            keys = torch.empty(self.cache.num_kv_heads, n, self.cache.head_dim, device="meta")
        else:
            keys = self.cache.read_keys(resident.request_slot, layer, n)
        values = None
        if "values" in config.needs:
            values = self.cache.read_values(resident.request_slot, layer, n)
        inputs = LayerInputs(
            q_window=None if window is None else window.transpose(0, 1),
            keys=keys,
            values=values,
            scale=step.scale,
            logit_softcap=step.softcap or None,
            w_o=self.output_projection(layer) if "w_o" in config.needs else None,
            rotary=self.rotary() if "rotary" in config.needs else None,
            # Where a step has the queries of all tokens, nothing was summed up.
            q_all=step.query[rows.rows].transpose(0, 1) if rows.count == n else None,
            **received,
            **({} if resident.sums is None else resident.sums.of(layer)),
        )
        scores = score_layer(config, inputs, self.first_layer + layer, self.num_model_layers, self.comm)
        resident.scores.append(scores)
        if self.observer is not None:
            self.observer.on_scores(resident, scores)
        return n

    def _received(
        self, step: LayerStep, resident: ResidentRequest, window: Tensor | None, n: int
    ) -> dict[str, Tensor]:
        """What tokens receive of the window's attention, as a field of LayerInputs, where a kernel computes it."""
        rows = resident.plan.config.combines_rows_by
        if self.window_attention is None or rows is None:
            return {}
        assert window is not None
        if self.kernel_windows is not None and len(window) not in self.kernel_windows:
            return {}
        table = self.cache.table(resident.request_slot, step.layer)
        return {f"window_{rows}": self.window_attention(window, table, n, step.scale, step.softcap, rows)}

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

    def _collect(self, step: LayerStep, rows: QueryRows, n: int) -> Tensor | None:
        """Keep what later steps or layers will need; the window's queries so far, [rows, Hq, d], if they matter."""
        needs, window = rows.resident.plan.config.needs, None
        if "q_window" in needs and rows.target.stop > rows.target.start:
            window = self._collect_window(step, rows, n)
        if rows.must_be_summed_up:
            self._sum_up(step, rows)
        return window

    def _collect_window(self, step: LayerStep, rows: QueryRows, n: int) -> Tensor:
        """The window's queries so far, [rows, Hq, d]; kept where they do not choose in this step."""
        resident, count = rows.resident, rows.target.stop - rows.target.start
        window = step.query[rows.rows.stop - count : rows.rows.stop].contiguous()
        if count == rows.window and rows.evicts:
            return window
        if resident.window is None:
            shape = (self.cache.num_layers, resident.plan.config.window_for(n), *step.query.shape[1:])
            resident.window = step.query.new_empty(shape)
        resident.window[step.layer, rows.target] = window
        return resident.window[step.layer, : rows.window]

    def sums_of(self, resident: ResidentRequest, query: Tensor) -> PromptSums:
        """What a request's prompt adds up to so far.

        Args:
            query: [Hq, rows, d], of any step.
        """
        if resident.sums is None:
            n, cache = resident.plan.evict_at, self.cache
            assert self.reserve is not None and n is not None
            place, needs = self.reserve[resident.admission.reserved_at :], resident.plan.config.needs
            heads, _, size = query.shape
            resident.sums = PromptSums(needs, n, place, cache.num_layers, heads, cache.num_kv_heads, size)
        return resident.sums

    def _sum_up(self, step: LayerStep, rows: QueryRows) -> None:
        """Add a step's queries to what the request's prompt adds up to."""
        resident, queries = rows.resident, step.query[rows.rows].transpose(0, 1)
        sums = self.sums_of(resident, queries)
        if "col_sums" in resident.plan.config.needs:
            keys = self.cache.read_keys(resident.request_slot, step.layer, resident.tokens)
            add_column_sums(sums.of(step.layer)["col_sums"], queries, keys, step.scale, step.softcap)
            return
        for first, tile in sums.finished_tiles(step.layer, queries, resident.tokens - rows.count):
            self._add_tile(resident, step.layer, first, tile)

    def _add_tile(self, resident: ResidentRequest, layer: int, first: int, queries: Tensor) -> None:
        """Add a tile to them: its queries [Hq, r, d], from token ``first`` on."""
        assert resident.sums is not None
        config, sums, stop = resident.plan.config, resident.sums.of(layer), first + queries.shape[1]
        if "tile_sums" in sums:
            keys = self.cache.read_keys(resident.request_slot, layer, stop, first)
            add_tile_sums(sums["tile_sums"][:, first:stop], queries, keys)
        if "query_moments" in sums:
            counted = max(first, num_sinks(config, resident.sums.n))
            before = self.rotary().undo(queries[:, counted - first :].float(), counted)
            add_query_moments(sums["query_moments"], before)

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
