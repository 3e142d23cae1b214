"""Reads entries of several rows at once, in the order in which they are stored.

Owns nothing, and waits for nothing: lengths are known to the host. Equally many entries at the same places of all rows
are read page by page, without a place for each of them.
"""

import numpy as np
import torch

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.cache.rows import RowTables
from vllm_kvevict.cache.steps import to_device


def read_columns(rows: RowTables, name: str, table: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """A field of entries ``first`` to ``stop`` of each row of a table, int32 [R, columns]: [R, stop - first, n]."""
    size = rows.page_size
    skipped = first // size
    pages = table[:, skipped : -(-stop // size), None]
    entries = rows.memory.read(name, pages, rows.in_page).flatten(1, 2)
    return entries[:, first - skipped * size : stop - skipped * size]


def read_behind(
    rows: RowTables, name: str, request_slot: int, span: slice, first: IntArray, counts: IntArray
) -> torch.Tensor:
    """A field of counts[r] entries of each row r from entry first[r] on, both int64 [R], [R, max(counts), numbers].

    What is behind them is arbitrary. Raises ValueError if a row holds fewer.
    """
    lengths, table = rows.lengths.of(request_slot).ravel()[span], rows.tables.region(request_slot)[span]
    if (first < 0).any() or (first + counts > lengths).any():
        raise ValueError(
            f"{counts.tolist()} entries behind {first.tolist()} were asked of rows that hold {lengths.tolist()}"
        )
    begin, last = to_device(np.stack([first, lengths - 1]), rows.device)[:, :, None]
    entry = torch.minimum(begin + torch.arange(int(counts.max()), device=rows.device), last)
    pages = table.gather(1, entry // rows.page_size)
    return rows.memory.read(name, pages, entry % rows.page_size)


def read_last(rows: RowTables, name: str, request_slot: int, span: slice, counts: IntArray) -> torch.Tensor:
    """A field of the last counts[r] entries, int64 [R], of some rows, right-aligned, [R, max(counts), numbers].

    What is before them is zero. Raises ValueError if a row holds fewer, or there is not one count for each row.
    """
    lengths, table = rows.lengths.of(request_slot).ravel()[span], rows.tables.region(request_slot)[span]
    if counts.shape != lengths.shape or (counts < 0).any() or (counts > lengths).any():
        raise ValueError(
            f"the last {counts.tolist()} entries were asked of rows that hold {lengths.tolist()}"
        )
    most = int(counts.max())
    if (counts == most).all() and (lengths == lengths[0]).all():
        return read_columns(rows, name, table, int(lengths[0]) - most, int(lengths[0]))
    # Where a row has none of them, its first place is read.
    begin = to_device(lengths - most, rows.device)[:, None]
    entry = (begin + torch.arange(most, device=rows.device)).clamp_(min=0)
    pages = table.gather(1, entry // rows.page_size)
    entries = rows.memory.read(name, pages, entry % rows.page_size)
    for row, missing in enumerate((most - counts).tolist()):
        entries[row, :missing].zero_()  # several times faster than with a mask
    return entries
