"""Requests that hold a ragged share of a context, and a decode step of theirs: the project's cache, no engine."""

import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_kvevict.cache import PagedKVCache, PageMemory
from vllm_kvevict.engine.worker.batch import lay_out
from vllm_kvevict.engine.worker.cpu import CPUPages
from vllm_kvevict.kernels.decode_attention import BatchRows, DecodeAttention
from vllm_kvevict.kernels.layout import KVLayout

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 8, 4, 64, 32
GROUP = QUERY_HEADS // KV_HEADS
OP, KERNEL = "vLLM's op", "our kernel"


class Holding:
    """A batch of requests that hold some share of a context, and their decode step by OP or KERNEL."""

    def __init__(self, batch: int, context: int, share: float, attention: str, seed: int, dtype: str):
        self.dtype: torch.dtype = getattr(torch, dtype)
        pages = LAYERS * KV_HEADS * batch * (-(-context // PAGE) + 2)
        layout = KVLayout.of_heads(PAGE, KV_HEADS, KV_HEADS, HEAD_DIM, dtype)
        storage = torch.randn(pages, layout.page_elements).to(self.dtype)
        self.pages = CPUPages(storage, layout, None)
        if attention == KERNEL:
            # It reads pages in the order that fp32 has; with AMX the op has another one for bfloat16.
            self.pages.isa = _get_attn_isa(torch.float32, PAGE, HEAD_DIM)
        memory = PageMemory.probe(storage, layout, self.pages.write)
        self.cache = PagedKVCache(memory, num_layers=LAYERS, max_requests=batch)
        self._kernel = DecodeAttention(storage, PAGE)
        self.decode = self.by_kernel if attention == KERNEL else self.by_op
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

    def by_op(self) -> None:
        """Attention of one step, all layers."""
        (call,) = self.calls
        query, output = self.query.view(-1, GROUP, HEAD_DIM), self.output.view(-1, GROUP, HEAD_DIM)
        for layer in range(LAYERS):
            self.pages.attend(query, output, call.sequences(layer), HEAD_DIM**-0.5, 0.0)

    def by_kernel(self) -> None:
        """The same, and it stores the new entries."""
        tables = self.cache.tables
        for layer in range(LAYERS):
            rows = BatchRows(
                tables.arena, tables.row_starts, tables.kv_len, self.step.request_slots, layer * KV_HEADS
            )
            self._kernel(self.query, self.entries, self.entries, self.output, rows, None, HEAD_DIM**-0.5)
