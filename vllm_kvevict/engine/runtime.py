"""State of one worker process: its pages, its requests, and what the running step needs."""

import gc
import itertools
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.batch import Batch, Decodes, lay_out, lay_out_whole
from vllm_kvevict.engine.config import KEY, KVEvictionError, Options
from vllm_kvevict.engine.devices import this_device
from vllm_kvevict.engine.eviction import Evictor, Live, QueryRows, query_rows
from vllm_kvevict.engine.messages import RankMessage
from vllm_kvevict.engine.projection import OutputProjections
from vllm_kvevict.engine.reserve import allocate
from vllm_kvevict.engine.rows import batch_request_ids
from vllm_kvevict.kernels.decode_attention import Rows
from vllm_kvevict.parallel import TensorComm

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger("vllm.kv_eviction")


@dataclass
class StepState:
    """What every layer of a step needs.

    Attributes:
        batch: the step's; None where vLLM only pretends to serve requests.
        prefills: rows of requests that are to be evicted.
    """

    batch: Batch | None
    prefills: Sequence[QueryRows] = field(default_factory=list)


class Runtime:
    """One per worker process; see :func:`get_runtime`."""

    cache: PagedKVCache

    def __init__(self, worker: Any):
        self.vllm_config: VllmConfig = worker.vllm_config
        self.options = Options.parse(self.vllm_config.additional_config[KEY])
        self.runner = worker.model_runner
        self.worker = weakref.ref(worker)
        self.process = os.getpid()
        self.started = False
        self.live: dict[str, Live] = {}
        self.probes: dict[str, str] = {}
        self.most_pages: dict[int, int] | None = None
        self.reserve: Tensor | None = None
        self.attached = False
        self.in_step = False
        self.scheduled: dict[str, int] = {}
        device = this_device()
        assert device is not None
        self.device = device

    def take_reserve(self) -> None:
        """Take what requests of some policies hold beside their KV, before the KV cache takes what memory is left."""
        policies = self.options.reserved_for
        if policies:
            self.reserve = allocate(self.vllm_config, self.runner.device)
            logger.info(
                "KV eviction: %.1f MiB are kept for what %s sums up while prompts are read",
                self.reserve.nbytes / 2**20,
                ", ".join(policies),
            )

    def attach(self, kv_caches: dict[str, Tensor]) -> None:
        """Take over vLLM's KV memory as one pool of pages.

        Args:
            kv_caches: vLLM's views by layer name, all over one allocation.

        Raises:
            KVEvictionError: when layers differ in their heads or softcap, or from the model's configuration.
        """
        names = sorted(kv_caches, key=extract_layer_index)
        layers = {name: self.vllm_config.compilation_config.static_forward_context[name] for name in names}
        first: Attention = layers[names[0]]
        _check_heads(self.vllm_config, list(layers.values()))
        page_size = self.options.page_size
        view = kv_caches[names[0]]
        raw = view.untyped_storage()
        page_elements = 2 * page_size * first.head_size
        num_pages = raw.nbytes() // (page_elements * view.element_size())
        storage = torch.empty(0, dtype=view.dtype, device=view.device)
        storage.set_(raw, 0, (num_pages, page_elements), (page_elements, 1))
        self.pages = self.device.load(self.device.pages)(storage, page_size, self.vllm_config)
        self.layer_index = {name: index for index, name in enumerate(names)}
        self.cache = PagedKVCache(
            storage,
            num_layers=len(names),
            num_kv_heads=first.num_kv_heads,
            page_size=page_size,
            max_requests=self.vllm_config.scheduler_config.max_num_seqs,
            write=self.pages.write,
            triton=self.pages.uses_triton,
        )
        self.group, self.softcap = first.num_heads // first.num_kv_heads, first.impl.softcap
        self.decode_attention = None
        if self.options.kernels:
            self.decode_attention = self.pages.decode_attention(self.cache, self.group, self.softcap)
        # Decodes replayed from a CUDA graph find their requests where they were at its capture.
        self.decode_slots = torch.full(
            (self.vllm_config.scheduler_config.max_num_seqs,), -1, dtype=torch.int64, device=view.device
        )
        first_layer, _ = self.vllm_config.model_config.get_layers_start_end_indices(
            self.vllm_config.parallel_config
        )
        tensor_parallel = get_tp_group()
        comm = None
        if tensor_parallel.world_size > 1:
            comm = TensorComm(
                tensor_parallel.device_group,
                tensor_parallel.rank_in_group,
                tensor_parallel.world_size,
                self.vllm_config.model_config.get_total_num_kv_heads(),
            )
        self.projections = OutputProjections(self.runner.model, list(layers.values()))
        if "w_o" in self.options.request_config(None)[0].needs and not self.projections.available:
            raise KVEvictionError(
                f"--kv-eviction {self.options.policy} needs each layer's output projection, unquantized, and does "
                "not find it in this model: choose another policy"
            )
        self.evictor = Evictor(
            self.cache,
            first_layer,
            self.vllm_config.model_config.get_total_num_hidden_layers(),
            comm,
            self.projections.of,
            self.device.compacts_early,
            getattr(self.pages, "window_mean", None),
            self.reserve,
        )
        self.attached = True

    def decode(
        self,
        layer: int,
        decodes: Decodes,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        scale: float,
    ) -> None:
        """Store and attend by our kernel; tensors as of its call."""
        assert self.decode_attention is not None
        tables, first = self.cache.tables, layer * self.cache.num_kv_heads
        # Kernels on a GPU look up where the arena is: it moves, and CUDA graphs outlive that.
        arena = self.decode_attention.arena_address if self.pages.uses_triton else tables.arena
        rows = Rows(arena, tables.row_starts, tables.kv_len, decodes.slots, first)
        self.decode_attention(query, key, value, output, rows, decodes.tokens, scale)

    # A step, from the scheduler's message to the report.

    @torch.inference_mode()  # as vLLM's runner, which made the tables' tensors
    def begin_step(self, scheduler_output: "SchedulerOutput") -> None:
        """Free what finished or was preempted, and open what was admitted; before any page is taken."""
        gone = [*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())]
        plans = getattr(scheduler_output.kv_connector_metadata, "plans", ())
        self.probes = getattr(scheduler_output.kv_connector_metadata, "probes", {})
        self.most_pages = getattr(scheduler_output.kv_connector_metadata, "most_pages", None)
        gone += [plan.request_id for plan in plans]
        closed = [self.live.pop(name) for name in dict.fromkeys(gone) if name in self.live]
        if closed:
            self.cache.close([live.slot for live in closed])
        self.cache.pool.fewest_free = self.cache.num_free
        for name, budgets in getattr(scheduler_output.kv_connector_metadata, "layer_budgets", {}).items():
            if name in self.live:
                self.evictor.apply(self.live[name], budgets)
        for plan in plans:
            self.live[plan.request_id] = Live(plan, self.cache.open())
        # vLLM warms up with steps that no scheduler made, of requests that have no plan.
        self.in_step = scheduler_output.kv_connector_metadata is not None
        self.scheduled = scheduler_output.num_scheduled_tokens

    def reads_prompts(self) -> bool:
        """Whether the running step has tokens before an eviction position."""
        rows = (self.live.get(name) for name in self.scheduled) if self.in_step else ()
        return any(live and live.plan.next_eviction(live.tokens) is not None for live in rows)

    def build(self, common: Any) -> StepState:
        """Take the step's pages and lay out its batch.

        Args:
            common: vLLM's CommonAttentionMetadata.
        """
        # Rows of dummy runs have indices that belong to no request, or to another one.
        if not self.in_step:
            return self.build_dummy(common)
        names = batch_request_ids(self.runner, common)
        starts = common.query_start_loc_cpu[: len(names) + 1].tolist()
        rows = dict(zip(names, itertools.starmap(slice, itertools.pairwise(starts)), strict=True))
        probes = {parent: rows.pop(name) for name, parent in self.probes.items()}
        whole = {name: mine for name, mine in rows.items() if self.live[name].is_whole_in(mine)}
        others = {name: mine for name, mine in rows.items() if name not in whole} if whole else rows
        slots = [self.live[name].slot for name in others]
        lengths = [mine.stop - mine.start for mine in others.values()]
        order = None
        if probes or whole:
            # To the cache and to attention a probe is more tokens of its request; the eviction drops them again.
            spans = [(mine, probes[name]) if name in probes else (mine,) for name, mine in others.items()]
            lengths = [sum(span.stop - span.start for span in mine) for mine in spans]
            order = np.array([row for mine in spans for span in mine for row in range(span.start, span.stop)])
        batch = Batch(starts[-1], None, [], None)
        if slots:
            step = self.cache.extend(slots, lengths)
            batch = lay_out(self.cache, step, self.decode_attention is not None, starts[-1], order)
        batch.wholes.extend(lay_out_whole(self.cache, self.live[name].slot, whole[name]) for name in whole)
        prefills = [query_rows(self.live[name], mine, probes.get(name)) for name, mine in rows.items()]
        return StepState(self._replayable(batch, common.num_reqs), [rows for rows in prefills if rows])

    def build_dummy(self, common: Any) -> StepState:
        """A step that touches no page; decodes alone are made of padding, so that a CUDA graph can capture them."""
        batch = None
        if self.attached and self.pages.uses_triton and self.decode_attention and common.max_query_len == 1:
            none = Decodes(self.decode_slots[:0], None)
            batch = self._replayable(Batch(common.num_actual_tokens, None, [], none), common.num_reqs)
        return StepState(batch)

    def _replayable(self, batch: Batch, num_requests: int) -> Batch:
        """The batch with what CUDA graphs read at its fixed place, padded to ``num_requests``."""
        if not self.pages.uses_triton or self.decode_attention is None or batch.decodes is None:
            return batch
        self.decode_attention.set_arena(self.cache.tables.arena)
        if batch.decodes.tokens is not None:
            return batch
        count = batch.decodes.slots.numel()
        self.decode_slots[:count] = batch.decodes.slots
        self.decode_slots[count:num_requests] = -1
        return replace(batch, decodes=Decodes(self.decode_slots[:num_requests], None))

    def after_attention(
        self, layer: int, state: StepState, query: Tensor, scale: float, softcap: float
    ) -> None:
        """Evict, or prepare to; arguments as of :meth:`Evictor.after_attention`."""
        for rows in state.prefills:
            self.evictor.after_attention(layer, rows, query, scale, softcap)

    def leave_step(self) -> None:
        """The step's kernels are on their way; what vLLM runs from now on serves no request."""
        self.in_step = False

    def end_step(self, rank: int) -> RankMessage | None:
        """What this rank tells the scheduler after a step."""
        if not self.attached:
            return None
        reports, weights = self.evictor.take_news()
        holdings = None
        if self.options.check:
            self.cache.verify()
            peak = self.cache.pool.num_pages - self.cache.pool.fewest_free
            if self.most_pages is not None and peak > self.most_pages[rank]:
                raise RuntimeError(
                    f"kv eviction check: rank {rank} held {peak} pages during a step, the ledger allowed "
                    f"{self.most_pages[rank]}"
                )
            holdings = {
                name: (live.plan.epoch, live.tokens, self.cache.held(live.slot))
                for name, live in self.live.items()
            }
        return RankMessage(reports, weights, self.cache.physical_pages, self.cache.stored_entries, holdings)


