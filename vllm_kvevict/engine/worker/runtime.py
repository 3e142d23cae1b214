"""State of one worker process: its pages, its requests, and what the running step needs."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.cache.format import page_elements
from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.engine import process
from vllm_kvevict.engine.config import KVEvictionError, require_options
from vllm_kvevict.engine.devices import this_device
from vllm_kvevict.engine.errors import finds_none
from vllm_kvevict.engine.memory import evicted_layers_of_stages, head_dims
from vllm_kvevict.engine.messages import Holdings, RankMessage, StepMessage
from vllm_kvevict.engine.spec import BoundedAttentionSpec, blocks_kept
from vllm_kvevict.engine.worker.batch import Batch, Decodes, lay_out, lay_out_by_layer
from vllm_kvevict.engine.worker.blocks import BlockPages
from vllm_kvevict.engine.worker.model_runners import batch_request_ids
from vllm_kvevict.engine.worker.pages import Pages
from vllm_kvevict.engine.worker.prefixes import CachedPrefixes
from vllm_kvevict.engine.worker.projection import OutputProjections
from vllm_kvevict.engine.worker.reserve import allocate
from vllm_kvevict.engine.worker.rotary import ModelRotary
from vllm_kvevict.kernels.decode_attention import Rows
from vllm_kvevict.parallel import TensorComm
from vllm_kvevict.policies.inputs import PROJECTIONS, ROTARY_EMBEDDING
from vllm_kvevict.schedules.evictor import (
    Evictor,
    ExtraRows,
    LayerStep,
    QueryRows,
    ResidentRequest,
    query_rows,
    repeat_rows,
)
from vllm_kvevict.schedules.plan import Admission
from vllm_kvevict.schedules.reports import ExtraTokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

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
    pages: Pages

    def __init__(self, worker: Any):
        self.vllm_config: VllmConfig = worker.vllm_config
        self.options = require_options(self.vllm_config)
        self.runner = worker.model_runner
        self.residents: dict[str, ResidentRequest] = {}
        self.extra: ExtraTokens | None = None
        self.freezes: dict[str, list[tuple[int, int]]] = {}
        self.most_pages: dict[int, int] | None = None
        self.reserve: Tensor | None = None
        self.attached = False
        self.kv_cache_config: Any = None
        """vLLM's layout of the KV memory, known before :meth:`attach`."""
        self.block_pages: BlockPages | None = None
        """Where blocks become pages as they are needed; None where all memory is pages."""
        self.in_step = False
        self.step_state: StepState | None = None
        self.scheduled: dict[str, int] = {}
        device = this_device()
        assert device is not None
        self.device = device

    def take_reserve(self) -> None:
        """Take what requests of some policies hold beside their KV, before the KV cache takes what memory is left."""
        policies, model = self.options.reserved_for, self.vllm_config.model_config
        if policies:
            size = self.options.reserve_size(model.max_model_len, head_dims(self.vllm_config))
            self.reserve = allocate(self.vllm_config, size, self.runner.device)
            logger.info(
                "KV eviction: %.1f MiB are reserved for sums that %s needs while prompts are read",
                self.reserve.nbytes / 2**20,
                ", ".join(policies),
            )

    def attach(self, kv_caches: dict[str, Tensor]) -> None:
        """Take over vLLM's KV memory as one pool of pages.

        Args:
            kv_caches: vLLM's views by layer name, all over one allocation; other layers' are among them.

        Raises:
            KVEvictionError: when evicted layers differ in their heads or softcap, or from the model's configuration.
        """
        evicted = self._evicted_layers()
        names = sorted(evicted, key=extract_layer_index)
        context = self.vllm_config.compilation_config.static_forward_context
        layers: list[Attention] = [context[name] for name in names]
        _check_heads(self.vllm_config, layers)
        stages = evicted_layers_of_stages(self.vllm_config)
        mine = stages[get_pp_group().rank_in_group]
        _check_layers(self.vllm_config, layers, mine)
        self.layer_index = {name: index for index, name in enumerate(names)}
        self._make_cache(kv_caches[names[0]], layers)
        self.projections = self._find_projections(layers)
        self.rotary = self._find_rotary(layers)
        self.evictor = Evictor(
            self.cache,
            mine.start,
            stages[-1].stop,
            self._tensor_comm(),
            self.projections.of,
            self.device.is_asynchronous,
            self.pages.window_attention,
            self.rotary.read,
            self.reserve,
            self.options.kernel_windows,
        )
        self.attached = True

    def _evicted_layers(self) -> list[str]:
        """Names of the layers whose groups are ours."""
        groups = self.kv_cache_config.kv_cache_groups
        ours = [group for group in groups if isinstance(group.kv_cache_spec, BoundedAttentionSpec)]
        return [name for group in ours for name in group.layer_names]

    @property
    def capacity(self) -> int:
        """The most pages that there can be."""
        if self.block_pages is None:
            return self.cache.pool.num_pages
        config = self.kv_cache_config
        kept = blocks_kept(config.kv_cache_groups, self.vllm_config)
        return (config.num_blocks - kept) * self.block_pages.per_block

    @contextlib.contextmanager
    def all_blocks_as_pages(self) -> Iterator[None]:
        """Let all memory be pages meanwhile: at start-up, when no layer has anything to remember."""
        if self.block_pages is None:
            yield
            return
        pages = self.block_pages.in_blocks(range(1, self.kv_cache_config.num_blocks), self.cache.device)
        self.cache.add_pages(pages)
        yield
        self.cache.remove_pages(pages)

    def _find_blocks(self, layer: str, page_bytes: int) -> BlockPages | None:
        """Where the pages of blocks lie, if other layers use blocks of the same memory."""
        config = self.kv_cache_config
        if not blocks_kept(config.kv_cache_groups, self.vllm_config):
            return None
        layout = next(tensor for tensor in config.kv_cache_tensors if layer in tensor.layers)
        return BlockPages.of(layout, config.num_blocks, page_bytes)

    def _make_cache(self, view: Tensor, layers: Sequence[Attention]) -> None:
        """Lay pages over the allocation under one of vLLM's views, and find who stores and attends there."""
        first, page_size = layers[0], self.options.page_size
        max_requests = self.vllm_config.scheduler_config.max_num_seqs
        storage = _as_pages(view, page_elements(page_size, first.head_size))
        self.block_pages = self._find_blocks(first.layer_name, storage[0].nbytes)
        self.pages = self.device.load(self.device.pages)(storage, page_size, self.vllm_config)
        self.cache = PagedKVCache(
            storage,
            num_layers=len(layers),
            num_kv_heads=first.num_kv_heads,
            page_size=page_size,
            max_requests=max_requests + 1,  # a repeat may see copies, in a request slot of their own
            write=self.pages.write,
            triton=self.pages.uses_triton,
            is_empty=self.block_pages is not None,
        )
        self.prefixes = CachedPrefixes(self.cache, self.options.check)
        self.group, self.softcap = first.num_heads // first.num_kv_heads, first.impl.softcap
        self.decode_attention = None
        if self.options.kernels and first.impl.sinks is None:
            self.decode_attention = self.pages.decode_attention(self.cache, self.group, self.softcap)
        # Decodes replayed from a CUDA graph find their requests where they were at its capture.
        self.decode_slots = torch.full((max_requests,), -1, dtype=torch.int64, device=view.device)

    def _find_projections(self, layers: Sequence[Attention]) -> OutputProjections:
        """The layers' output projections, which some policies read.

        Raises:
            KVEvictionError: the server's policy is one of them, and the model has none that can be read.
        """
        projections = OutputProjections(self.runner.model, layers)
        if PROJECTIONS in self.options.request_config(None)[0].needs_of_model and not projections.available:
            raise finds_none(self.options.policy, PROJECTIONS)
        return projections

    def _find_rotary(self, layers: Sequence[Attention]) -> ModelRotary:
        """The layers' rotary embedding, which some policies undo.

        Raises:
            KVEvictionError: the server's policy is one of them, and the model has none that can be undone.
        """
        model = self.vllm_config.model_config
        rotary = ModelRotary(self.runner.model, layers, model.max_model_len, model.get_head_size())
        if ROTARY_EMBEDDING in self.options.request_config(None)[0].needs_of_model and not rotary.available:
            raise finds_none(self.options.policy, ROTARY_EMBEDDING)
        return rotary

    def _tensor_comm(self) -> TensorComm | None:
        """The tensor-parallel group, None where it has one member."""
        group = get_tp_group()
        if group.world_size == 1:
            return None
        kv_heads = self.vllm_config.model_config.get_total_num_kv_heads()
        return TensorComm(group.device_group, group.rank_in_group, group.world_size, kv_heads)

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
        rows = Rows(arena, tables.row_starts, tables.kv_len, decodes.request_slots, first, decodes.new_tokens)
        self.decode_attention(query, key, value, output, rows, decodes.tokens, scale)

    # A step, from the scheduler's message to the report.

    @torch.inference_mode()  # as vLLM's runner, which made the tables' tensors
    def begin_step(self, scheduler_output: "SchedulerOutput") -> None:
        """Free what finished, was preempted or is dropped, and open what was admitted; before any page is taken.

        Each in its turn: what is dropped may have had borrowers that just finished, and a prefix must be stored before
        the request that it is of goes on.
        """
        # vLLM warms up with steps that no scheduler made, of requests that have no plan.
        self.in_step = scheduler_output.kv_connector_metadata is not None
        self.step_state = None
        message = scheduler_output.kv_connector_metadata if self.in_step else StepMessage()
        assert isinstance(message, StepMessage)
        self.extra, self.freezes, self.most_pages = message.extra, message.freezes, message.most_pages
        self.scheduled = scheduler_output.num_scheduled_tokens
        self._freeze(scheduler_output.finished_req_ids)
        gone = [*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())]
        self._close([*gone, *(admission.request_id for admission in message.admissions)])
        self._take_back_drafts(scheduler_output.scheduled_cached_reqs)
        self.prefixes.drop(message.drops)
        self._exchange_blocks(message)
        self.cache.pool.fewest_free = self.cache.num_free
        for name, answer in message.answers.items():
            if name in self.residents:
                self.evictor.on_answer(self.residents[name], answer)
        self._store_prefixes()
        for admission in message.admissions:
            self.residents[admission.request_id] = self._open(admission)
        self.prefixes.expect(message.stores)

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
            self.cache.truncate(slots, dropped)

    def _exchange_blocks(self, message: StepMessage) -> None:
        """Use blocks that became pages, and give up those that other layers need, after moving what they hold."""
        if self.block_pages is None:
            return
        if message.new_blocks:
            self.cache.add_pages(self.block_pages.in_blocks(message.new_blocks, self.cache.device))
        if message.lost_blocks:
            self.cache.remove_pages(self.block_pages.in_blocks(message.lost_blocks, self.cache.device))

    def _close(self, request_ids: Sequence[str]) -> None:
        names = [name for name in dict.fromkeys(request_ids) if name in self.residents]
        closed = [self.residents.pop(name) for name in names]
        for resident in closed:
            self.prefixes.forget(resident.admission.request_id)
        if closed:
            self.cache.close([resident.request_slot for resident in closed])

    def _open(self, admission: Admission) -> ResidentRequest:
        return ResidentRequest(admission, self.prefixes.open(admission), admission.tokens)

    def _freeze(self, request_ids: Iterable[str]) -> None:
        """Make shared entries of requests' pages where the scheduler asks for that."""
        for name in request_ids:
            if name in self.freezes and name in self.residents:
                self.prefixes.freeze(self.residents[name].request_slot, self.freezes.pop(name))

    def _store_prefixes(self) -> None:
        """Cache those prefixes that were evicted since the last message to the scheduler."""
        for name, report in self.evictor.reports.items():
            if report.last and name in self.residents:
                self.prefixes.store(name, self.residents[name].request_slot)

    def reads_prompts(self) -> bool:
        """Whether the running step has tokens before an eviction position, or repeats a prompt."""
        if self.in_step and self.extra is not None:
            return True
        rows = (self.residents.get(name) for name in self.scheduled) if self.in_step else ()
        return any(resident and resident.plan.next_eviction(resident.tokens) is not None for resident in rows)

    def build(self, common: Any) -> StepState:
        """Take the step's pages and lay out its batch, once for all groups of layers.

        Args:
            common: vLLM's CommonAttentionMetadata.
        """
        # Batch rows of dummy runs have indices that belong to no request, or to another one.
        if not self.in_step:
            return self.build_dummy(common)
        if self.step_state is None:
            self.step_state = self._build_step(common)
        return self.step_state

    def _build_step(self, common: Any) -> StepState:
        spans, extra = self._token_rows(common)
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
            batch.by_layer.append(lay_out_by_layer(self.cache, self.residents[name].request_slot, span))
        prefills = [self._query_rows(name, span, extra) for name, span in spans.items()]
        if extra is not None and extra.tokens.request_id not in spans:
            prefills.append(repeat_rows(self.residents[extra.tokens.request_id], extra))
        return StepState(self._replayable(batch, common.num_reqs), [rows for rows in prefills if rows])

    def _query_rows(self, name: str, span: slice, extra: ExtraRows | None) -> QueryRows | None:
        is_its_own = extra is not None and extra.tokens.request_id == name
        return query_rows(self.residents[name], span, extra if is_its_own else None)

    def _token_rows(self, common: Any) -> tuple[dict[str, slice], ExtraRows | None]:
        """Each request's token rows in the step, by its id, and the extra ones."""
        names = batch_request_ids(self.runner, common)
        starts = common.query_start_loc_cpu[: len(names) + 1].tolist()
        spans = {name: slice(*ends) for name, ends in zip(names, itertools.pairwise(starts), strict=True)}
        extra = None if self.extra is None else ExtraRows(self.extra, spans.pop(self.extra.name))
        return spans, extra

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
        slots = [self._slot_in_step(name) for name in token_rows]
        step = self.cache.extend(slots, lengths)
        self._freeze(token_rows)
        most_new_tokens = 0 if self.decode_attention is None else self.decode_attention.most_new_tokens
        return lay_out(self.cache, step, most_new_tokens, num_tokens, order)

    def _slot_in_step(self, name: str) -> int:
        """The request slot that a request's token rows in the step join, opened now if that is for a repeat alone."""
        resident = self.residents[name]
        if self.extra is None or self.extra.request_id != name:
            return resident.request_slot
        return resident.plan.schedule.begin_extra(self.evictor, resident, self.extra)

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
        count = batch.decodes.request_slots.numel()
        self.decode_slots[:count] = batch.decodes.request_slots
        self.decode_slots[count:num_requests] = -1
        return replace(batch, decodes=Decodes(self.decode_slots[:num_requests], None))

    def after_attention(
        self, layer: int, state: StepState, query: Tensor, scale: float, softcap: float
    ) -> None:
        """Evict, or prepare to; arguments as of :class:`LayerStep`."""
        step = LayerStep(layer, query, scale, softcap)
        for rows in state.prefills:
            self.evictor.after_attention(step, rows)

    def leave_step(self) -> None:
        """The step's kernels are on their way; what vLLM runs from now on serves no request."""
        self.in_step = False
        self.step_state = None

    @torch.inference_mode()
    def end_step(self, rank: int) -> RankMessage | None:
        """What this rank tells the scheduler after a step."""
        if not self.attached:
            return None
        self._store_prefixes()
        reports, claims = self.evictor.take_news()
        holdings = None
        if self.options.check:
            self.prefixes.verify()
            peak = self.cache.pool.num_pages - self.cache.pool.fewest_free
            if self.most_pages is not None and peak > self.most_pages[rank]:
                raise RuntimeError(
                    f"kv eviction check: rank {rank} held {peak} pages during a step, the ledger allowed "
                    f"{self.most_pages[rank]}"
                )
            holdings = Holdings(
                {name: self._holding(resident) for name, resident in self.residents.items()},
                self.prefixes.holdings(),
            )
        shared = self.cache.loans.pages
        pages, entries = self.cache.physical_pages, self.cache.lengths.total_entries
        return RankMessage(reports, claims, pages, shared[True], shared[False], entries, holdings)

    def _holding(self, resident: ResidentRequest) -> tuple[int, int, int]:
        """A request's epoch, tokens and pages, borrowed ones among them."""
        pages = self.cache.held(resident.request_slot) + self.cache.borrowed(resident.request_slot)
        return resident.admission.epoch, resident.tokens, pages


