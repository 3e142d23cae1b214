"""A rank once its KV memory is there: vLLM's allocation as one pool of pages, and all that serves it.

:func:`attach` makes a complete rank, or raises and leaves nothing behind.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.cache.format import PageMemory
from vllm_kvevict.engine.config import KVEvictionError, Options
from vllm_kvevict.engine.devices import Device
from vllm_kvevict.engine.errors import finds_none
from vllm_kvevict.engine.layers import NULL_BLOCKS, LayerMap, is_evicted
from vllm_kvevict.engine.memory import evicted_layers_of_stages, layout_of, stages_of
from vllm_kvevict.engine.worker.batch import Batch, Served
from vllm_kvevict.engine.worker.blocks import BlockPages
from vllm_kvevict.engine.worker.pages import Pages
from vllm_kvevict.engine.worker.prefixes import CachedPrefixes
from vllm_kvevict.engine.worker.projection import OutputProjections
from vllm_kvevict.engine.worker.rotary import ModelRotary
from vllm_kvevict.kernels.build import BuildError
from vllm_kvevict.kernels.decode_attention import BatchRows
from vllm_kvevict.kernels.layout import INT8, KVLayout
from vllm_kvevict.kernels.prefill_attention import FEWEST_TOKENS, PrefillAttention
from vllm_kvevict.parallel import TensorComm
from vllm_kvevict.policies.inputs import PROJECTIONS, ROTARY_EMBEDDING
from vllm_kvevict.schedules.evictor import Evictor
from vllm_kvevict.schedules.inputs import Sources
from vllm_kvevict.schedules.ring import KeptQueries, QueryRing, RingStep


@dataclass
class Rank:
    """What a worker has of the model's KV.

    Attributes:
        layer_index: of its evicted layers, by their names.
        cache, pages: where KV lies, and who stores and attends there.
        prefixes: what of it is shared.
        evictor: who evicts.
        projections, rotary: of the model, which some policies read.
        group, softcap: query heads of a KV head; of the layers' logits.
        decode_attention, prefill_attention: our kernels for decodes and for prompts, None where vLLM's serves them.
        decode_slots: int64 [max requests]; decodes replayed from a CUDA graph find their requests here.
        block_pages: where blocks become pages as they are needed; None where all memory is pages.
        num_blocks, capacity: vLLM's blocks; the most pages that there can be.
    """

    layer_index: dict[str, int]
    cache: PagedKVCache
    pages: Pages
    prefixes: CachedPrefixes
    evictor: Evictor
    projections: OutputProjections
    rotary: ModelRotary
    group: int
    softcap: float
    decode_attention: Any
    prefill_attention: PrefillAttention | None
    decode_slots: Tensor
    block_pages: BlockPages | None
    num_blocks: int
    capacity: int

    @contextlib.contextmanager
    def all_blocks_as_pages(self) -> Iterator[None]:
        """Let all memory be pages meanwhile: at start-up, when no layer has anything to remember."""
        if self.block_pages is None:
            yield
            return
        pages = self.block_pages.in_blocks(range(NULL_BLOCKS, self.num_blocks), self.cache.device)
        self.cache.add_pages(pages)
        yield
        self.cache.remove_pages(pages)

    def ring_step(self, batch: Batch, kept: Sequence[KeptQueries], num_requests: int) -> RingStep | None:
        """What a step's layers keep of queries; None if nothing, and no CUDA graph may be replayed."""
        ring, decodes = self.evictor.ring, batch.decodes
        if ring is None:
            return None
        if decodes is None or decodes.tokens is not None or not self.pages.uses_triton:
            return ring.step(kept) if kept else None
        # A graph writes what was captured: all of its rows, to places that are looked up.
        return ring.replayable_step(kept, num_requests)

    def keep_queries(self, layer: int, query: Tensor, step: RingStep) -> None:
        """Keep a layer's queries; arguments as of :meth:`QueryRing.write`."""
        assert self.evictor.ring is not None
        self.evictor.ring.write(layer, query, step)

    def decode(
        self,
        layer: int,
        decodes: Served,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        scale: float,
    ) -> None:
        """Store and attend by our kernel; tensors as of its call."""
        assert self.decode_attention is not None
        # Kernels on a GPU look up where the arena is: it moves, and CUDA graphs outlive that.
        arena = self.decode_attention.arena_address if self.pages.uses_triton else self.cache.tables.arena
        rows = self._rows(layer, decodes, arena)
        self.decode_attention(query, key, value, output, rows, decodes.tokens, scale)

    def prefill(
        self,
        layer: int | None,
        prefills: Served,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        scale: float,
        sinks: Tensor | None,
    ) -> None:
        """Attend by our kernel for prompts; tensors as of its call.

        Args:
            layer: behind what the requests have in its pages; None: behind nothing.
        """
        assert self.prefill_attention is not None and prefills.new_tokens is not None
        rows = None if layer is None else self._rows(layer, prefills, self.cache.tables.arena)
        sinks = None if sinks is None else sinks.float().contiguous()
        self.prefill_attention(
            query,
            key,
            value,
            output,
            prefills.new_tokens,
            rows,
            prefills.tokens,
            scale,
            self.softcap,
            sinks,
        )

    def _rows(self, layer: int, served: Served, arena: Tensor) -> BatchRows:
        """The rows of some requests in a layer."""
        tables, first = self.cache.tables, layer * self.cache.num_kv_heads
        return BatchRows(
            arena, tables.row_starts, tables.kv_len, served.request_slots, first, served.new_tokens
        )

    @property
    def most_new_tokens(self) -> int:
        """The most tokens of a request in a step that the decode kernel takes."""
        return 0 if self.decode_attention is None else self.decode_attention.most_new_tokens

    @property
    def fewest_prefilled(self) -> int | None:
        """The fewest tokens of a request in a step that the kernel for prompts takes; None: there is no such kernel."""
        return None if self.prefill_attention is None else FEWEST_TOKENS


