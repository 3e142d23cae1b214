"""Whether our CPU kernels are faster than vLLM's op on this machine, for the shape that the server has."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_kvevict.cache.format import dtype_of
from vllm_kvevict.engine.worker.batch import Sequences
from vllm_kvevict.engine.worker.timings import Times
from vllm_kvevict.kernels.decode_attention import BatchRows, DecodeAttention
from vllm_kvevict.kernels.layout import KVLayout
from vllm_kvevict.kernels.prefill_attention import PrefillAttention

STEP_BYTES = 8 << 20
"""KV that a timed step reads."""
ROUNDS = 6
"""Timed steps of each side. Every step reads KV of its own, so that it comes from memory as in a server."""
PAGES_PER_ROW = 32
PREFILL_ROUNDS = 5
"""Timed prefills of each side: they compute more than they read, so that their times differ less."""


@dataclass(frozen=True)
class Shape:
    """Attention of one layer.

    Attributes:
        layout: of its pages.
        group: query heads that share a KV head.
        new_tokens: of each request in a step.
    """

    layout: KVLayout
    group: int
    new_tokens: int = 1

    def vectors(self, requests: int) -> tuple[Tensor, Tensor]:
        """A query [T, Hq, d], and a key or value [T, Hkv, d], of some numbers; T: the new tokens of all requests."""
        key, heads = self.layout["key"], self.layout.rows
        shape = requests * self.new_tokens, heads * self.group, key.numbers
        query = torch.full(shape, 0.5, dtype=dtype_of(key))
        return query, query[:, :heads].contiguous()

    def rows(self, table: Tensor, new_tokens: Tensor | None = None) -> BatchRows:
        """The rows of requests whose pages, int32 [requests, heads, pages], are full."""
        requests, heads, width = table.shape
        starts = torch.arange(0, table.numel(), width, dtype=torch.int32).view(requests, heads)
        lengths = torch.full_like(starts, width * self.layout.page_size)
        return BatchRows(table.flatten(), starts, lengths, torch.arange(requests), 0, new_tokens)

    def new_entry_slots(self, table: Tensor) -> Tensor:
        """Where the new entries of such requests go, int64, in the order (token, head)."""
        size = self.layout.page_size
        positions = torch.arange(table.shape[2] * size)[-self.new_tokens :]
        slots = table[..., positions // size].long() * size + positions % size
        return slots.transpose(1, 2).flatten()


Step = Callable[[Tensor], Tensor]
"""Store the new tokens of each request, and attend: the attention's output [requests * new tokens, Hq, d].

The argument, int32 [requests, heads, pages], says which pages they have; these are full with the new tokens.
"""


def time_decodes(shape: Shape, make_pages: Callable[[Tensor], Any]) -> Times:
    """Time decode steps of our kernel and of vLLM's op in turns, on one thread; takes about 0.1 s and 100 MB.

    Args:
        shape: of the server's attention.
        make_pages: makes a :class:`vllm_kvevict.engine.worker.cpu.CPUPages` over a storage.

    Raises:
        BuildError: the kernel cannot be compiled here.
    """
    layout = shape.layout
    requests = max(1, STEP_BYTES // (PAGES_PER_ROW * layout.page_bytes * layout.rows))
    tables, storage = _pages(shape, 2 * ROUNDS, requests, PAGES_PER_ROW)
    return _time(tables, kernel_step(shape, storage), op_step(shape, make_pages(storage)))


def time_prefills(shape: Shape, make_pages: Callable[[Tensor], Any]) -> Times:
    """Time steps of one request that reads as many new tokens as it has, in turns and on one thread, as above."""
    table_pages = -(-2 * shape.new_tokens // shape.layout.page_size)
    tables, storage = _pages(shape, 2 * PREFILL_ROUNDS, 1, table_pages)
    pages = make_pages(storage)
    return _time(tables, prefill_step(shape, pages, storage), op_step(shape, pages))


def _pages(shape: Shape, steps: int, requests: int, pages_per_row: int) -> tuple[Tensor, Tensor]:
    """Pages of each step, int32 [steps, requests, heads, pages], all different, and their storage."""
    # Written to, since memory that never was is one page of zeros, which would stay in the processor's cache.
    layout = shape.layout
    pages = steps * requests * layout.rows * pages_per_row
    storage = torch.full((pages, layout.page_elements), 0.5, dtype=dtype_of(layout["key"]))
    tables = torch.arange(pages, dtype=torch.int32).view(steps, requests, layout.rows, pages_per_row)
    return tables, storage


def _time(tables: Tensor, *sides: "Step") -> Times:
    """Time both sides in turns, on one thread, each with a table of its own."""
    milliseconds: tuple[list[float], list[float]] = ([], [])
    with _one_thread():
        for number, table in enumerate(tables):
            started = time.thread_time()
            sides[number % 2](table)
            milliseconds[number % 2].append(1e3 * (time.thread_time() - started))
    return Times(*map(min, milliseconds))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Threads would wait for one another, and for whoever else starts on this machine at the same time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def kernel_step(shape: Shape, storage: Tensor) -> Step:
    """A step by our decode kernel."""
    kernel = DecodeAttention(storage, shape.layout.page_size, shape.new_tokens)

    def run(table: Tensor) -> Tensor:
        query, entry = shape.vectors(len(table))
        output = torch.empty_like(query)
        new_tokens = torch.full((len(table),), shape.new_tokens, dtype=torch.int32)
        kernel(query, entry, entry, output, shape.rows(table, new_tokens), None, 1.0)
        return output

    return run


def prefill_step(shape: Shape, pages: Any, storage: Tensor) -> Step:
    """A step by our kernel for prompts, which leaves storing to ``pages``, made over the storage, as for the op."""
    kernel = PrefillAttention(storage.dtype, storage, shape.layout.page_size)

    def run(table: Tensor) -> Tensor:
        query, entry = shape.vectors(len(table))
        pages.append(entry, entry, shape.new_entry_slots(table))
        output = torch.empty_like(query)
        new_tokens = torch.full((len(table),), shape.new_tokens, dtype=torch.int32)
        kernel(query, entry, entry, output, new_tokens, shape.rows(table), None, 1.0)
        return output

    return run


def op_step(shape: Shape, pages: Any) -> Step:
    """A step by vLLM's op, over ``pages`` (:class:`vllm_kvevict.engine.worker.cpu.CPUPages`)."""

    tokens, size = shape.new_tokens, shape.layout.page_size

    def run(table: Tensor) -> Tensor:
        requests, heads, width = table.shape
        query, entry = shape.vectors(requests)
        pages.append(entry, entry, shape.new_entry_slots(table))
        # The op wants the queries of one KV head after the other.
        by_token = query.view(requests, tokens, heads, shape.group, -1)
        by_head = by_token.transpose(1, 2).flatten(0, 2)
        sequences = Sequences(
            seq_lens=torch.full((requests * heads,), width * size, dtype=torch.int32),
            block_table=table.flatten(0, 1),
            query_start_loc=torch.arange(requests * heads + 1, dtype=torch.int32) * tokens,
            longest=width * size,
            longest_query=tokens,
        )
        result = torch.empty_like(by_head)
        pages.attend(by_head, result, sequences, 1.0, 0.0)
        return result.view(requests, heads, tokens, -1).transpose(1, 2).reshape(query.shape)

    return run