def _order(token_rows: dict[str, list[slice]], num_tokens: int) -> IntArray | None:
    """Where in the batch the tokens of requests are, one after the other; None if that is all of it, in this order."""
    parts = list(itertools.chain.from_iterable(token_rows.values()))
    ends = [0, *(part.stop for part in parts)]
    if ends[-1] == num_tokens and all(part.start == end for part, end in zip(parts, ends, strict=False)):
        return None
    return np.concatenate([np.arange(part.start, part.stop) for part in parts] or [np.arange(0)])


def _as_pages(view: Tensor, page_elements: int) -> Tensor:
    """All of the allocation under a view, [pages, page_elements]; what is left at its end stays unused."""
    raw = view.untyped_storage()
    num_pages = raw.nbytes() // (page_elements * view.element_size())
    pages = torch.empty(0, dtype=view.dtype, device=view.device)
    pages.set_(raw, 0, (num_pages, page_elements), (page_elements, 1))
    return pages


def _check_heads(vllm_config: VllmConfig, layers: Sequence[Attention]) -> None:
    """Refuse a model whose layers differ, or have other heads than its configuration says: the front-end checks
    requests by that."""
    shapes = {(x.num_kv_heads, x.head_size, x.num_heads, x.impl.softcap) for x in layers}
    if len(shapes) != 1:
        raise KVEvictionError(
            "--kv-eviction needs the same heads, head size and softcap in every layer, and this model's differ: leave "
            "the flag out"
        )
    model, heads = vllm_config.model_config, layers[0].num_kv_heads
    configured = model.get_num_kv_heads(vllm_config.parallel_config)
    if heads != configured:
        raise KVEvictionError(
            f"--kv-eviction cannot serve {model.model} as it is: by its config.json each rank has {configured} KV "
            f"heads, but its layers have {heads}, so correct the number of KV heads in config.json"
        )


def _check_layers(vllm_config: VllmConfig, layers: Sequence[Attention], expected: range) -> None:
    """Refuse a model that has other layers than its configuration says: the front-end checks requests by that."""
    if len(layers) != len(expected):
        raise KVEvictionError(
            f"--kv-eviction cannot serve {vllm_config.model_config.model} as it is: by its config.json this rank has "
            f"{len(expected)} layers with full attention, but the model has {len(layers)}, so leave the flag out"
        )


_runtime: Runtime | None = None


def start_runtime(worker: Any) -> Runtime:
    """Make this worker process's runtime."""
    global _runtime
    _runtime = Runtime(worker)
    process.begin(worker)
    return _runtime


def stop_runtime(worker: Any) -> None:
    """Let go of the pool when its worker ends; its process may live on."""
    global _runtime
    if process.end(worker):
        _runtime = None


def get_runtime() -> Runtime:
    """The runtime of this worker process; vLLM builds attention layers and connectors without passing it."""
    assert _runtime is not None, "the KV eviction worker has not started"
    return _runtime