def attach(
    vllm_config: VllmConfig,
    options: Options,
    device: Device,
    model: torch.nn.Module,
    evicted: Mapping[str, Attention],
    kv_cache_config: Any,
    kv_caches: Mapping[str, Tensor],
    reserve: Tensor | None,
    ring: QueryRing | None,
) -> Rank:
    """Take over vLLM's KV memory as one pool of pages.

    Args:
        model: the worker's part of it.
        evicted: its evicted layers by their names, from the lowest on.
        kv_cache_config: vLLM's layout of the KV memory.
        kv_caches: its views by layer name, all over one allocation; other layers' are among them.
        reserve: as of :class:`vllm_kvevict.schedules.inputs.Sources`.
        ring: as of :class:`Evictor`.

    Raises:
        KVEvictionError: when evicted layers differ in their heads or softcap, or from the model's configuration.
    """
    stages, layers = evicted_layers_of_stages(vllm_config), list(evicted.values())
    mine, first = stages[get_pp_group().rank_in_group], layers[0]
    layer_map = _checked_map(vllm_config, evicted, kv_cache_config.kv_cache_groups)
    layout = _checked_layout(vllm_config, layers, kv_cache_config.kv_cache_groups)
    kept, max_requests = layer_map.blocks_kept(vllm_config), vllm_config.scheduler_config.max_num_seqs
    logits = [(layer.impl.scale, layer.impl.softcap) for layer in layers]
    storage = _as_pages(kv_caches[first.layer_name], layout.page_bytes)
    block_pages = _find_blocks(layer_map, kv_cache_config, first.layer_name, layout.page_bytes)
    group, softcap = first.num_heads // first.num_kv_heads, first.impl.softcap
    uses_our_kernel = options.kernels and first.impl.sinks is None
    may_serve = group if uses_our_kernel and not softcap else None
    pages, memory = _pages(device, storage, layout, vllm_config, may_serve, first)
    cache = _cache(memory, len(layers), pages.uses_triton, max_requests, is_empty=block_pages is not None)
    projections, rotary = _parts_of(model, layers, vllm_config, options)
    windows = pages.window_attention, options.kernel_windows
    sources = Sources(cache, projections.of, rotary.read, *windows, reserve)
    comm, is_behind = _tensor_comm(layout), device.is_asynchronous
    evictor = Evictor(cache, mine.start, stages[-1].stop, comm, sources, is_behind, logits, ring)
    return Rank(
        {name: index for index, name in enumerate(evicted)},
        cache,
        pages,
        CachedPrefixes(cache, options.check),
        evictor,
        projections,
        rotary,
        group,
        softcap,
        decode_attention=pages.decode_attention(cache, group, softcap) if uses_our_kernel else None,
        prefill_attention=pages.prefill_attention(cache, group) if options.kernels else None,
        decode_slots=torch.full((max_requests,), -1, dtype=torch.int64, device=storage.device),
        block_pages=block_pages,
        num_blocks=kv_cache_config.num_blocks,
        capacity=_capacity(kv_cache_config.num_blocks - kept, cache, block_pages),
    )


