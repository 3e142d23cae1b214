"""The length of every row, known to the host without asking the device.

Owns all lengths and what follows from them. They are the same numbers as ``kv_len`` on the device, which whoever
changes a length changes, too; and a request's pages are always ceil(length / page_size) summed over its rows.
"""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class RowLengths:
    """Host record of all kv_len, and what follows from them: pages held and pages the next tokens need.

    A row is one (layer, KV head) of one request. Every token adds one entry to each row of its request, so a
    length is stored as an offset, which only a compaction changes, plus the request's number of tokens so
    far. An append then touches one number per request instead of one per row.

    Attributes:
        pages: int64 [max_requests], pages that each request's rows fill, whoever owns them.
    """

    def __init__(self, max_requests: int, num_layers: int, num_kv_heads: int, page_size: int) -> None:
        self.pages: IntArray = np.zeros(max_requests, np.int64)
        self._tokens: IntArray = np.zeros(max_requests, np.int64)
        self._offset: IntArray = np.zeros((max_requests, num_layers, num_kv_heads), np.int64)
        self._longest: IntArray = np.zeros(max_requests, np.int64)  # largest offset
        self._offset_sum: IntArray = np.zeros(max_requests, np.int64)
        # Number of rows at each offset % page_size.
        self._residues: IntArray = np.zeros((max_requests, page_size), np.int64)
        self._residues[:, 0] = num_layers * num_kv_heads
        self._page_size = page_size
        self._fillings: IntArray = np.arange(page_size)

    @property
    def total_entries(self) -> int:
        """Sum of all row lengths."""
        return int(self._tokens.sum()) * self._offset[0].size + int(self._offset_sum.sum())

    def clear(self, request_slot: int) -> None:
        """Set all rows of a request to length 0."""
        for record in (self.pages, self._tokens, self._offset):
            record[request_slot] = 0
        self._sum_up(request_slot)

    def announce(self, request_slot: int, tokens: int) -> None:
        """Count tokens of an empty request whose rows stay at length 0 for now."""
        self._tokens[request_slot] = tokens
        self._offset[request_slot] = -tokens
        self._sum_up(request_slot)

    def longest(self, request_slots: IntArray) -> IntArray:
        """Largest row length of each request, int64 [B]."""
        return self._longest[request_slots] + self._tokens[request_slots]

    def shortest(self, request_slot: int, layer: int) -> int:
        """Smallest row length of one layer."""
        return int(self._offset[request_slot, layer].min() + self._tokens[request_slot])

    def of(self, request_slot: int) -> IntArray:
        """Lengths of a request's rows, int64 [L, H]."""
        return self._offset[request_slot] + self._tokens[request_slot]

    def of_all(self) -> IntArray:
        """Lengths of all requests' rows, int64 [max_requests, L * H]."""
        return (self._offset + self._tokens[:, None, None]).reshape(len(self._tokens), -1)

    def residues(self, request_slot: int) -> IntArray:
        """Number of rows at each length modulo page_size, int64 [page_size]."""
        return np.roll(self._residues[request_slot], self._tokens[request_slot] % self._page_size)

    def demand(self, request_slots: IntArray, new_tokens: IntArray) -> tuple[IntArray, IntArray]:
        """What the next tokens of some requests need.

        Args:
            request_slots: int64 [B].
            new_tokens: int64 [B], tokens that each request is about to add.

        Returns:
            int64 [B], pages to take; and int64 [B], how many of a request's rows will end in a new page which
            they do not fill.
        """
        size = self._page_size
        filled = (self._fillings + self._tokens[request_slots, None]) % size
        after = filled + new_tokens[:, None]
        pages = -(-after // size) - (filled > 0)
        rows = self._residues[request_slots]
        partial = (pages > 0) & (after % size > 0)
        return (rows * pages).sum(1), (rows * partial).sum(1)

    def append(self, request_slots: IntArray, new_tokens: IntArray, pages: IntArray) -> None:
        """Record that requests added tokens and took the pages that :meth:`demand` named."""
        self._tokens[request_slots] += new_tokens
        self.pages[request_slots] += pages

    def truncate(self, request_slots: IntArray, dropped: IntArray) -> IntArray:
        """Record that requests dropped their newest tokens.

        Args:
            request_slots: int64 [B].
            dropped: int64 [B], tokens that each request drops.

        Returns:
            int64 [B], the pages that each request holds less.
        """
        self._tokens[request_slots] -= dropped
        pages, _ = self.demand(request_slots, dropped)
        self.pages[request_slots] -= pages
        return pages

    def replace(self, request_slot: int, first: int, lengths: IntArray) -> int:
        """Record that a request's rows from row ``first`` on now have other lengths (int64 [rows]).

        Returns:
            The pages they fill less.
        """
        rows, tokens = (
            self._offset[request_slot].reshape(-1)[first : first + len(lengths)],
            self._tokens[request_slot],
        )
        freed = int((-(-(rows + tokens) // self._page_size) + -lengths // self._page_size).sum())
        rows[...] = lengths - tokens
        self._sum_up(request_slot)
        self.pages[request_slot] -= freed
        return freed

    def _sum_up(self, request_slot: int) -> None:
        """Note what follows from a request's offsets."""
        offset = self._offset[request_slot].ravel()
        self._longest[request_slot], self._offset_sum[request_slot] = offset.max(), offset.sum()
        self._residues[request_slot] = np.bincount(offset % self._page_size, minlength=self._page_size)
