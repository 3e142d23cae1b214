"""Give every row of some requests room for one more entry, on a GPU."""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 1024
_ELEMENTS = 4096


@triton.jit
def _append_pages(
    arena,
    row_starts,
    kv_len,
    request_slots,
    pages,
    first_page,
    num_rows,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    request_slot = tl.load(request_slots + request)
    row_starts += request_slot * num_rows
    kv_len += request_slot * num_rows
    pages += tl.load(first_page + request)
    taken = 0
    for begin in range(0, num_rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        mask = row < num_rows
        old = tl.load(kv_len + row, mask=mask, other=1)
        tl.store(kv_len + row, old + 1, mask=mask)
        full = mask & (old % PAGE_SIZE == 0)
        place = tl.load(row_starts + row, mask=full, other=0) + old // PAGE_SIZE
        which = taken + tl.cumsum(full.to(tl.int32), 0) - 1
        tl.store(arena + place, tl.load(pages + which, mask=full, other=0), mask=full)
        taken += tl.sum(full.to(tl.int32), 0)


@triton.jit
def _zero_pages(storage, pages, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    page = tl.load(pages + tl.program_id(0)).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], storage.dtype.element_ty)
    tl.store(storage + page * SIZE + element, zero, mask=element < SIZE)


def append_pages(
    arena: Tensor,
    row_starts: Tensor,
    kv_len: Tensor,
    request_slots: Tensor,
    pages: Tensor,
    first_page: Tensor,
    page_size: int,
    storage: Tensor,
) -> None:
    """Add one entry to each row of some requests; a row whose last page is full gets a new page, zeroed.

    A request's pages go to its rows in ascending order. Nothing here waits for the device, and the values are not
    checked.

    Args:
        arena: int32 [size], page ids; changed in place.
        row_starts: int32 [max_requests, num_rows], contiguous: place in the arena of each row's first page.
        kv_len: int32 [max_requests, num_rows], contiguous: entries of each row; changed in place.
        request_slots: int64 [B], the requests, each at most once.
        pages: int32 [P], the new pages: one for each row of the requests with kv_len % page_size == 0.
        first_page: int64 [B], where each request's pages begin among them.
        page_size: entries per page.
        storage: [num_pages, page_elements], contiguous.
    """
    if not request_slots.numel():
        return
    num_rows, size = kv_len.shape[1], storage.shape[1]
    _append_pages[(request_slots.numel(),)](
        arena,
        row_starts,
        kv_len,
        request_slots,
        pages,
        first_page,
        num_rows,
        PAGE_SIZE=page_size,
        BLOCK=min(triton.next_power_of_2(num_rows), _ROWS),
    )
    if pages.numel():
        # What another request left behind the new entries (inf or NaN) would spoil the attention.
        _zero_pages[pages.numel(), triton.cdiv(size, _ELEMENTS)](storage, pages, SIZE=size, BLOCK=_ELEMENTS)


def reference(
    arena: Tensor,
    row_starts: Tensor,
    kv_len: Tensor,
    request_slots: Tensor,
    pages: Tensor,
    first_page: Tensor,
    page_size: int,
    storage: Tensor,
) -> None:
    """The same in plain torch, row by row; arguments as above."""
    for request_slot, first in zip(request_slots.tolist(), first_page.tolist(), strict=True):
        for row in range(kv_len.shape[1]):
            old = int(kv_len[request_slot, row])
            if old % page_size == 0:
                arena[row_starts[request_slot, row] + old // page_size] = pages[first]
                storage[pages[first]] = 0
                first += 1
            kv_len[request_slot, row] += 1
