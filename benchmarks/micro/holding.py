"""Requests that hold a ragged share of a context, and a decode step of theirs: the project's cache, no engine."""

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.worker.batch import Call, lay_out
from vllm_kvevict.kernels.decode_attention import DecodeAttention, Rows

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 8, 4, 64, 32
GROUP = QUERY_HEADS // KV_HEADS
OP, KERNEL = "vLLM's op", "our kernel"


class Holding:
    """A batch of requests that hold some share of a context, and their decode step by OP or KERNEL."""

    def __init__(self, batch: int, context: int, share: float, attention: str, seed: int, dtype: str):
        self.dtype: torch.dtype = getattr(torch, dtype)
        # The kernel reads pages in the order that fp32 has; with AMX the op has another one for bfloat16.
        self.isa = _get_attn_isa(torch.float32 if attention == KERNEL else self.dtype, PAGE, HEAD_DIM)
        torch.cpu._init_amx()  # a process that multiplies no matrices has not asked for it yet
        pages = LAYERS * KV_HEADS * batch * (-(-context // PAGE) + 2)
        storage = torch.randn(pages, 2 * PAGE * HEAD_DIM).to(self.dtype)
        self.cache = PagedKVCache(
            storage,
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            page_size=PAGE,
            max_requests=batch,
            write=self._write,
        )
        self.key_pages, self.value_pages = self._views(storage)
        self.kernel = DecodeAttention(storage, PAGE) if attention == KERNEL else None
        random = torch.Generator().manual_seed(seed)
        slots = [self.cache.open() for _ in range(batch)]
        for slot in slots:
            self.cache.extend([slot], [context])
            if share < 1:
                self._evict(slot, context, share, random)
        self.step = self.cache.extend(slots, [1] * batch)
        self.calls = lay_out(self.cache, self.step, most_new_tokens=0).calls
        self.query = torch.randn(batch, QUERY_HEADS, HEAD_DIM).to(self.dtype)
        self.entries = torch.randn(batch, KV_HEADS, HEAD_DIM).to(self.dtype)
        self.output = torch.empty_like(self.query)

    def _evict(self, slot: int, context: int, share: float, random: torch.Generator) -> None:
        for layer in range(LAYERS):
            weights = torch.rand(KV_HEADS, generator=random) + 0.25
            counts = (weights / weights.sum() * share * context * KV_HEADS).long().clamp(1, context)
            kept = [torch.randperm(context, generator=random)[:count].sort().values for count in counts]
            self.cache.compact(slot, layer, kept)
        self.cache.settle(slot)

    def _views(self, storage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = storage.view(storage.shape[0], 1, -1, HEAD_DIM).chunk(2, dim=2)
        return keys, values

    def _write(
        self, storage: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        ops.cpu_attn_reshape_and_cache(
            keys.unsqueeze(1), values.unsqueeze(1), *self._views(storage), slots, self.isa
        )

    def plan(self, call: Call, layer: int) -> torch.Tensor:
        """The op's own schedule of a call, which it needs anew in every layer."""
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=call.seq_lens.shape[1],
            num_heads=GROUP,
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            seq_lens=call.seq_lens[layer],
            dtype=self.dtype,
            query_start_loc=call.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )

    def attend(self, call: Call, layer: int, query: torch.Tensor, output: torch.Tensor) -> None:
        """Attention of one layer by vLLM's op; ``query`` and ``output`` are [rows, GROUP, HEAD_DIM] of the call."""
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=self.key_pages,
            value_cache=self.value_pages,
            output=output,
            query_start_loc=call.query_start_loc,
            seq_lens=call.seq_lens[layer],
            scale=HEAD_DIM**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=call.block_tables[layer],
            softcap=0.0,
            scheduler_metadata=self.plan(call, layer),
            s_aux=None,
        )

    def decode(self) -> None:
        """Attention of one step, all layers; the kernel stores the new entries, too."""
        if self.kernel:
            tables = self.cache.tables
            for layer in range(LAYERS):
                rows = Rows(
                    tables.arena, tables.row_starts, tables.kv_len, self.step.request_slots, layer * KV_HEADS
                )
                self.kernel(self.query, self.entries, self.entries, self.output, rows, None, HEAD_DIM**-0.5)
            return
        (call,) = self.calls
        query, output = self.query.view(-1, GROUP, HEAD_DIM), self.output.view(-1, GROUP, HEAD_DIM)
        for layer in range(LAYERS):
            self.attend(call, layer, query, output)
