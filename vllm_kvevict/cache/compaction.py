"""What an eviction does to rows: the entries that stay move to the front of each row, and pages behind them are freed.

Owns nothing. A row's own pages are written in place, where everything is read before it is overwritten. Pages that a
row borrows are only read: such a row gets new pages with copies of what it keeps, and borrows nothing any more. Page
counts follow from lengths that the host knows, so nothing waits for the device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.cache.loans import Loans
from vllm_kvevict.cache.rows import Rows, pages_between
from vllm_kvevict.cache.steps import to_device


def compact(
    rows: Rows,
    loans: Loans,
    request_slot: int,
    first: int,
    kept: Sequence[torch.Tensor],
    heads: int,
    triton: bool,
) -> int:
    """Keep only some entries of a request's rows from row ``first`` on, as of :meth:`PagedKVCache.compact`.

    Args:
        heads: rows of a layer; what is copied is copied layer by layer, so that little is in flight.
        triton: whether Triton's kernel moves entries.

    Returns and raises: as there.
    """
    before = rows.lengths.of(request_slot).ravel()[first : first + len(kept)]
    after = np.array([entries.numel() for entries in kept], np.int64)
    fits = after.shape == before.shape and len(kept) % heads == 0 and ((after > 0) & (after <= before)).all()
    if not kept or not fits:
        raise ValueError(f"cannot keep {after.tolist()} of {before.tolist()} entries per KV head")
    copies, freed = bool(loans.columns[request_slot].any()), 0
    if (after == before).all() and not copies:
        return 0
    step = heads if copies else len(kept)
    for start in range(0, len(kept), step):
        part = slice(start, start + step)
        entries, row = torch.cat(list(kept[part])), first + start
        if copies:
            _copy(rows, loans, request_slot, row, entries, after[part])
        else:
            _move(rows, request_slot, row, entries, after[part], triton)
        freed += rows.lengths.replace(request_slot, row, after[part])
        kv_len = rows.tables.kv_len[request_slot, row : row + len(after[part])]
        kv_len.copy_(to_device(after[part].astype(np.int32), rows.device))
    return freed


def _move(
    rows: Rows, request_slot: int, first: int, kept: torch.Tensor, after: IntArray, triton: bool
) -> None:
    """Move kept entries, after[r] of row first + r, within the rows' own pages, and free those behind them."""
    span = slice(first, first + len(after))
    table, counts = rows.tables.region(request_slot)[span], to_device(after, rows.device)
    if triton:
        from vllm_kvevict.kernels.compact_rows import compact_rows

        compact_rows(rows.storage, rows.page_size, table, kept, pad(counts.cumsum(0), (1, 0)))
    else:
        row, entry = rows.first_entries(counts, len(kept))
        rows.format.move(rows.storage, rows.places(table, row, kept), rows.places(table, row, entry))
    before, stop = rows.pages_for(after), rows.pages_for(rows.lengths.of(request_slot).ravel()[span])
    if (before < stop).any():
        rows.pool.give(pages_between(table, before, stop))


def _copy(
    rows: Rows, loans: Loans, request_slot: int, first: int, kept: torch.Tensor, after: IntArray
) -> None:
    """Copy kept entries, after[r] of row first + r, to new pages, and free those that the rows own."""
    span = slice(first, first + len(after))
    table = rows.tables.region(request_slot)[span]
    row, entry = rows.first_entries(to_device(after, rows.device), len(kept))
    source = rows.places(table, row, kept)
    row_of_page, column, taken = rows.take_for(after)
    given = loans.owned_pages(request_slot, span)
    table[row_of_page, column] = taken
    rows.format.move(rows.storage, source, rows.places(table, row, entry))
    rows.pool.give(given)
    loans.end(request_slot, span)
