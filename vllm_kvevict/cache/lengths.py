"""The length of every row, known to the host without asking the device."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class RowLengths:
    """Host record of all kv_len, and what follows from them: pages held and pages the next tokens need.

    A row is one (layer, KV head) of one request. Every token adds one entry to each row of its request, so a
    length is stored as an offset, which only a compaction changes, plus the request's number of tokens so
    far. An append then touches one number per request instead of one per row.

    Attributes:
        pages: int64 [max_requests], pages held by each request.
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

    def clear(self, slot: int) -> None:
        """Set all rows of a request to length 0."""
        self.pages[slot] = self._tokens[slot] = self._longest[slot] = self._offset_sum[slot] = 0
        self._offset[slot] = 0
        self._count(slot)

    def announce(self, slot: int, tokens: int) -> None:
        """Count tokens of an empty request whose rows stay at length 0 for now."""
        self._tokens[slot] = tokens
        self._offset[slot] = self._longest[slot] = -tokens
        self._offset_sum[slot] = self._offset[slot].sum()
        self._count(slot)

    def longest(self, slots: IntArray) -> IntArray:
        """Largest row length of each request, int64 [B]."""
        return self._longest[slots] + self._tokens[slots]

    def shortest(self, slot: int, layer: int) -> int:
        """Smallest row length of one layer."""
        return int(self._offset[slot, layer].min() + self._tokens[slot])

    def of(self, slot: int) -> IntArray:
        """Lengths of a request's rows, int64 [L, H]."""
        return self._offset[slot] + self._tokens[slot]

    def residues(self, slot: int) -> IntArray:
        """Number of rows at each length modulo page_size, int64 [page_size]."""
        return np.roll(self._residues[slot], self._tokens[slot] % self._page_size)

    def demand(self, slots: IntArray, new_tokens: IntArray) -> tuple[IntArray, IntArray]:
        """What the next tokens of some requests need.

        Args:
            slots: int64 [B].
            new_tokens: int64 [B], tokens that each request is about to add.

        Returns:
            int64 [B], pages to take; and int64 [B], how many of a request's rows will end in a new page which
            they do not fill.
        """
        size = self._page_size
        filled = (self._fillings + self._tokens[slots, None]) % size
        after = filled + new_tokens[:, None]
        pages = -(-after // size) - (filled > 0)
        rows = self._residues[slots]
        partial = (pages > 0) & (after % size > 0)
        return (rows * pages).sum(1), (rows * partial).sum(1)

    def append(self, slots: IntArray, new_tokens: IntArray, pages: IntArray) -> None:
        """Record that requests added tokens and took the pages that :meth:`demand` named."""
        self._tokens[slots] += new_tokens
        self.pages[slots] += pages

    def replace(self, slot: int, layer: int, lengths: IntArray) -> int:
        """Record that the rows of layers from ``layer`` on now have other lengths (int64 [layers * H]).

        Returns:
            The pages they hold less.
        """
        heads = self._offset.shape[2]
        rows = self._offset[slot, layer : layer + len(lengths) // heads]
        before = rows.ravel() + self._tokens[slot]
        freed = int((-(-before // self._page_size) + -lengths // self._page_size).sum())
        rows[...] = (lengths - self._tokens[slot]).reshape(-1, heads)
        self._longest[slot] = self._offset[slot].max()
        self._offset_sum[slot] = self._offset[slot].sum()
        self._count(slot)
        self.pages[slot] -= freed
        return freed

    def _count(self, slot: int) -> None:
        rows = self._offset[slot].ravel() % self._page_size
        self._residues[slot] = np.bincount(rows, minlength=self._page_size)
