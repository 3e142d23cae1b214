"""Move the entries that an eviction keeps to the front of their rows, on a GPU."""

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvevict.kernels.quantise import SCALE_BYTES, fields

_BLOCK, _WARPS = 256, 8
_SEGMENT_BYTES = 256
"""Of an entry that one program moves: memory is slow at giving less at once."""


@triton.jit
def _compact_rows(
    storage,
    table,
    table_stride,
    kept,
    starts,
    first,
    PAGE_ELEMENTS: tl.constexpr,
    START: tl.constexpr,
    BETWEEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0)
    start = tl.load(starts + row)
    count = (tl.load(starts + row + 1) - start).to(tl.int32)
    kept += start
    stay = tl.load(first + row) if first is not None else 0
    table += row.to(tl.int64) * table_stride
    dim = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    # The keys or the values, say.
    storage += START + tl.program_id(1) * BETWEEN + dim[None, :]
    # No other program touches these dims of the row, and this one goes through it in ascending blocks. Entry i
    # comes from kept[i] >= i, since kept ascends strictly. So what a block overwrites lies before its end, and all
    # that later blocks read lies behind it; within the block, everything is read before anything is written. Entries
    # that stay shift both alike.
    for begin in range(0, count, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        source = tl.load(kept + entry, mask=entry < count, other=0)
        moves = (entry < count) & (source != entry)  # the first entries often stay where they are
        source, target = stay + source, stay + entry
        source_page = tl.load(table + source // PAGE_SIZE, mask=moves, other=0).to(tl.int64)
        page = tl.load(table + target // PAGE_SIZE, mask=moves, other=0).to(tl.int64)
        mask = moves[:, None] & (dim < HEAD_DIM)[None, :]
        read = source_page * PAGE_ELEMENTS + source % PAGE_SIZE * HEAD_DIM
        data = tl.load(storage + read[:, None], mask=mask)
        tl.debug_barrier()
        written = page * PAGE_ELEMENTS + target % PAGE_SIZE * HEAD_DIM
        tl.store(storage + written[:, None], data, mask=mask)


def compact_rows(
    storage: Tensor,
    page_size: int,
    table: Tensor,
    kept: Tensor,
    starts: Tensor,
    first: Tensor | None = None,
    parts: int = 2,
) -> None:
    """Move the kept entries of several rows to the front of each row, or behind entries that stay, in place.

    Nothing here waits for the device, and the values are not checked.

    Args:
        storage: [num_pages, page_elements], contiguous, in rows (:mod:`vllm_kvevict.kernels.layout`).
        page_size: entries per page.
        table: int32 [rows, columns], the pages of each row; rows may lie apart. No page may be in two rows, apart from
            those of which all entries stay.
        kept: int64 [total], the entries that each row keeps, strictly ascending within a row, row after row.
        starts: int64 [rows + 1]: row r keeps kept[starts[r] : starts[r + 1]], which may be nothing.
        first: int64 [rows], entries at the front of each row that are neither read nor written; kept counts from
            there. None: no row has any.
        parts: fields of equal size in a page: keys and values, whose scales lie between them in int8 and move, too; or
            one that lies aside.

    Raises:
        ValueError: the pages of a row do not lie side by side in ``table``.
    """
    rows, columns = table.shape
    if columns > 1 and table.stride(1) != 1:
        raise ValueError(f"a row's pages must lie side by side, got strides {table.stride()}")
    if not rows:
        return
    for data, numbers, start, between in _moved(storage, page_size, parts):
        block = _SEGMENT_BYTES // data.element_size() if numbers > 1 else 1
        # One stage: a pipelined loop would read entries of the next block before this one is written.
        _compact_rows[rows, parts, triton.cdiv(numbers, block)](
            data,
            table,
            table.stride(0),
            kept,
            starts,
            first,
            PAGE_ELEMENTS=data.shape[1],
            START=start,
            BETWEEN=between,
            PAGE_SIZE=page_size,
            HEAD_DIM=numbers,
            BLOCK=_BLOCK,
            BLOCK_D=block,
            num_warps=_WARPS,
            num_stages=1,
        )


def _moved(storage: Tensor, page_size: int, parts: int) -> list[tuple[Tensor, int, int, int]]:
    """What each launch moves: pages, numbers of an entry in a field, where the first field is, and how far the next."""
    numbers = storage.shape[1] // (parts * page_size)
    if storage.dtype != torch.int8 or parts != 2:
        return [(storage, numbers, 0, page_size * numbers)]
    numbers -= SCALE_BYTES
    floats, first = storage.view(torch.float32), page_size * numbers // SCALE_BYTES
    return [
        (storage, numbers, 0, page_size * (numbers + 2 * SCALE_BYTES)),
        (floats, 1, first, page_size),
    ]


def reference(
    storage: Tensor, page_size: int, table: Tensor, kept: Tensor, starts: Tensor, first: Tensor | None = None
) -> None:
    """The same of keys and values in plain torch, row by row; arguments as above."""
    if storage.dtype == torch.int8:
        parts = fields(storage, page_size, keys_are_transposed=False)
        views = [view for part in parts for view in (part.numbers, part.scales)]
    else:
        views = list(storage.view(storage.shape[0], 2, page_size, -1).unbind(1))
    for row, (start, stop) in enumerate(pairwise(starts.tolist())):
        stay = 0 if first is None else int(first[row])
        source, target = stay + kept[start:stop], stay + torch.arange(stop - start, device=kept.device)
        for view in views:
            entries = view[table[row, source // page_size].long(), source % page_size]
            view[table[row, target // page_size].long(), target % page_size] = entries
