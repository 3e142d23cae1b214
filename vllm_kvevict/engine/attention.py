"""Attention over ragged pages on a CPU: one sequence per (request, KV head)."""

from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from vllm_kvevict.engine.batch import Batch, Whole
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.engine.runtime import StepState, get_runtime


class RaggedCPUBackend(CPUAttentionBackend):
    """Stands in for vLLM's CPU backend in workers that evict."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type["RaggedCPUImpl"]:  # type: ignore[override]
        return RaggedCPUImpl

    @staticmethod
    def get_builder_cls() -> type["RaggedCPUBuilder"]:  # type: ignore[override]
        return RaggedCPUBuilder


class RaggedCPUBuilder(AttentionMetadataBuilder[StepState]):
    """Builds a step's batch once for all layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepState:
        return get_runtime().build(common_attn_metadata)


class RaggedCPUImpl(AttentionImpl):
    """Attention of one layer."""

    def __init__(
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
        unsupported = {
            "ALiBi": alibi_slopes is not None,
            "sliding-window attention": sliding_window is not None,
            "KV shared between layers": kv_sharing_target_layer_name is not None,
            "attention sinks": sinks is not None,
            "attention that is not a decoder's": attn_type != AttentionType.DECODER,
        }
        for name, present in unsupported.items():
            if present:
                raise KVEvictionError(
                    f"--kv-eviction does not support models with {name}: leave the flag out"
                )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.softcap = float(logits_soft_cap or 0.0)

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
        if attn_metadata is None:
            return output.zero_()
        runtime, batch = get_runtime(), attn_metadata.batch
        index = runtime.layer_index[layer.layer_name]
        if batch.decodes:
            runtime.decode(index, batch.decodes, query, key, value, output, self.scale)
        if batch.write_slots is not None:
            self._serve(index, batch, query, key, value, output)
        for whole in batch.wholes:
            self._serve_whole(index, whole, query, key, value, output)
        if attn_metadata.prefills:
            runtime.after_attention(index, attn_metadata, query, self.scale, self.softcap)
        return output

    def _serve(
        self, layer: int, batch: Batch, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        """Store the batch's entries and let vLLM's op attend to them."""
        runtime, tokens, heads = get_runtime(), batch.num_tokens, self.num_kv_heads
        assert batch.write_slots is not None
        runtime.append(
            key[:tokens].reshape(tokens * heads, self.head_size),
            value[:tokens].reshape(tokens * heads, self.head_size),
            batch.write_slots[layer],
        )
        # One row holds the query heads of one KV head; the op wants a request's rows head by head.
        queries = query[:tokens].reshape(tokens * heads, -1)
        result = output[:tokens].view(tokens * heads, -1)
        for call in batch.calls:
            tables = call.seq_lens[layer], call.block_tables[layer], call.query_start_loc
            if call.gather is None:
                self._attend(queries, result, *tables)
            else:
                mine = queries.index_select(0, call.gather)
                part = torch.empty_like(mine)
                self._attend(mine, part, *tables)
                result.index_copy_(0, call.gather, part)

    def _serve_whole(
        self, layer: int, whole: Whole, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> None:
        """The same for a request that takes the layer's pages only now."""
        runtime, rows, heads = get_runtime(), whole.rows, self.num_kv_heads
        tokens = rows.stop - rows.start
        slots, pages = runtime.cache.fill(whole.slot, layer, tokens)
        runtime.append(
            key[rows].reshape(tokens * heads, self.head_size),
            value[rows].reshape(tokens * heads, self.head_size),
            slots,
        )
        by_head = query[rows].reshape(tokens, heads, -1).transpose(0, 1).flatten(0, 1).contiguous()
        part = torch.empty_like(by_head)
        self._attend(by_head, part, whole.seq_lens, pages, whole.query_start_loc)
        output[rows].view(tokens, heads, -1).copy_(part.view(heads, tokens, -1).transpose(0, 1))

    def _attend(
        self, queries: Tensor, result: Tensor, seq_lens: Tensor, block_table: Tensor, query_start_loc: Tensor
    ) -> None:
        runtime = get_runtime()
        group = self.num_heads // self.num_kv_heads
        ops.cpu_attention_with_kv_cache(
            query=queries.view(-1, group, self.head_size),
            key_cache=runtime.key_pages,
            value_cache=runtime.value_pages,
            output=result.view(-1, group, self.head_size),
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=block_table,
            softcap=self.softcap,
            # Lengths differ from layer to layer, so this cannot be made once per step.
            scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
                num_reqs=seq_lens.shape[0],
                num_heads=group,
                num_kv_heads=1,
                head_dim=self.head_size,
                seq_lens=seq_lens,
                dtype=queries.dtype,
                query_start_loc=query_start_loc,
                causal=True,
                sliding_window_size=-1,
                isa=runtime.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            ),
            s_aux=None,
        )
