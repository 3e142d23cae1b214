"""Segments: uncompressed pages of a part of a prompt that belong to no request, and that requests begin with.

A prompt's KV is the same for every request that begins with the same tokens, until it is evicted. So it is frozen
before that: whole columns of a request's page table become segments, each the child of the one before it, and the
request goes on with the same pages, borrowed.

    tokens                0        1024       2048    2304
    segments              |   1     |    2     |  3   |                   rows equally long, all pages full
    row of a request      [borrowed columns          ][own: written to]
    evicted               [own: copies of what is kept]                   it borrows nothing any more

Nothing is copied to freeze pages or to begin with them. A request that is evicted copies what it keeps
(:meth:`vllm_kvevict.cache.PagedKVCache.compact`), and the segments stay as they are.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_kvevict.cache.tables import NOBODY, SEGMENTS

if TYPE_CHECKING:
    from vllm_kvevict.cache.paged import PagedKVCache


class Segments:
    """The segments of a cache, by numbers that the caller gives them.

    Nothing here but ``checksum`` and ``verify`` waits for the device.
    """

    def __init__(self, cache: "PagedKVCache") -> None:
        self.cache = cache
        self._pages: dict[int, torch.Tensor] = {}
        """int32 [rows, columns]."""
        self._lent: dict[int, list[tuple[int, int]]] = {}
        """What a request slot has begun with or frozen, in the order of its columns: number, and columns of each."""

    def __contains__(self, number: int) -> bool:
        return number in self._pages

    @property
    def numbers(self) -> list[int]:
        """Of all segments."""
        return list(self._pages)

    @property
    def pages(self) -> int:
        """Pages that they hold."""
        return sum(map(self.held, self._pages))

    def held(self, number: int) -> int:
        """Pages that one holds."""
        return self._pages[number].numel()

    def freeze(self, number: int, request_slot: int, columns: int) -> None:
        """Make a segment of a request's next columns, behind those that it borrows; it borrows these too from now on.

        Their entries may be written in the step that is running, and never again.

        Args:
            columns: how many.

        Raises:
            ValueError: there is such a segment, or the request does not hold so many full columns, or borrows of a run.
        """
        tables, cache = self.cache.tables, self.cache
        start = self._columns_of(request_slot)
        stop = start + columns
        shortest = int(cache.lengths.of(request_slot).min())
        if number in self or columns < 1 or stop * cache.page_size > shortest:
            raise ValueError(f"columns {start} to {stop} of request slot {request_slot} cannot be frozen")
        self._pages[number] = tables.region(request_slot)[:, start:stop].clone()
        self._lent.setdefault(request_slot, []).append((number, columns))
        tables.borrow(request_slot, SEGMENTS, np.full(tables.num_rows, stop))
        cache.lengths.pages[request_slot] -= tables.num_rows * columns

    def begin(self, parts: Sequence[tuple[int, int]]) -> int:
        """Begin a request with the first columns of segments, one after the other, and return its slot.

        Args:
            parts: number of each segment, and how many of its columns.

        Raises:
            ValueError: there is no such segment.
            RuntimeError: all request slots are in use.
        """
        missing = [number for number, _ in parts if number not in self]
        if missing:
            raise ValueError(f"there is no segment {missing[0]}")
        pages = self._joined(parts)
        columns = pages.shape[1]
        cache, tables = self.cache, self.cache.tables
        request_slot = cache.open()
        tables.reserve(np.array([request_slot]), np.array([columns]))
        tables.region(request_slot)[:, :columns] = pages
        tables.kv_len[request_slot] = columns * cache.page_size
        tables.borrow(request_slot, SEGMENTS, np.full(tables.num_rows, columns))
        cache.lengths.begin(request_slot, columns * cache.page_size)
        self._lent[request_slot] = list(parts)
        return request_slot

    def end_loan(self, request_slot: int) -> None:
        """A request has ended, or was evicted and has copies of all it keeps."""
        self._lent.pop(request_slot, None)

    def drop(self, number: int) -> None:
        """End a segment and free its pages.

        Raises:
            ValueError: there is none, or a request borrows it.
        """
        if number not in self:
            raise ValueError(f"there is no segment {number}")
        borrowers = [slot for slot, parts in self._lent.items() if any(part[0] == number for part in parts)]
        if borrowers:
            raise ValueError(f"segment {number} is borrowed by request slot {borrowers[0]}")
        self.cache.pool.give(self._pages.pop(number).flatten())

    def checksum(self, number: int) -> int:
        """A number that changes when anything in a segment's pages does (waits for the device)."""
        return self.cache.checksum(self._pages[number].flatten())

    def all_pages(self) -> torch.Tensor:
        """Pages of all segments, int32."""
        none = self.cache.tables.arena[:0]
        return torch.cat([none, *(pages.flatten() for pages in self._pages.values())])

    def verify(self) -> None:
        """Raise RuntimeError unless the tables of borrowers begin with the pages of their segments (waits)."""
        for request_slot, parts in self._lent.items():
            pages = self._joined(parts)
            columns = pages.shape[1]
            table = self.cache.tables.region(request_slot)[:, :columns]
            if self._columns_of(request_slot) != columns or not torch.equal(table, pages):
                raise RuntimeError(f"request slot {request_slot} borrows pages that segments do not own")

    def _joined(self, parts: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Pages of the first columns of segments, one after the other, int32 [rows, columns]."""
        return torch.cat([self._pages[number][:, :columns] for number, columns in parts], 1)

    def _columns_of(self, request_slot: int) -> int:
        """Columns that a request borrows of each row."""
        lender = self.cache.tables.lenders[request_slot]
        if lender not in (NOBODY, SEGMENTS):
            raise ValueError(f"request slot {request_slot} borrows pages of a run")
        return int(self.cache.tables.lent_columns[request_slot, 0])