def _check_heads(vllm_config: VllmConfig, layers: Sequence[Attention]) -> None:
    """Refuse a model whose layers differ, or have other heads than its configuration says: the front-end checks
    requests by that."""
    shapes = {(x.num_kv_heads, x.head_size, x.num_heads, x.impl.softcap) for x in layers}
    if len(shapes) != 1:
        raise KVEvictionError(
            "--kv-eviction needs the same heads, head size and softcap in every layer of the model"
        )
    model, heads = vllm_config.model_config, layers[0].num_kv_heads
    configured = model.get_num_kv_heads(vllm_config.parallel_config)
    if heads != configured:
        raise KVEvictionError(
            f"--kv-eviction cannot serve {model.model} as it is: its config.json gives each rank {configured} KV heads "
            f"and its layers have {heads}, so correct the number of KV heads there"
        )


_runtime: Runtime | None = None


def _runs_here() -> bool:
    """Whether an engine of this process is up; one that is forked off has its parent's runtime, but not its engine."""
    known = _runtime
    return known is not None and known.started and known.process == os.getpid() and known.worker() is not None


def check_alone() -> None:
    """Refuse an engine beside another one: attention layers and connectors find the runtime by their process.

    Raises:
        KVEvictionError: one sentence that says what to do.
    """
    if _runs_here():
        # One that was dropped without being shut down refers to itself, and vLLM hides it from the collector.
        gc.unfreeze()
        gc.collect()
    if _runs_here():
        raise KVEvictionError(
            "--kv-eviction: another engine with KV eviction runs in this process already, so end it first or give "
            "each a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1)"
        )


def start_runtime(worker: Any) -> Runtime:
    """Make this worker process's runtime."""
    global _runtime
    _runtime = Runtime(worker)
    return _runtime


def mark_started() -> None:
    """The scheduler has heard of all ranks: from now on the engine of this process counts as running."""
    if _runtime is not None:
        _runtime.started = True


def stop_runtime(worker: Any) -> None:
    """Let go of the pool when its worker ends; its process may live on."""
    global _runtime
    if _runtime is not None and _runtime.worker() is worker:
        _runtime = None


def get_runtime() -> Runtime:
    """The runtime of this worker process; vLLM builds attention layers and connectors without passing it."""
    assert _runtime is not None, "the KV eviction worker has not started"
    return _runtime