def _pages(
    device: Device,
    storage: Tensor,
    layout: KVLayout,
    vllm_config: VllmConfig,
    may_serve: int | None,
    layer: Attention,
) -> tuple[Pages, PageMemory]:
    """The pages, and their memory; raises KVEvictionError where no kernel can serve them.

    Args:
        may_serve: query heads of a KV head, if our kernels may serve pages in the model's dtype.
        layer: one of those that are evicted.
    """
    if not layout.is_quantised:
        pages: Pages = device.load(device.pages)(storage, layout, vllm_config, may_serve)
        return pages, PageMemory.probe(storage, layout, pages.write)
    if layer.impl.softcap or layer.impl.sinks is not None:
        raise KVEvictionError(
            f"--kv-eviction cannot be combined with --kv-cache-dtype {INT8} and a model with soft caps or attention "
            "sinks: leave --kv-cache-dtype out"
        )
    try:
        pages = device.load(device.quantised_pages)(storage, layout)
    except BuildError as error:
        raise KVEvictionError(
            f"--kv-eviction cannot serve --kv-cache-dtype {INT8}: {error}, or leave the flag out"
        ) from None
    return pages, PageMemory.quantised(
        storage, layout, pages.write, keys_are_transposed=not pages.uses_triton
    )


def _cache(
    memory: PageMemory, num_layers: int, triton: bool, max_requests: int, is_empty: bool
) -> PagedKVCache:
    """The rank's pages; empty where blocks become pages as they are needed."""
    requests = max_requests + 1  # a repeat may see copies, in a request slot of their own
    return PagedKVCache(
        memory, num_layers=num_layers, max_requests=requests, triton=triton, is_empty=is_empty
    )


def _find_blocks(layer_map: LayerMap, kv_cache_config: Any, layer: str, page_bytes: int) -> BlockPages | None:
    """Where the pages of blocks lie, if other layers use blocks of the same memory."""
    if layer_map.all_evicted:
        return None
    layout = next(tensor for tensor in kv_cache_config.kv_cache_tensors if layer in tensor.layers)
    return BlockPages.of(layout, kv_cache_config.num_blocks, page_bytes)


def _capacity(blocks: int, cache: PagedKVCache, block_pages: BlockPages | None) -> int:
    """The most pages that there can be.

    Args:
        blocks: that may become pages, where other layers use blocks, too.
    """
    return cache.pool.num_pages if block_pages is None else blocks * block_pages.per_block


def _parts_of(
    model: torch.nn.Module, layers: Sequence[Attention], vllm_config: VllmConfig, options: Options
) -> tuple[OutputProjections, ModelRotary]:
    """What some policies read of the model. Raises KVEvictionError if it lacks what the server's policy reads."""
    config = vllm_config.model_config
    projections = OutputProjections(model, layers)
    rotary = ModelRotary(model, layers, config.max_model_len, config.get_head_size())
    available = {PROJECTIONS: projections.available, ROTARY_EMBEDDING: rotary.available}
    for part in options.config.needs_of_model:
        if not available[part]:
            raise finds_none(options.policy, part.words)
    return projections, rotary


