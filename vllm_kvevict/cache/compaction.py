"""What an eviction does to rows: the entries that stay move to the front of each row, and pages behind them are freed.

Some entries at the front of a row may be none of its business: those are neither read nor moved. Owns nothing. A row's
own pages are written in place, where everything is read before it is overwritten. Pages that a row borrows are only
read: where entries in them are chosen among, the row gets new pages with copies of what it keeps, and borrows no more
than the pages before those. Page counts follow from lengths that the host knows, so nothing waits for the device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.cache.loans import Loans
from vllm_kvevict.cache.rows import RowTables, pages_between
from vllm_kvevict.cache.steps import to_device


def compact(
    rows: RowTables,
    loans: Loans,
    request_slot: int,
    row: int,
    kept: Sequence[torch.Tensor],
    heads: int,
    triton: bool,
    first: IntArray | None = None,
) -> int:
    """Keep only some entries of a request's rows from row ``row`` on, as of :meth:`PagedKVCache.compact`.

    Args:
        heads: rows of a layer; what is copied is copied layer by layer, so that little is in flight.
        triton: whether Triton's kernel moves entries.

    Returns and raises: as there.
    """
    before = rows.lengths.of(request_slot).ravel()[row : row + len(kept)]
    stay, after = _lengths(before, kept, heads, first)
    copies = loans.columns[request_slot, row : row + len(kept)] * rows.page_size > stay
    if (after == before).all() and not copies.any():
        return 0
    freed, step = 0, heads if copies.any() else len(kept)
    for start in range(0, len(kept), step):
        part, span = slice(start, start + step), slice(row + start, row + start + step)
        if copies[part].any():
            _copy(rows, loans, request_slot, span, kept[part], stay[part], after[part])
        else:
            behind = None if first is None else first[part]
            _move(rows, request_slot, span, kept[part], behind, after[part], triton)
        freed += rows.lengths.replace(request_slot, span.start, after[part])
        kv_len = rows.tables.kv_len[request_slot, span]
        kv_len.copy_(to_device(after[part].astype(np.int32), rows.device))
    return freed


def _lengths(
    before: IntArray, kept: Sequence[torch.Tensor], heads: int, first: IntArray | None
) -> tuple[IntArray, IntArray]:
    """How many entries of each row stay where they are, and how long it becomes. Raises as :func:`compact`."""
    counts = np.array([entries.numel() for entries in kept], np.int64)
    stay = np.zeros_like(counts) if first is None else first
    fits = kept and len(kept) % heads == 0 and before.shape == counts.shape == stay.shape
    if not fits or (stay < 0).any() or not ((stay + counts > 0) & (stay + counts <= before)).all():
        where = "" if first is None else f" behind the first {first.tolist()}"
        raise ValueError(f"cannot keep {counts.tolist()} of {before.tolist()} entries per KV head{where}")
    return stay, stay + counts


def _move(
    rows: RowTables,
    request_slot: int,
    span: slice,
    kept: Sequence[torch.Tensor],
    first: IntArray | None,
    after: IntArray,
    triton: bool,
) -> None:
    """Move kept entries within the rows' own pages, behind first[r] that stay, and free the pages behind after[r]."""
    table, entries = rows.tables.region(request_slot)[span], torch.cat(list(kept))
    counts = to_device(after if first is None else after - first, rows.device)
    stay = None if first is None else to_device(first, rows.device)
    if triton:
        from vllm_kvevict.kernels.compact_rows import compact_rows

        starts = pad(counts.cumsum(0), (1, 0))
        compact_rows(rows.memory.storage, rows.page_size, table, entries, starts, stay)
        for aside in rows.memory.asides:
            compact_rows(aside, rows.page_size, table, entries, starts, stay, parts=1)
    else:
        row, entry = rows.first_entries(counts, len(entries))
        if stay is not None:
            entries, entry = entries + stay[row], entry + stay[row]
        rows.memory.move(rows.places(table, row, entries), rows.places(table, row, entry))
    before, stop = rows.pages_for(after), rows.pages_for(rows.lengths.of(request_slot).ravel()[span])
    if (before < stop).any():
        rows.pool.free(pages_between(table, before, stop))


def _copy(
    rows: RowTables,
    loans: Loans,
    request_slot: int,
    span: slice,
    kept: Sequence[torch.Tensor],
    first: IntArray,
    after: IntArray,
) -> None:
    """Copy kept entries to new pages, and free those that the rows own; full pages of entries that stay remain."""
    table, borrowed = rows.tables.region(request_slot)[span], loans.columns[request_slot, span]
    whole = first // rows.page_size
    copied, stop = whole * rows.page_size, rows.pages_for(rows.lengths.of(request_slot).ravel()[span])
    listed = zip(copied.tolist(), first.tolist(), kept, strict=True)
    pairs = [(torch.arange(start, stay, device=rows.device), stay + chosen) for start, stay, chosen in listed]
    entries = torch.cat([part for pair in pairs for part in pair])
    row, entry = rows.first_entries(to_device(after - copied, rows.device), len(entries))
    source = rows.places(table, row, entries)
    row_of_page, column, taken = rows.take_for(after - copied)
    given = pages_between(table, np.maximum(borrowed, whole), stop)
    table[row_of_page, column + to_device(whole, rows.device)[row_of_page]] = taken
    entry += to_device(copied, rows.device)[row]
    rows.memory.move(source, rows.places(table, row, entry))
    rows.pool.free(given)
    loans.shorten(request_slot, span, np.minimum(borrowed, whole))
