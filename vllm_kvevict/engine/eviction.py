"""Evictions on one worker: collect what a decision reads, decide, compact, report."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.config import Plan
from vllm_kvevict.engine.messages import LayerBudgets, LayerWeights, Report
from vllm_kvevict.parallel import TensorComm
from vllm_kvevict.policies import (
    EvictionConfig,
    Kept,
    LayerInputs,
    LayerScores,
    provisional_budgets,
    score_layer,
    select,
    take,
)
from vllm_kvevict.policies.attention import add_column_sums

WindowMean = Callable[[Tensor, Tensor, int, float, float], Tensor]
"""Of (window's queries [w, Hq, d], page table int32 [Hkv, pages], n, scale, softcap): fp32 [Hq, n - w]."""


@dataclass
class Live:
    """A request that holds pages here.

    Attributes:
        plan: what the scheduler decided for this admission.
        slot: the request's slot in the cache.
        tokens: tokens stored so far, the running step's included.
        window: last queries before the eviction position, [local layers, window, Hq, d], as far as computed, if no
            step has all of them.
        col_sums: attention that each token received so far, fp32 [local layers, Hq, eviction position], in the
            rank's reserve.
        stored: by local layer and head the positions stored, while a cascade trims what single steps of it keep.
        probe: by local layer the queries of the request's probe, averaged over chunks, fp32 [Hq, probe, d].
        scores: of the layers done, where the decision needs further ones.
    """

    plan: Plan
    slot: int
    tokens: int = 0
    window: Tensor | None = None
    col_sums: Tensor | None = None
    probe: dict[int, Tensor] = field(default_factory=dict)
    scores: list[LayerScores] = field(default_factory=list)
    stored: dict[int, list[Tensor]] = field(default_factory=dict)
    freed_pages: int = 0
    peak_pages: int = 0
    decision_seconds: float = 0.0
    compaction_seconds: float = 0.0

    def is_whole_in(self, rows: slice) -> bool:
        """Whether all that is stored until the eviction comes with these rows, so that layers recycle pages."""
        return self.plan.recycles and not self.tokens and rows.stop - rows.start == self.plan.evict_at


@dataclass
class QueryRows:
    """Rows of a request that is not evicted yet, in a step.

    Attributes:
        rows: its rows in the batch.
        target: where those of them that belong to the window go in :attr:`Live.window`; they are the last ones.
        window: how many rows the window has.
        evicts: whether the step ends at an eviction position.
        probe: rows in the batch of the request's probe, which come with the end of a chunk that is not the last.
    """

    live: Live
    rows: slice
    target: slice
    window: int
    evicts: bool
    probe: slice | None


def query_rows(live: Live, rows: slice, probe: slice | None) -> QueryRows | None:
    """What a step's rows of a request mean for its eviction, None if nothing; counts them into ``live.tokens``.

    Args:
        rows, probe: of the batch.
    """
    before, live.tokens = live.tokens, live.tokens + rows.stop - rows.start
    position = live.plan.next_eviction(before)
    if position is None:
        return None
    # The window may straddle steps: its queries are kept as they come.
    window = live.plan.window(position)
    first = window.start
    target = slice(max(before, first) - first, max(live.tokens, first) - first)
    return QueryRows(live, rows, target, window.stop - first, live.tokens == position, probe)


class Evictor:
    """Decides and compacts for the layers of one rank.

    Args:
        cache: the rank's pages.
        first_layer: the rank's first layer in the model.
        num_model_layers: layers of the whole model.
        comm: the tensor-parallel group, None where it has one member.
        output_projection: gives w_o of a local layer, [Hq, d, hidden].
        compacts_early: whether a policy's layers are compacted one by one, as :meth:`Device.compacts_early` says.
        window_mean: computes :attr:`LayerInputs.window_mean` from pages, where the device has a kernel for it.
        reserve: fp32 [tokens, local layers * Hq], memory for :attr:`Live.col_sums`; None where no policy needs it.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        first_layer: int,
        num_model_layers: int,
        comm: TensorComm | None,
        output_projection: Callable[[int], Tensor],
        compacts_early: Callable[[EvictionConfig], bool],
        window_mean: WindowMean | None,
        reserve: Tensor | None = None,
    ):
        self.cache = cache
        self.first_layer = first_layer
        self.num_model_layers = num_model_layers
        self.comm = comm
        self.output_projection = output_projection
        self.compacts_early = compacts_early
        self.window_mean = window_mean
        self.reserve = reserve
        self.reports: dict[str, Report] = {}
        self.weights: dict[str, LayerWeights] = {}

    def after_attention(
        self, layer: int, rows: QueryRows, query: Tensor, scale: float, softcap: float
    ) -> None:
        """Take from a layer what the decision will need; decide once that is all there.

        Args:
            layer: index among the rank's layers.
            query: [tokens, Hq, d] of the step, after RoPE.
        """
        live, config = rows.live, rows.live.plan.config
        n = live.plan.evict_at
        assert n is not None
        live.peak_pages = max(live.peak_pages, self.cache.held(live.slot))
        started, moving = time.perf_counter(), live.compaction_seconds
        window = self._collect(layer, rows, n, query, scale, softcap)
        last = layer == self.cache.num_layers - 1
        if config.chunked:
            self._take(layer, rows, n, query[rows.probe] if rows.probe else window, scale, softcap)
        elif rows.evicts:
            live.scores.append(self._score(layer, live, n, window, scale, softcap))
            complete = config.layer_local or self.cache.num_layers == self.num_model_layers
            if self.compacts_early(config) or (last and complete):
                self._compact(live, n)
            elif live.plan.recycles and rows.rows.stop - rows.rows.start == n:
                self._cascade(live, n)
            elif last:
                weights = torch.stack(
                    [torch.as_tensor(x.weight, dtype=torch.float64) for x in live.scores]
                ).tolist()
                self.weights[live.plan.request_id] = LayerWeights(live.plan.epoch, self.first_layer, weights)
        if rows.evicts and last and live.tokens == n:
            live.window = live.col_sums = None
            live.probe = {}
        moving = live.compaction_seconds - moving
        live.decision_seconds += time.perf_counter() - started - moving
        if rows.evicts and last and not live.scores:
            self._report(live, live.tokens)

    def apply(self, live: Live, decided: LayerBudgets) -> None:
        """Compact what waits for the budgets of all pipeline stages; of an older admission there is nothing."""
        n = live.plan.evict_at
        if decided.epoch != live.plan.epoch or n is None:
            return
        started, moving = time.perf_counter(), live.compaction_seconds
        live.scores = [dataclasses.replace(x, budget=decided.budgets[x.layer]) for x in live.scores]
        self._compact(live, n)
        moving = live.compaction_seconds - moving
        live.decision_seconds += time.perf_counter() - started - moving
        self._report(live, n)

    def _collect(
        self, layer: int, rows: QueryRows, n: int, query: Tensor, scale: float, softcap: float
    ) -> Tensor | None:
        """Keep what later steps or layers will need; the window's queries so far, [rows, Hq, d], if they matter."""
        live, config = rows.live, rows.live.plan.config
        count = rows.target.stop - rows.target.start
        window = None
        if "q_window" in config.needs and count:
            window = query[rows.rows.stop - count : rows.rows.stop].contiguous()
            if count < rows.window:
                if live.window is None:
                    shape = (self.cache.num_layers, config.window_for(n), *query.shape[1:])
                    live.window = query.new_empty(shape)
                live.window[layer, rows.target] = window
                window = live.window[layer, : rows.window]
        if "col_sums" in config.needs:
            if live.col_sums is None:
                assert self.reserve is not None
                mine = self.reserve[live.plan.reserved_at :][:n]
                live.col_sums = mine.view(self.cache.num_layers, query.shape[1], n).zero_()
            keys = self.cache.read_keys(live.slot, layer, live.tokens)
            add_column_sums(live.col_sums[layer], query[rows.rows].transpose(0, 1), keys, scale, softcap)
        return window

    def _score(
        self, layer: int, live: Live, n: int, window: Tensor | None, scale: float, softcap: float
    ) -> LayerScores:
        config = live.plan.config
        mean = None
        if self.window_mean is not None and config.scores_by_mean:
            assert window is not None
            table = self.cache.table(live.slot, layer)
            mean = self.window_mean(window, table, n, scale, softcap)
            keys = torch.empty(len(table), n, self.cache.head_dim, device="meta")
        else:
            keys = self.cache.read_keys(live.slot, layer, n)
        inputs = LayerInputs(
            q_window=None if window is None else window.transpose(0, 1),
            keys=keys,
            window_mean=mean,
            values=self.cache.read_values(live.slot, layer, n) if "values" in config.needs else None,
            scale=scale,
            logit_softcap=softcap or None,
            col_sums=None if live.col_sums is None else live.col_sums[layer],
            w_o=self.output_projection(layer) if "w_o" in config.needs else None,
        )
        return score_layer(config, inputs, self.first_layer + layer, self.num_model_layers, self.comm)

    def _take(
        self, layer: int, rows: QueryRows, n: int, now: Tensor | None, scale: float, softcap: float
    ) -> None:
        """Follow the probe; at the end of a chunk choose by it, for all lower layers too if they wait for this one.

        Args:
            now: the probe's or the window's queries in this step, [rows, Hq, d].
        """
        live, config = rows.live, rows.live.plan.config
        index, last = self.first_layer + layer, live.tokens == n
        leader = take.warmup_layers(config, self.num_model_layers) - 1
        if index < leader or not rows.evicts:
            return
        assert now is not None
        # A chunk's own last tokens are others in each chunk.
        before = live.probe.get(layer) if live.plan.probe else None
        probe = live.probe[layer] = take.ema(before, now.transpose(0, 1), config.params["take_alpha"])
        stored = self.cache.lengths.shortest(live.slot, layer) - live.plan.probe * (not last)
        kept = take.select(
            config,
            probe,
            self.cache.read_keys(live.slot, layer, stored),
            index,
            self.num_model_layers,
            last,
            n=n,
            scale=scale,
            logit_softcap=softcap or None,
            comm=self.comm,
        )
        started = time.perf_counter()
        for lower in range(layer + 1) if index == leader else (layer,):
            live.freed_pages += self.cache.compact(live.slot, lower, kept)
        live.compaction_seconds += time.perf_counter() - started

    def _cascade(self, live: Live, n: int) -> None:
        """Trim the layers scored so far to what they may still keep once all are (LAVa Alg. 2)."""
        config = live.plan.config
        budgets = provisional_budgets(config, live.scores, n)
        layers = [dataclasses.replace(x, budget=y) for x, y in zip(live.scores, budgets, strict=True)]
        chosen = select(config, layers, n, self.comm)
        self._keep(live, layers, chosen)
        live.stored = {x.layer - self.first_layer: kept for x, kept in zip(layers, chosen, strict=True)}

    def _compact(self, live: Live, n: int) -> None:
        """Decide for the layers scored so far and move their survivors."""
        chosen = select(live.plan.config, live.scores, n, self.comm)
        self._keep(live, live.scores, chosen)
        live.scores, live.stored = [], {}

    def _keep(self, live: Live, layers: Sequence[LayerScores], chosen: Kept) -> None:
        """Compact layers to the chosen positions."""
        started = time.perf_counter()
        if self.cache.uses_triton and not live.stored:
            # The layers scored are consecutive. On a CPU one after the other needs less memory.
            every = list(itertools.chain.from_iterable(chosen))
            live.freed_pages += self.cache.compact(live.slot, layers[0].layer - self.first_layer, every)
            layers, chosen = [], []
        for scores, kept in zip(layers, chosen, strict=True):
            layer = scores.layer - self.first_layer
            if layer in live.stored:
                kept = [torch.searchsorted(*pair) for pair in zip(live.stored[layer], kept, strict=True)]
            live.freed_pages += self.cache.compact(live.slot, layer, kept)
        live.compaction_seconds += time.perf_counter() - started

    def _report(self, live: Live, n: int) -> None:
        pages, residues, kept = self.cache.settle(live.slot)
        self.reports[live.plan.request_id] = Report(
            policy=live.plan.config.label,
            epoch=live.plan.epoch,
            tokens=n,
            last=n == live.plan.evict_at,
            pages=pages,
            freed_pages=live.freed_pages,
            peak_pages=live.peak_pages,
            residues=residues.tolist(),
            first_layer=self.first_layer,
            first_head=self.comm.local_heads.start if self.comm else 0,
            kept=kept.tolist(),
            decision_seconds=live.decision_seconds,
            compaction_seconds=live.compaction_seconds,
        )

    def take_news(self) -> tuple[dict[str, Report], dict[str, LayerWeights]]:
        """Reports and weights since the last call, by request id."""
        news = self.reports, self.weights
        self.reports, self.weights = {}, {}
        return news