def _tensor_comm(layout: KVLayout) -> TensorComm | None:
    """The tensor-parallel group, None where it has one member."""
    group = get_tp_group()
    if group.world_size == 1:
        return None
    return TensorComm(group.device_group, group.rank_in_group, group.world_size, layout.model_rows)


def _as_pages(view: Tensor, page_bytes: int) -> Tensor:
    """All of the allocation under a view, [pages, page_elements]; what is left at its end stays unused."""
    raw = view.untyped_storage()
    pages = torch.empty(0, dtype=torch.uint8, device=view.device)
    pages.set_(raw, 0, (raw.nbytes() // page_bytes, page_bytes), (page_bytes, 1))
    return pages.view(view.dtype)


def _checked_layout(vllm_config: VllmConfig, layers: Sequence[Attention], groups: Sequence[Any]) -> KVLayout:
    """What layers store. Refuses a model whose layers differ, or whose configuration says something else: the
    front-end checks requests by that."""
    shapes = {(x.num_kv_heads, x.head_size, x.num_heads, x.impl.softcap) for x in layers}
    if len(shapes) != 1:
        raise KVEvictionError(
            "--kv-eviction needs the same heads, head size and softcap in every layer, and this model's differ: leave "
            "the flag out"
        )
    spec = next(group.kv_cache_spec for group in groups if is_evicted(group.kv_cache_spec))
    expected, found = layout_of(vllm_config), layout_of(vllm_config, spec)
    # Some models' layers have other head sizes than vLLM reads from their configuration.
    if found.rows != expected.rows:
        raise KVEvictionError(
            f"--kv-eviction cannot serve {vllm_config.model_config.model} as it is: by its config.json each rank has "
            f"{expected.rows} KV heads, but its layers have {found.rows}, so correct config.json"
        )
    return found


def _checked_map(vllm_config: VllmConfig, evicted: Iterable[str], groups: Sequence[Any]) -> LayerMap:
    """How vLLM groups the layers. Refuses a model whose layers are others than the front-end expects."""
    found = LayerMap.found(groups)
    _check_layers(vllm_config, evicted, stages_of(vllm_config)[get_pp_group().rank_in_group])
    _check_groups(vllm_config, found)
    return found


def _check_groups(vllm_config: VllmConfig, found: LayerMap) -> None:
    """Refuse a model beside whose draft model vLLM groups layers otherwise than the front-end expects, which counts
    memory by that."""
    expected = LayerMap.predicted(vllm_config)
    if expected.has_drafts and (sizes := _sizes(found)) != _sizes(expected):
        raise KVEvictionError(
            f"--kv-eviction cannot serve {vllm_config.model_config.model} with its draft model: vLLM groups their "
            f"layers as {sizes}, expected {_sizes(expected)}: please report it"
        )


def _sizes(layers: LayerMap) -> list[tuple[str, int]]:
    """The kind of each group of layers, and how many it has."""
    others = zip(layers.specs, layers.others, strict=True)
    kinds = [("evicted", len(group)) for group in layers.evicted]
    return [*kinds, *((type(spec).__name__, len(group)) for spec, group in others)]


def _check_layers(vllm_config: VllmConfig, found: Iterable[str], stage: range) -> None:
    """Refuse a model that has other layers, by their names, than its configuration says: the front-end checks requests
    by that."""
    expected = [layer for layer in LayerMap.predicted(vllm_config).evicted_layers if layer in stage]
    wrong = sorted(set(expected) ^ set(map(extract_layer_index, found)))
    if wrong:
        raise KVEvictionError(
            f"--kv-eviction cannot serve {vllm_config.model_config.model} as it is: its config.json and the model "
            f"disagree about which layers of this rank have full attention, {len(wrong)} of them from layer {wrong[0]} "
            "on, so leave the flag out"
        )
