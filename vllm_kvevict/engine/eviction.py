"""Evictions on one worker: collect what a decision reads, decide, compact, report."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.config import Plan
from vllm_kvevict.engine.messages import LayerBudgets, LayerWeights, Report
from vllm_kvevict.parallel import TensorComm
from vllm_kvevict.policies import LayerInputs, LayerScores, score_layer, select
from vllm_kvevict.policies.attention import add_column_sums


@dataclass
class Live:
    """A request that holds pages here.

    Attributes:
        plan: what the scheduler decided for this admission.
        slot: the request's slot in the cache.
        tokens: tokens stored so far, the running step's included.
        window: last queries before the eviction position, [local layers, window, Hq, d], as far as computed.
        col_sums: attention that each token received so far, fp32 [local layers, Hq, eviction position].
        scores: of the layers done, where the decision needs further ones.
    """

    plan: Plan
    slot: int
    tokens: int = 0
    window: Tensor | None = None
    col_sums: Tensor | None = None
    scores: list[LayerScores] = field(default_factory=list)
    decision_seconds: float = 0.0
    compaction_seconds: float = 0.0


@dataclass
class QueryRows:
    """Rows of a request that is not evicted yet, in a step.

    Attributes:
        rows: its rows in the batch.
        target: where those of them that belong to the window go in :attr:`Live.window`; they are the last ones.
        evicts: whether the step ends at the eviction position.
    """

    live: Live
    rows: slice
    target: slice
    evicts: bool


def query_rows(live: Live, start: int, length: int) -> QueryRows | None:
    """What a step's rows of a request mean for its eviction, None if nothing; counts them into ``live.tokens``.

    Args:
        start, length: where the rows are in the batch.
    """
    before, live.tokens = live.tokens, live.tokens + length
    n = live.plan.evict_at
    if n is None or before >= n:
        return None
    # The window may straddle chunks: its queries are kept as they come.
    first = n - live.plan.config.window_for(n)
    target = slice(max(before, first) - first, max(live.tokens, first) - first)
    return QueryRows(live, slice(start, start + length), target, live.tokens == n)


class Evictor:
    """Decides and compacts for the layers of one rank.

    Args:
        cache: the rank's pages.
        first_layer: the rank's first layer in the model.
        num_model_layers: layers of the whole model.
        comm: the tensor-parallel group, None where it has one member.
        output_projection: gives w_o of a local layer, [Hq, d, hidden].
    """

    def __init__(
        self,
        cache: PagedKVCache,
        first_layer: int,
        num_model_layers: int,
        comm: TensorComm | None,
        output_projection: Callable[[int], Tensor],
    ):
        self.cache = cache
        self.first_layer = first_layer
        self.num_model_layers = num_model_layers
        self.comm = comm
        self.output_projection = output_projection
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
        started, moving = time.perf_counter(), live.compaction_seconds
        self._collect(layer, rows, n, query, scale, softcap)
        last = layer == self.cache.num_layers - 1
        if rows.evicts:
            live.scores.append(self._score(layer, live, n, scale, softcap))
            if config.layer_local or (last and self.cache.num_layers == self.num_model_layers):
                self._compact(live, n)
            elif last:
                weights = [float(x.weight) for x in live.scores if x.weight is not None]
                self.weights[live.plan.request_id] = LayerWeights(live.plan.epoch, self.first_layer, weights)
            if last:
                live.window = live.col_sums = None
        moving = live.compaction_seconds - moving
        live.decision_seconds += time.perf_counter() - started - moving
        if rows.evicts and last and not live.scores:
            self._report(live, n)

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
    ) -> None:
        live, config = rows.live, rows.live.plan.config
        count = rows.target.stop - rows.target.start
        if "q_window" in config.needs and count:
            if live.window is None:
                shape = (self.cache.num_layers, config.window_for(n), *query.shape[1:])
                live.window = query.new_empty(shape)
            live.window[layer, rows.target] = query[rows.rows.stop - count : rows.rows.stop]
        if "col_sums" in config.needs:
            if live.col_sums is None:
                shape = (self.cache.num_layers, query.shape[1], n)
                live.col_sums = query.new_zeros(shape, dtype=torch.float32)
            keys = self.cache.read_keys(live.slot, layer, live.tokens)
            add_column_sums(live.col_sums[layer], query[rows.rows].transpose(0, 1), keys, scale, softcap)

    def _score(self, layer: int, live: Live, n: int, scale: float, softcap: float) -> LayerScores:
        config = live.plan.config
        inputs = LayerInputs(
            q_window=None if live.window is None else live.window[layer].transpose(0, 1),
            keys=self.cache.read_keys(live.slot, layer, n),
            values=self.cache.read_values(live.slot, layer, n) if "values" in config.needs else None,
            scale=scale,
            logit_softcap=softcap or None,
            col_sums=None if live.col_sums is None else live.col_sums[layer],
            w_o=self.output_projection(layer) if "w_o" in config.needs else None,
        )
        return score_layer(config, inputs, self.first_layer + layer, self.num_model_layers, self.comm)

    def _compact(self, live: Live, n: int) -> None:
        """Decide for the layers scored so far and move their survivors."""
        chosen = select(live.plan.config, live.scores, n, self.comm)
        started = time.perf_counter()
        for scores, kept in zip(live.scores, chosen, strict=True):
            self.cache.compact(live.slot, scores.layer - self.first_layer, kept)
        live.scores = []
        live.compaction_seconds += time.perf_counter() - started

    def _report(self, live: Live, n: int) -> None:
        pages, residues, kept = self.cache.settle(live.slot)
        rows = self.cache.num_layers * self.cache.num_kv_heads
        self.reports[live.plan.request_id] = Report(
            policy=live.plan.config.label,
            epoch=live.plan.epoch,
            tokens=n,
            pages=pages,
            freed_pages=rows * -(-n // self.cache.page_size) - pages,
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
