"""Requests that hold a ragged share of a context, and a decode step of theirs: the project's cache, no engine."""

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_kvevict.cache import PagedKVCache, PageMemory
from vllm_kvevict.engine.worker.batch import lay_out
from vllm_kvevict.engine.worker.cpu import CPUPages
from vllm_kvevict.engine.worker.cpu_quantised import QuantisedCPUPages
from vllm_kvevict.kernels.decode_attention import BatchRows, DecodeAttention
from vllm_kvevict.kernels.layout import KVLayout
from vllm_kvevict.kernels.quantise import fields

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 8, 4, 64, 32
GROUP = QUERY_HEADS // KV_HEADS
OP, KERNEL, EIGHT_BITS = "vLLM's op", "our kernel", "our kernel, 8 bits"


class Holding:
    """A batch of requests that hold some share of a context, and their decode step by OP, KERNEL or EIGHT_BITS."""

    def __init__(self, batch: int, context: int, share: float, attention: str, seed: int, dtype: str):
        self.dtype: torch.dtype = getattr(torch, dtype)
        pages = LAYERS * KV_HEADS * batch * (-(-context // PAGE) + 2)
        layout = KVLayout.of_heads(PAGE, KV_HEADS, KV_HEADS, HEAD_DIM, dtype, attention == EIGHT_BITS)
        memory = self._memory(layout, pages, attention)
        self.cache = PagedKVCache(memory, num_layers=LAYERS, max_requests=batch)
        self._kernel = DecodeAttention(memory.storage, PAGE, dtype=self.dtype)
        self.decode = self.by_op if attention == OP else self.by_kernel
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

    def _memory(self, layout: KVLayout, pages: int, attention: str) -> PageMemory:
        if layout.is_quantised:
            storage = torch.randint(-127, 128, (pages, layout.page_bytes), dtype=torch.int8)
            for field in fields(storage, PAGE):
                field.scales.fill_(1 / 64)
            self.pages: Any = QuantisedCPUPages(storage, layout)
            return PageMemory.quantised(storage, layout, self.pages.write, keys_are_transposed=True)
        storage = torch.randn(pages, layout.page_elements).to(self.dtype)
        self.pages = CPUPages(storage, layout, None)
        if attention == KERNEL:
            # It reads pages in the order that fp32 has; with AMX the op has another one for bfloat16.
            self.pages.isa = _get_attn_isa(torch.float32, PAGE, HEAD_DIM)
        return PageMemory.probe(storage, layout, self.pages.write)

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
            key, value = self.pages.encode(self.entries, self.entries)
            self._kernel(self.query, key, value, self.output, rows, None, HEAD_DIM**-0.5)
