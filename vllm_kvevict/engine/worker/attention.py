"""Attention over ragged pages: one sequence per (request, KV head)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

from vllm_kvevict.engine.config import ENGINE_DEFAULTS, KEY, KVEvictionError
from vllm_kvevict.engine.worker.batch import Batch, ByLayer, Sequences, split_by_head
from vllm_kvevict.engine.worker.runtime import get_runtime
from vllm_kvevict.engine.worker.step import StepState
from vllm_kvevict.kernels.layout import KVLayout
from vllm_kvevict.schedules.inputs import FreshEntries, LayerStep


def block_sizes() -> list[int | MultipleOf]:
    """Sizes of vLLM's blocks that our backends support: blocks only measure memory here, in whole pages."""
    vllm_config = get_current_vllm_config_or_none()
    options = vllm_config.additional_config.get(KEY, {}) if vllm_config is not None else {}
    return [MultipleOf(options.get("page_size", ENGINE_DEFAULTS["page_size"]))]


def with_scales(spec: AttentionSpec) -> AttentionSpec:
    """vLLM's description of a layer's KV with room for the scales of entries in 8 bits."""
    if spec.kv_quant_mode is not KVQuantMode.INT8_PER_TOKEN_HEAD:
        return spec
    entry = KVLayout.of_heads(1, 1, 1, spec.head_size, "", is_quantised=True)
    return replace(spec, state_content_bytes=entry.entry_bytes)


class RaggedBuilder(AttentionMetadataBuilder[StepState]):
    """Builds a step's batch once for all layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepState:
        return get_runtime().build(common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> StepState:
        return get_runtime().build_dummy(common_attn_metadata)


def _refuse(kinds: dict[str, bool]) -> None:
    """Refuse layers with any of these kinds of attention."""
    for name, present in kinds.items():
        if present:
            raise KVEvictionError(f"--kv-eviction does not support models with {name}: leave the flag out")


class RaggedImpl(AttentionImpl):
    """Attention of one layer."""

    def __init__(  # noqa: PLR0913  as vLLM calls it
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ):
        _refuse(
            {
                "ALiBi": alibi_slopes is not None,
                "sliding-window attention": sliding_window is not None,
                "KV shared between layers": kv_sharing_target_layer_name is not None,
                "attention that is not a decoder's": attn_type != AttentionType.DECODER,
            }
        )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.softcap = float(logits_soft_cap or 0.0)
        self.sinks = sinks

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StepState | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store the step's keys and values, attend, evict.

        Args:
            query: [tokens, Hq, d]; key, value: [tokens, Hkv, d]; output: [tokens, Hq, d], filled in place.
            kv_cache: vLLM's view, unused: pages are placed by the runtime.
            attn_metadata: the step, or None in profiling runs.
        """
        if attn_metadata is None or attn_metadata.batch is None:
            return output.zero_()
        runtime, batch = get_runtime(), attn_metadata.batch
        pages, index = runtime.rank.pages, runtime.rank.layer_index[layer.layer_name]
        key, value = pages.encode(key, value)
        if batch.decodes:
            runtime.rank.decode(index, batch.decodes, query, key, value, output, self.scale)
        if batch.entry_slots is not None:
            self._serve(index, batch, query, key, value, output)
        for request in batch.by_layer:
            self._serve_by_layer(index, request, query, key, value, output)
        if attn_metadata.ring is not None:
            runtime.rank.keep_queries(index, query, attn_metadata.ring)
        if attn_metadata.evictions:
            not_stored = {
                request.request_slot: FreshEntries(
                    index, pages.fields(key[request.rows], value[request.rows])
                )
                for request in batch.by_layer
                if request.is_prefilled
            }
            step = LayerStep(index, query, self.scale, self.softcap, not_stored)
            runtime.after_attention(attn_metadata, step)
        return output

    def _serve(
        self, layer: int, batch: Batch, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        """Store the batch's entries and attend to them."""
        rank, tokens, heads = get_runtime().rank, batch.num_tokens, self.num_kv_heads
        assert batch.entry_slots is not None
        rank.pages.append(key[:tokens], value[:tokens], batch.entry_slots[layer])
        if batch.prefills is not None:
            rank.prefill(layer, batch.prefills, query, key, value, output, self.scale, self.sinks)
        if not batch.calls:
            return
        # One row holds the query heads of one KV head; a request's rows are wanted head by head.
        queries = query[:tokens].reshape(tokens * heads, -1, self.head_size)
        result = output[:tokens].view(tokens * heads, -1, self.head_size)
        for call in batch.calls:
            sequences = call.sequences(layer)
            if call.gather is None:
                self._attend(queries, result, sequences)
            else:
                gathered = queries.index_select(0, call.gather)
                part = torch.empty_like(gathered)
                self._attend(gathered, part, sequences)
                result.index_copy_(0, call.gather, part)

    def _serve_by_layer(
        self, layer: int, request: ByLayer, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        """The same for a request that takes the layer's pages only now, or when it is evicted there."""
        rank, rows, heads = get_runtime().rank, request.rows, self.num_kv_heads
        tokens = rows.stop - rows.start
        if request.is_prefilled:
            rank.cache.expect(request.request_slot, layer, tokens)
            rank.prefill(None, request.served, query, key, value, output, self.scale, self.sinks)
            return
        entry_slots, table = rank.cache.fill(request.request_slot, layer, tokens)
        if rank.pages.attend is None:
            rank.decode(layer, request.served, query, key, value, output, self.scale)
            return
        rank.pages.append(key[rows], value[rows], entry_slots)
        by_head = query[rows].reshape(tokens, heads, -1, self.head_size).transpose(0, 1)
        queries = by_head.flatten(0, 1).contiguous()
        part = torch.empty_like(queries)
        self._attend(queries, part, request.sequences(table))
        output[rows].view(tokens, heads, -1).copy_(part.view(heads, tokens, -1).transpose(0, 1))

    def _attend(self, queries: Tensor, output: Tensor, sequences: Sequences) -> None:
        """Attention of every sequence, arguments as of :meth:`Pages.attend`."""
        attend = get_runtime().rank.pages.attend
        assert attend is not None
        if self.sinks is None:
            attend(queries, output, sequences, self.scale, self.softcap)
            return
        # Each query head has a sink of its own, and a call knows the query heads of one KV head.
        for rows, of_head, sinks in zip(
            *split_by_head(sequences, len(queries), self.num_kv_heads),
            self.sinks.view(self.num_kv_heads, -1),
            strict=True,
        ):
            part = torch.empty_like(queries[rows])
            attend(queries[rows], part, of_head, self.scale, self.softcap, sinks)
            output[rows] = part
