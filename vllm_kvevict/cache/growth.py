"""How rows become longer and shorter by tokens, each of which is an entry of every row of its request.

Owns nothing. The host says how many pages that takes or frees (:meth:`RowLengths.demand`), and the device finds the
rows that they are of, so nothing waits for it.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.cache.rows import Rows
from vllm_kvevict.cache.steps import Step, to_device, where


def by_tokens(tokens: IntArray) -> Iterator[tuple[IntArray, int]]:
    """Parts of a batch that add equally many tokens to each request, and how many: first all single ones, if any."""
    singles = np.flatnonzero(tokens == 1)
    if singles.size:
        yield singles, 1
    for i in np.flatnonzero(tokens > 1):
        yield np.array([i]), int(tokens[i])


def part_of(batch: torch.Tensor, part: IntArray) -> torch.Tensor:
    """Some elements of a batch, int64 [B] on the device."""
    return batch if len(part) == len(batch) else batch[to_device(part, batch.device)]


def append(
    rows: Rows, request_slots: torch.Tensor, tokens: int, pages: IntArray, partial: IntArray, triton: bool
) -> None:
    """Add entries to each row of requests (int64 [B]); ``pages`` and ``partial`` are int64 [B], as of ``demand``."""
    tables, size, count, ending = rows.tables, rows.page_size, int(pages.sum()), int(partial.sum())
    if triton and tokens == 1:
        from vllm_kvevict.kernels.append_pages import append_pages

        taken, first = rows.pool.take(count), to_device(pages.cumsum() - pages, rows.device)
        arguments = tables.arena, tables.row_starts, tables.kv_len, request_slots, taken, first
        append_pages(*arguments, size, rows.storage)
        return
    before = tables.kv_len.index_select(0, request_slots)
    kv_len = before + tokens
    if count:
        starts = tables.row_starts.index_select(0, request_slots)
        column, new = rows.pages_for(before)[..., None], rows.pages_for(kv_len)[..., None]
        if tokens > 1:
            # A row that ends within a page needs no more new ones than a row that ends with one.
            column = column + torch.arange(-(-tokens // size), dtype=torch.int32, device=rows.device)
        taken = rows.pool.take_stretch(count) if tokens > 1 else rows.pool.take(count)
        tables.arena[(starts[..., None] + column).flatten()[where(column < new, count)]] = taken
        if ending < count:
            # Some new pages become full, so tokens >= page_size and every row ends in a new page.
            taken = tables.pages_at((starts + new[..., 0] - 1).flatten()[where(kv_len % size > 0, ending)])
        rows.format.blank_pages(rows.storage, taken)
    tables.kv_len.index_copy_(0, request_slots, kv_len)


def fill(rows: Rows, request_slot: int, empty: slice, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give some of a request's rows, which are empty, pages for so many tokens, as of :meth:`PagedKVCache.fill`."""
    heads, size = empty.stop - empty.start, rows.page_size
    columns = -(-tokens // size)
    pages = rows.pool.take_stretch(heads * columns).view(heads, -1)
    rows.tables.region(request_slot)[empty, :columns] = pages
    if tokens % size:
        rows.format.blank_pages(rows.storage, pages[:, -1])
    _set_lengths(rows, request_slot, empty, np.full(heads, tokens))
    entry = torch.arange(tokens, device=rows.device)
    places = pages.to(torch.int64)[:, entry // size].mul_(size).add_(entry % size)
    return places.t().flatten(), pages


def fill_chosen(
    rows: Rows, request_slot: int, empty: slice, kept: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Give some of a request's rows, which are empty, pages for those of its tokens that stay.

    Args:
        kept: of each row the tokens, int64.

    Returns:
        int64 [N] each, row after row: the row of an entry, counted from the first of these; its token; its place as of
        :func:`newest`. And how many pages that took.
    """
    lengths = np.array([tokens.numel() for tokens in kept], np.int64)
    row_of_page, column, taken = rows.take_for(lengths)
    table = rows.tables.region(request_slot)[empty]
    table[row_of_page, column] = taken
    _set_lengths(rows, request_slot, empty, lengths)
    row, entry = rows.first_entries(to_device(lengths, rows.device), int(lengths.sum()))
    pages, places = rows.places(table, row, entry)
    return row, torch.cat(list(kept)), pages.mul_(rows.page_size).add_(places), taken.numel()


def _set_lengths(rows: Rows, request_slot: int, changed: slice, lengths: IntArray) -> None:
    """Some of a request's rows now have these lengths."""
    rows.lengths.replace(request_slot, changed.start, lengths)
    rows.tables.kv_len[request_slot, changed].copy_(to_device(lengths.astype(np.int32), rows.device))


def newest(rows: Rows, request_slots: torch.Tensor, tokens: int) -> torch.Tensor:
    """Entry slots of the last ``tokens`` entries of each row of requests (int64 [B]), int64 [B, num_rows, tokens]."""
    tables, size = rows.tables, rows.page_size
    kv_len = tables.kv_len.index_select(0, request_slots)[..., None]
    entry = kv_len + torch.arange(-tokens, 0, dtype=torch.int32, device=rows.device)
    column = entry // size
    pages = tables.pages_at(tables.row_starts.index_select(0, request_slots)[..., None] + column)
    return pages.to(torch.int64).mul_(size).add_(entry - column * size)


def entry_slots(rows: Rows, step: Step, layers: int, heads: int) -> torch.Tensor:
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


def drop_newest(rows: Rows, request_slots: IntArray, dropped: IntArray) -> None:
    """Drop entries, int64 [B], of each row of requests, int64 [B], and free the pages that these filled alone."""
    freed, batch = rows.lengths.truncate(request_slots, dropped), to_device(request_slots, rows.device)
    before = rows.tables.kv_len.index_select(0, batch)
    after = before - to_device(dropped, rows.device).to(torch.int32)[:, None]
    most = int(rows.pages_for(dropped).max(initial=0))
    column = rows.pages_for(after)[..., None] + torch.arange(most, dtype=torch.int32, device=rows.device)
    places = rows.tables.row_starts.index_select(0, batch)[..., None] + column
    behind = where(column < rows.pages_for(before)[..., None], int(freed.sum()))
    rows.pool.give(rows.tables.pages_at(places.flatten()[behind]))
    rows.tables.kv_len.index_copy_(0, batch, after)
