"""State of one worker process: its pages, its requests, and what the running step needs."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.batch import Batch, Decodes, lay_out, lay_out_whole
from vllm_kvevict.engine.config import KEY, KVEvictionError, Options
from vllm_kvevict.engine.eviction import Evictor, Live, QueryRows, query_rows
from vllm_kvevict.engine.messages import RankMessage
from vllm_kvevict.engine.projection import OutputProjections
from vllm_kvevict.engine.rows import batch_request_ids
from vllm_kvevict.kernels.build import BuildError
from vllm_kvevict.kernels.decode_attention import DecodeAttention, Rows, supports
from vllm_kvevict.parallel import TensorComm

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger("vllm.kv_eviction")


@dataclass
class StepState:
    """What every layer of a step needs: the batch, and the rows of requests that are to be evicted."""

    batch: Batch
    prefills: Sequence[QueryRows] = field(default_factory=list)


class Runtime:
    """One per worker process; see :func:`get_runtime`."""

    cache: PagedKVCache

    def __init__(self, vllm_config: VllmConfig, runner: Any):
        self.options = Options.parse(vllm_config.additional_config[KEY])
        self.vllm_config = vllm_config
        self.runner = runner
        self.live: dict[str, Live] = {}
        self.probes: dict[str, str] = {}
        self.most_pages: dict[int, int] | None = None
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
        self.decode_attention = self._decode_attention(layers.values())
        first_layer, _ = self.vllm_config.model_config.get_layers_start_end_indices(
            self.vllm_config.parallel_config
        )
        tensor_parallel = get_tp_group()
        comm = None
        if tensor_parallel.world_size > 1:
            comm = TensorComm(
                tensor_parallel.cpu_group,
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
        )
        self.attached = True

    def _decode_attention(self, layers: Iterable[Attention]) -> DecodeAttention | None:
        """Our kernel, or None where vLLM's op serves decodes too."""
        cache = self.cache
        if any(layer.impl.softcap for layer in layers):
            return None
        if not (self.options.kernels and cache.layout.keys_are_transposed):
            return None
        if not supports(cache.storage.dtype, cache.page_size, cache.head_dim):
            return None
        try:
            return DecodeAttention(cache.storage, cache.page_size)
        except BuildError as error:
            logger.warning("KV eviction: decoding uses vLLM's attention, which is slower: %s", error)
            return None

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
        """Store and attend by our kernel; tensors as of :class:`DecodeAttention`."""
        assert self.decode_attention is not None
        tables, first = self.cache.tables, layer * self.cache.num_kv_heads
        rows = Rows(tables.arena, tables.row_starts, tables.kv_len, decodes.slots, first)
        self.decode_attention(query, key, value, output, rows, decodes.tokens, scale)

    def _write(
        self, key_pages: Tensor, value_pages: Tensor, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None:
        ops.cpu_attn_reshape_and_cache(
            keys.unsqueeze(1), values.unsqueeze(1), key_pages, value_pages, slots, self.isa
        )

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

    def build(self, common: Any) -> StepState:
        """Take the step's pages and lay out its batch.

        Args:
            common: vLLM's CommonAttentionMetadata.
        """
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        names = batch_request_ids(self.runner, common)
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
        return StepState(batch, [rows for rows in prefills if rows])

    def after_attention(
        self, layer: int, state: StepState, query: Tensor, scale: float, softcap: float
    ) -> None:
        """Evict, or prepare to; arguments as of :meth:`Evictor.after_attention`."""
        for rows in state.prefills:
            self.evictor.after_attention(layer, rows, query, scale, softcap)

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
