"""State of one worker process: its pages, the plans of its requests, and the evictions of the running step."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.batch import Batch, lay_out
from vllm_kvevict.engine.config import KEY, KVEvictionError, Options, Plan
from vllm_kvevict.engine.messages import RankMessage, Report
from vllm_kvevict.engine.rows import batch_request_ids
from vllm_kvevict.parallel import TensorComm
from vllm_kvevict.policies import LayerInputs, score_layer, select

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class Live:
    """A request that holds pages here.

    Attributes:
        plan: what the scheduler decided for this admission.
        slot: the request's slot in the cache.
        tokens: tokens stored so far, the running step's included.
        window: last queries before the eviction position, [local layers, window, Hq, d], as far as computed.
    """

    plan: Plan
    slot: int
    tokens: int = 0
    window: Tensor | None = None
    decision_seconds: float = 0.0
    compaction_seconds: float = 0.0


@dataclass
class QueryRows:
    """Rows of one request in a step whose queries score, or will score, its eviction."""

    live: Live
    source: slice
    target: slice
    evicts: bool


@dataclass
class StepState:
    """What every layer of a step needs: the batch, and who saves queries or is evicted."""

    batch: Batch
    windows: Sequence[QueryRows] = field(default_factory=list)


class Runtime:
    """One per worker process; see :func:`get_runtime`."""

    cache: PagedKVCache

    def __init__(self, vllm_config: VllmConfig, runner: Any):
        self.options = Options.parse(vllm_config.additional_config[KEY])
        self.vllm_config = vllm_config
        self.runner = runner
        self.live: dict[str, Live] = {}
        self.reports: dict[str, Report] = {}
        self.attached = False

    def attach(self, kv_caches: dict[str, Tensor]) -> None:
        """Take over vLLM's KV memory as one pool of pages.

        Args:
            kv_caches: vLLM's views by layer name, all over one allocation.

        Raises:
            KVEvictionError: when layers differ in their heads.
        """
        names = sorted(kv_caches, key=extract_layer_index)
        layers = {name: self.vllm_config.compilation_config.static_forward_context[name] for name in names}
        first: Attention = layers[names[0]]
        shape = {(layer.num_kv_heads, layer.head_size, layer.num_heads) for layer in layers.values()}
        if len(shape) != 1:
            raise KVEvictionError(
                "--kv-eviction needs the same heads and head size in every layer of the model"
            )
        page_size = self.options.page_size
        view = kv_caches[names[0]]
        raw = view.untyped_storage()
        page_elements = 2 * page_size * first.head_size
        num_pages = raw.nbytes() // (page_elements * view.element_size())
        storage = torch.empty(0, dtype=view.dtype, device=view.device)
        storage.set_(raw, 0, (num_pages, page_elements), (page_elements, 1))
        self.isa = _get_attn_isa(view.dtype, page_size, first.head_size)
        self.head_size = first.head_size
        self.layer_index = {name: index for index, name in enumerate(names)}
        self.cache = PagedKVCache(
            storage,
            num_layers=len(names),
            num_kv_heads=first.num_kv_heads,
            page_size=page_size,
            max_requests=self.vllm_config.scheduler_config.max_num_seqs,
            write=self.write,
        )
        self.key_pages, self.value_pages = self.paged_views(storage)
        self.first_layer, _ = self.vllm_config.model_config.get_layers_start_end_indices(
            self.vllm_config.parallel_config
        )
        self.num_model_layers = self.vllm_config.model_config.get_total_num_hidden_layers()
        tensor_parallel = get_tp_group()
        self.comm = None
        if tensor_parallel.world_size > 1:
            self.comm = TensorComm(
                tensor_parallel.cpu_group,
                tensor_parallel.rank_in_group,
                tensor_parallel.world_size,
                self.vllm_config.model_config.get_total_num_kv_heads(),
            )
        self.attached = True

    def paged_views(self, storage: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the pool as the paged op wants them, [pages, 1 head, page_size, head_size] each."""
        pages = storage.view(storage.shape[0], 1, -1, self.head_size)
        keys, values = pages.chunk(2, dim=2)
        return keys, values

    def write(self, storage: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write entries into pages.

        Args:
            storage: [pages, 2 * page_size * head_size].
            keys, values: [N, head_size].
            slots: [N] int64, page * page_size + offset.
        """
        self._write(*self.paged_views(storage), keys, values, slots)

    def append(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write entries into the pool; arguments as of :meth:`write`."""
        self._write(self.key_pages, self.value_pages, keys, values, slots)

    def _write(
        self, key_pages: Tensor, value_pages: Tensor, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        ops.cpu_attn_reshape_and_cache(
            keys.unsqueeze(1), values.unsqueeze(1), key_pages, value_pages, slots, self.isa
        )

    # A step, from the scheduler's message to the report.

    def begin_step(self, scheduler_output: "SchedulerOutput") -> None:
        """Free what finished or was preempted, and open what was admitted; before any page is taken."""
        gone = [*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())]
        plans = getattr(scheduler_output.kv_connector_metadata, "plans", ())
        gone += [plan.request_id for plan in plans]
        closed = [self.live.pop(name) for name in dict.fromkeys(gone) if name in self.live]
        if closed:
            self.cache.close([live.slot for live in closed])
        for plan in plans:
            self.live[plan.request_id] = Live(plan, self.cache.open())

    def build(self, common: Any) -> StepState:
        """Take the step's pages and lay out its batch.

        Args:
            common: vLLM's CommonAttentionMetadata.
        """
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        requests = [self.live[name] for name in batch_request_ids(self.runner, common)]
        lengths = [stop - start for start, stop in itertools.pairwise(starts)]
        step = self.cache.extend([live.slot for live in requests], lengths)
        windows = []
        for live, start, length in zip(requests, starts[:-1], lengths, strict=True):
            before, live.tokens = live.tokens, live.tokens + length
            evict_at = live.plan.evict_at
            if evict_at is None or before >= evict_at:
                continue
            # The window may straddle chunks: keep its queries as they come.
            first = evict_at - live.plan.config.window_for(evict_at)
            low = min(max(before, first), live.tokens)
            evicts = live.tokens == evict_at
            if low < live.tokens or evicts:
                source = slice(start + low - before, start + length)
                target = slice(low - first, live.tokens - first)
                windows.append(QueryRows(live, source, target, evicts))
        return StepState(lay_out(self.cache, step, lengths), windows)

    def after_attention(
        self, layer: int, state: StepState, query: Tensor, scale: float, softcap: float
    ) -> None:
        """Keep the window's queries; evict the requests whose last token before the position is computed.

        Args:
            layer: index among the rank's layers.
            query: [tokens, Hq, d] of the step, after RoPE.
        """
        for rows in state.windows:
            live = rows.live
            evict_at = live.plan.evict_at
            assert evict_at is not None
            if rows.target.stop and live.plan.config.needs_queries:
                if live.window is None:
                    window = live.plan.config.window_for(evict_at)
                    live.window = query.new_empty(self.cache.num_layers, window, *query.shape[1:])
                live.window[layer, rows.target] = query[rows.source]
            if rows.evicts:
                self._evict(layer, live, evict_at, scale, softcap)

    def _evict(self, layer: int, live: Live, n: int, scale: float, softcap: float) -> None:
        config = live.plan.config
        started = time.perf_counter()
        inputs = LayerInputs(
            q_window=None if live.window is None else live.window[layer].transpose(0, 1),
            keys=self.cache.read_keys(live.slot, layer, n),
            scale=scale,
            logit_softcap=softcap or None,
        )
        scores = score_layer(config, inputs, self.first_layer + layer, self.num_model_layers, self.comm)
        kept = select(config, [scores], n, self.comm)[0]
        decided = time.perf_counter()
        self.cache.compact(live.slot, layer, kept)
        live.decision_seconds += decided - started
        live.compaction_seconds += time.perf_counter() - decided
        if layer == self.cache.num_layers - 1:
            self._report(live, n)

    def _report(self, live: Live, n: int) -> None:
        pages, residues, kept = self.cache.settle(live.slot)
        rows = self.cache.num_layers * self.cache.num_kv_heads
        live.window = None
        self.reports[live.plan.request_id] = Report(
            policy=live.plan.config.policy,
            epoch=live.plan.epoch,
            tokens=n,
            pages=pages,
            freed_pages=rows * -(-n // self.options.page_size) - pages,
            residues=residues.tolist(),
            first_layer=self.first_layer,
            first_head=self.comm.local_heads.start if self.comm else 0,
            kept=kept.tolist(),
            decision_seconds=live.decision_seconds,
            compaction_seconds=live.compaction_seconds,
        )

    def end_step(self) -> RankMessage | None:
        """What this rank tells the scheduler after a step."""
        if not self.attached:
            return None
        reports, self.reports = self.reports, {}
        holdings = None
        if self.options.check:
            self.cache.verify()
            holdings = {
                name: (live.plan.epoch, live.tokens, self.cache.held(live.slot))
                for name, live in self.live.items()
            }
        return RankMessage(reports, self.cache.physical_pages, self.cache.stored_entries, holdings)


_runtime: Runtime | None = None


def start_runtime(vllm_config: VllmConfig, runner: Any) -> None:
    """Make this worker process's runtime."""
    global _runtime
    _runtime = Runtime(vllm_config, runner)


def stop_runtime() -> None:
    """Let go of the pool when the worker ends; its process may live on."""
    global _runtime
    _runtime = None


def get_runtime() -> Runtime:
    """The runtime of this worker process; vLLM builds attention layers and connectors without passing it."""
    assert _runtime is not None, "the KV eviction worker has not started"
    return _runtime
