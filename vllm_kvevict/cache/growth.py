"""How rows become longer and shorter by tokens, each of which is an entry of every row of its request.

Owns nothing. The host says how many pages that takes or frees (:meth:`RowLengths.demand`), and the device finds the
rows that they are of, so nothing waits for it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.cache.rows import RowTables
from vllm_kvevict.cache.steps import Extension, to_device
from vllm_kvevict.kernels.masks import true_places


def by_tokens(tokens: IntArray) -> Iterator[tuple[IntArray, int]]:
    """Parts of a batch that add equally many tokens to each request, and how many: first all single ones, if any."""
    # Requests with drafts add several tokens at each step, usually equally many.
    for count in np.unique(tokens[tokens > 0]).tolist():
        yield np.flatnonzero(tokens == count), count


def part_of(batch: torch.Tensor, part: IntArray) -> torch.Tensor:
    """Some elements of a batch, int64 [B] on the device."""
    return batch if len(part) == len(batch) else batch[to_device(part, batch.device)]


def append(
    rows: RowTables,
    request_slots: torch.Tensor,
    tokens: int,
    pages: IntArray,
    partial: IntArray,
    triton: bool,
) -> None:
    """Add entries to each row of requests (int64 [B]); ``pages`` and ``partial`` are int64 [B], as of ``demand``."""
    tables, size, count, ending = rows.tables, rows.page_size, int(pages.sum()), int(partial.sum())
    if triton and tokens == 1:
        from vllm_kvevict.kernels.append_pages import append_pages

        taken, first = rows.pool.allocate(count), to_device(pages.cumsum() - pages, rows.device)
        arguments = tables.arena, tables.row_starts, tables.kv_len, request_slots, taken, first
        append_pages(*arguments, size, rows.memory.storage)
        return
    before = tables.kv_len.index_select(0, request_slots)
    kv_len = before + tokens
    if count:
        starts = tables.row_starts.index_select(0, request_slots)
        column, new = rows.pages_for(before)[..., None], rows.pages_for(kv_len)[..., None]
        if tokens > 1:
            # A row that ends within a page needs no more new ones than a row that ends with one.
            column = column + torch.arange(-(-tokens // size), dtype=torch.int32, device=rows.device)
        taken = rows.pool.allocate_stretch(count) if tokens >= size else rows.pool.allocate(count)
        tables.arena[(starts[..., None] + column).flatten()[true_places(column < new, count)]] = taken
        if ending < count:
            # Some new pages become full, so tokens >= page_size and every row ends in a new page.
            taken = tables.pages_at(
                (starts + new[..., 0] - 1).flatten()[true_places(kv_len % size > 0, ending)]
            )
        rows.memory.blank_pages(taken)
    tables.kv_len.index_copy_(0, request_slots, kv_len)


def grow(
    rows: RowTables, batch: torch.Tensor, tokens: IntArray, pages: IntArray, partial: IntArray, triton: bool
) -> None:
    """Add tokens, int64 [B], to requests (int64 [B] on the device); arguments as of :func:`append`."""
    for part, count in by_tokens(tokens):
        append(rows, part_of(batch, part), count, pages[part], partial[part], triton)


def fill(rows: RowTables, request_slot: int, empty: slice, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give some of a request's rows, which are empty, pages for so many tokens, as of :meth:`PagedKVCache.fill`."""
    heads, size = empty.stop - empty.start, rows.page_size
    columns = -(-tokens // size)
    pages = rows.pool.allocate_stretch(heads * columns).view(heads, -1)
    rows.tables.region(request_slot)[empty, :columns] = pages
    if tokens % size:
        rows.memory.blank_pages(pages[:, -1])
    _set_lengths(rows, request_slot, empty, np.full(heads, tokens))
    entry = torch.arange(tokens, device=rows.device)
    places = pages.to(torch.int64)[:, entry // size].mul_(size).add_(entry % size)
    return places.t().flatten(), pages


def expect(rows: RowTables, request_slot: int, empty: slice, tokens: int) -> None:
    """Count so many tokens in some of a request's rows, which are empty and stay so until :func:`fill_chosen`."""
    rows.lengths.replace(request_slot, empty.start, np.full(empty.stop - empty.start, tokens))


class Chosen(NamedTuple):
    """Entries that are to be written, row after row.

    Attributes:
        row: int64 [N], of each, counted from the first of the rows.
        token: int64 [N], which token it is.
        place: int64 [N], where it goes, as of :func:`newest`.
        spared: how many pages more all tokens would have taken.
    """

    row: torch.Tensor
    token: torch.Tensor
    place: torch.Tensor
    spared: int


def fill_chosen(rows: RowTables, request_slot: int, expecting: slice, kept: Sequence[torch.Tensor]) -> Chosen:
    """Give rows that expect tokens pages for those that stay: of each row, int64."""
    lengths = np.array([tokens.numel() for tokens in kept], np.int64)
    row_of_page, column, taken = rows.take_for(lengths)
    table = rows.tables.region(request_slot)[expecting]
    table[row_of_page, column] = taken
    spared = _set_lengths(rows, request_slot, expecting, lengths)
    row, entry = rows.first_entries(to_device(lengths, rows.device), int(lengths.sum()))
    pages, places = rows.places(table, row, entry)
    return Chosen(row, torch.cat(list(kept)), pages.mul_(rows.page_size).add_(places), spared)


def _set_lengths(rows: RowTables, request_slot: int, changed: slice, lengths: IntArray) -> int:
    """Some of a request's rows now have these lengths; how many pages they fill less."""
    rows.tables.kv_len[request_slot, changed].copy_(to_device(lengths.astype(np.int32), rows.device))
    return rows.lengths.replace(request_slot, changed.start, lengths)


def newest(rows: RowTables, request_slots: torch.Tensor, tokens: int) -> torch.Tensor:
    """Entry slots of the last ``tokens`` entries of each row of requests (int64 [B]), int64 [B, num_rows, tokens]."""
    tables, size = rows.tables, rows.page_size
    kv_len = tables.kv_len.index_select(0, request_slots)[..., None]
    entry = kv_len + torch.arange(-tokens, 0, dtype=torch.int32, device=rows.device)
    column = entry // size
    pages = tables.pages_at(tables.row_starts.index_select(0, request_slots)[..., None] + column)
    return pages.to(torch.int64).mul_(size).add_(entry - column * size)


def entry_slots(rows: RowTables, step: Extension, layers: int, heads: int) -> torch.Tensor:
    """As of :meth:`PagedKVCache.entry_slots`."""
    tokens = step.tokens
    result = torch.empty((layers, int(tokens.sum()) * heads), dtype=torch.int64, device=rows.device)
    first = (tokens.cumsum() - tokens) * heads
    for part, count in by_tokens(tokens):
        places = newest(rows, part_of(step.request_slots, part), count)
        of_layers = places.view(len(part), layers, heads, count).permute(1, 0, 3, 2).flatten(1)
        if len(part) == len(tokens):
            return of_layers.contiguous()
        at = (first[part, None] + np.arange(count * heads)).ravel()
        result[:, to_device(at, rows.device)] = of_layers
    return result


def drop_newest(rows: RowTables, request_slots: IntArray, dropped: IntArray) -> None:
    """Drop entries, int64 [B], of each row of requests, int64 [B], and free the pages that these filled alone."""
    freed, batch = rows.lengths.truncate(request_slots, dropped), to_device(request_slots, rows.device)
    before = rows.tables.kv_len.index_select(0, batch)
    after = before - to_device(dropped, rows.device).to(torch.int32)[:, None]
    most = int(rows.pages_for(dropped).max(initial=0))
    column = rows.pages_for(after)[..., None] + torch.arange(most, dtype=torch.int32, device=rows.device)
    places = rows.tables.row_starts.index_select(0, batch)[..., None] + column
    behind = true_places(column < rows.pages_for(before)[..., None], int(freed.sum()))
    rows.pool.free(rows.tables.pages_at(places.flatten()[behind]))
    rows.tables.kv_len.index_copy_(0, batch, after)
