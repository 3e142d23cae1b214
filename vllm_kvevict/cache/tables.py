"""Which pages the rows of each request have, and how many entries each row stores.

Owns the page tables. Every element of them is a valid page id at any time, since kernels may load beyond the end of a
row. Who owns a page is not said here: a row may begin with pages that its request borrows.
"""

import numpy as np
import torch

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.cache.steps import to_device

MIN_COLUMNS = 4


class PageTables:
    """Page tables of all open requests in one flat arena, and every row's kv_len.

    The table of a request is a region of the arena, [num_rows, columns] page ids, where the row of a layer's
    head is layer * num_kv_heads + head. A region has room for the longest row; it grows geometrically, by
    moving to the end of the arena. The arena is repacked when its end is reached or when three quarters of it
    are unused, so both are rare.

    Attributes:
        kv_len: int32 [max_requests, num_rows], entries stored in each row.
        arena: int32 [size], page ids.
        row_starts: int32 [max_requests, num_rows], place in the arena of each row's first page.
    """

    def __init__(self, max_requests: int, num_rows: int, device: torch.device | str) -> None:
        self.num_rows = num_rows
        self.kv_len = torch.zeros(max_requests, num_rows, dtype=torch.int32, device=device)
        self.arena = torch.zeros(num_rows * MIN_COLUMNS, dtype=torch.int32, device=device)
        self.row_starts = torch.zeros(max_requests, num_rows, dtype=torch.int32, device=device)
        self._starts: IntArray = np.zeros(max_requests, np.int64)
        self._columns: IntArray = np.zeros(max_requests, np.int64)
        self._end = 0  # the arena is unused from here on

    @property
    def nbytes(self) -> int:
        """Device memory of the tables, in bytes."""
        return sum(t.nbytes for t in (self.kv_len, self.arena, self.row_starts))

    def region(self, request_slot: int) -> torch.Tensor:
        """The table of one request, int32 [num_rows, columns], a view of the arena."""
        start, columns = int(self._starts[request_slot]), int(self._columns[request_slot])
        return self.arena[start : start + self.num_rows * columns].view(self.num_rows, columns)

    def block_tables(self, request_slots: torch.Tensor, layers: int, width: int) -> torch.Tensor:
        """Pages of all rows of requests (int64 [B]), layer by layer, int32 [layers, B * num_rows / layers, width].

        One pass a step serves all layers, since a compaction only shortens rows. What follows a row's own pages is
        arbitrary, but valid page ids.
        """
        starts = self.row_starts.index_select(0, request_slots).view(len(request_slots), layers, -1)
        column = torch.arange(width, dtype=torch.int32, device=request_slots.device)
        place = starts.transpose(0, 1).reshape(layers, -1, 1) + column
        return self.pages_at(place.clamp_(max=self.arena.numel() - 1))

    def pages_at(self, place: torch.Tensor) -> torch.Tensor:
        """Page ids at some places (int32) of the arena, int32 of the same shape."""
        return self.arena.index_select(0, place.flatten()).view(place.shape)

    def make_room(self, request_slots: IntArray, columns: IntArray) -> None:
        """Make room for at least ``columns`` (int64 [B]) pages a row of ``request_slots`` (int64 [B])."""
        short = np.flatnonzero(columns > self._columns[request_slots])
        for i in short:
            self._grow(int(request_slots[i]), _roomy(int(columns[i])))
        if short.size:
            self._mirror()

    def shrink(self, request_slot: int, columns: int) -> None:
        """Give up room beyond twice what a longest row of ``columns`` pages needs."""
        roomy = _roomy(columns)
        if self._columns[request_slot] > 2 * roomy:
            kept = self.region(request_slot)[:, :roomy].clone()
            self._columns[request_slot] = roomy
            self.region(request_slot).copy_(kept)
            self._trim()
            self._mirror()

    def release(self, request_slots: IntArray) -> None:
        """Forget the tables of requests (int64 [B]) and set their kv_len to 0."""
        self.kv_len.index_fill_(0, to_device(request_slots, self.kv_len.device), 0)
        self._columns[request_slots] = 0
        self._trim()
        self._mirror()

    def _grow(self, request_slot: int, columns: int) -> None:
        """Move a region to the end of the arena and give it more columns."""
        size = self.num_rows * columns
        if self._end + size > self.arena.numel():
            self._repack(more=size)
        old = self.region(request_slot)
        self._starts[request_slot], self._columns[request_slot] = self._end, columns
        self._end += size
        self.region(request_slot)[:, : old.shape[1]] = old

    def _trim(self) -> None:
        live = int(self._columns.sum()) * self.num_rows
        if self.arena.numel() > max(4 * live, self.num_rows * MIN_COLUMNS):
            self._repack(more=0)

    def _repack(self, more: int) -> None:
        """Move all regions to the front of a new arena, half as large again as they and ``more`` elements together."""
        live = int(self._columns.sum()) * self.num_rows
        old = self.arena
        self.arena = old.new_zeros(max((live + more) * 3 // 2, self.num_rows * MIN_COLUMNS))
        self._end = 0
        for request_slot in np.flatnonzero(self._columns):
            start, size = int(self._starts[request_slot]), int(self._columns[request_slot]) * self.num_rows
            self.arena[self._end : self._end + size] = old[start : start + size]
            self._starts[request_slot] = self._end
            self._end += size

    def _mirror(self) -> None:
        row = torch.arange(self.num_rows, dtype=torch.int32, device=self.arena.device)
        regions = np.stack([self._starts, self._columns]).astype(np.int32)
        starts, columns = to_device(regions[..., None], row.device)
        torch.addcmul(starts, columns, row, out=self.row_starts)


def _roomy(columns: int) -> int:
    """Columns of a region for a longest row of ``columns`` pages: a quarter more, so that growth is rare."""
    return columns + columns // 4 + MIN_COLUMNS
