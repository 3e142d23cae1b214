"""Shared entries: KV that belongs to no request, is never written again, and is borrowed by those that begin with it.

What several requests begin with is stored once. A request that was evicted leaves all that it keeps (a compressed
prefix); one that has read a prompt leaves whole columns of its page table (an uncompressed prefix). Either leaves what
comes behind the columns that it borrows itself: entries form chains. It goes on with the same pages, borrowed. One that
ends may leave all that it holds besides (a tail): nobody borrows that, who goes on with it makes it its own.

    shared entry             [page][page][page][part]          all its own; the part is a copy, zero behind its entries
                                |     |     |     copied
    row of a borrower        [  .][  .][  .][part][page]...     borrowed, then its own: it writes behind its entries
    an entry that follows                   [page][page][part]  begins with what that part has become

An entry that follows may fill the one before: that takes the follower's first full page in the place of its part,
so that what both have in common is stored once. Whoever begins with the first entry alone still copies its part of it.

Owns the shared entries and what each request borrows. A page has one owner, a shared entry or a request; no page needs
a reference count, since whoever borrows an entry borrows the front of each row of it. Full pages are shared as they
are, since nobody writes to them; a partial page is copied, since each borrower goes on writing to it. What a request
holds is what its rows fill less what it borrows, so a loan changes :attr:`Loans.columns` and no other count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.cache.rows import RowTables, pages_between
from vllm_kvevict.cache.steps import to_device

Loan = tuple[int, int | None]
"""What a request begins with of a shared entry: its number, and how many of its columns; None: all of it."""


@dataclass(frozen=True)
class SharedEntry:
    """Pages of each row. Its page table, int32 [rows, columns], is arbitrary behind the pages of a row.

    Attributes:
        first: int64 [rows], columns of each row that come before it, those of its parents, on the host.
        full: int64 [rows], its full pages of each row.
        rest: int64 [rows], entries of its own in a row's last page, which is partial; 0: there is none.
        is_compressed: whether it is what an eviction left.
    """

    table: torch.Tensor
    first: IntArray
    full: IntArray
    rest: IntArray
    is_compressed: bool

    @cached_property
    def pages(self) -> torch.Tensor:
        """Pages that it owns, row by row, int32."""
        return self.behind(np.zeros_like(self.full))

    def behind(self, first: IntArray) -> torch.Tensor:
        """Those from its own column first[r] of each row r on."""
        return pages_between(self.table, first, self.full + (self.rest > 0))


class Loans:
    """The shared entries of a cache, by numbers that the caller gives them, and who borrows of them.

    Nothing here but ``checksum`` and ``verify`` waits for the device.

    Attributes:
        columns: int64 [max_requests, num_rows] on the host, how many pages at the front of each row are borrowed.
        pages: how many compressed shared entries own (True), and all others (False).
    """

    def __init__(self, rows: RowTables) -> None:
        self.rows = rows
        self.columns: IntArray = np.zeros(rows.tables.kv_len.shape, np.int64)
        self.pages = {True: 0, False: 0}
        self._entries: dict[int, SharedEntry] = {}
        self._loans: dict[int, list[Loan]] = {}
        """By request slot, in the order of its columns."""
        self._slots: dict[int, set[int]] = {}
        """Request slots that have a loan of each entry, since entries may go by the hundred."""

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __getitem__(self, number: int) -> SharedEntry:
        """Raises ValueError if there is no such shared entry."""
        if number not in self._entries:
            raise ValueError(f"there is no shared entry {number}")
        return self._entries[number]

    def borrowers(self, number: int) -> list[int]:
        """Request slots that borrow pages of a shared entry."""
        return sorted(self._slots.get(number, ()))

    def freeze(
        self, number: int, request_slot: int, columns: int | None = None, fills: int | None = None
    ) -> int:
        """Make a shared entry of what a request holds; the request goes on, and borrows its full pages.

        Entries in whole columns may be written in the step that is running, and never again.

        Args:
            columns: how many of the request's next columns, behind those that it borrows; None: all that it holds
                behind them after an eviction, which takes a page for each row that ends within one.
            fills: the compressed entry right behind which the request goes on, if nothing depends on that one's
                partial pages: it takes the new entry's first full page of each row in their place.

        Returns:
            How many pages of that one it fills.

        Raises:
            ValueError: there is such an entry; or the request does not hold so many full columns; or it holds nothing,
                or borrows what is uncompressed, where all is asked for; or it does not follow what it fills.
            RuntimeError: the pool has too few free pages. Nothing has changed.
        """
        if number in self._entries:
            raise ValueError(f"there is a shared entry {number}")
        rows, size = self.rows, self.rows.page_size
        first, lengths = self.columns[request_slot].copy(), self._lengths_to_share(request_slot, columns)
        full, rest = lengths // size - first, lengths % size
        rows.pool.require(int((rest > 0).sum()))
        filled = np.zeros_like(full)
        if fills is not None:
            filled = self._fill(fills, request_slot, first, full)
        first, full = first + filled, full - filled
        table = self._behind(request_slot, first, int((full + (rest > 0)).max()))
        self._copy_partial(table, full, rest)
        entry = SharedEntry(table, first, full, rest, columns is None)
        self._entries[number], self._slots[number] = entry, set()
        self.pages[entry.is_compressed] += len(entry.pages)
        before = [] if fills is None else [(fills, None)]
        self._lend(request_slot, [*before, (number, columns)], first + full)
        return int(filled.sum())

    def _fill(self, number: int, request_slot: int, first: IntArray, full: IntArray) -> IntArray:
        """Give an entry the first full page of each row of a request behind it, where its own last one is partial.

        That the request began with this entry, and not with another one of the same lengths, is the caller's affair.

        Args:
            first, full: int64 [rows], where the request's own pages begin, and how many are full.

        Returns:
            int64 [rows], 1 where it got one.

        Raises:
            ValueError: the request's own pages do not begin where it ends.
        """
        entry = self[number]
        if not entry.is_compressed or (first != entry.first + entry.full).any():
            raise ValueError(f"request slot {request_slot} does not go on behind shared entry {number}")
        filled = (entry.rest > 0) & (full > 0)
        which = np.flatnonzero(filled)
        row, column, own = to_device(np.stack([which, entry.full[which], first[which]]), self.rows.device)
        table = entry.table.clone()
        self.rows.pool.free(table[row, column])
        table[row, column] = self.rows.tables.region(request_slot)[row, own]
        self._entries[number] = replace(entry, table=table)
        return filled.astype(np.int64)

    def freeze_tail(self, number: int, request_slot: int) -> None:
        """Make a shared entry of all that a request holds behind what it borrows, which alone it holds from now on.

        Raises:
            ValueError: there is such an entry, or the request holds nothing of its own.
        """
        if number in self._entries:
            raise ValueError(f"there is a shared entry {number}")
        first, lengths = self.columns[request_slot].copy(), self.rows.lengths.of(request_slot).ravel()
        entry = self._all_behind(request_slot, first, lengths)
        if not len(entry.pages):
            raise ValueError(f"request slot {request_slot} holds no pages of its own that could stay")
        self._entries[number], self._slots[number] = entry, set()
        self.pages[False] += len(entry.pages)
        self._set_lengths(request_slot, first * self.rows.page_size)

    def _all_behind(self, request_slot: int, first: IntArray, lengths: IntArray) -> SharedEntry:
        """An uncompressed entry of a request's pages from column first[r] of each row r to the row's end."""
        size = self.rows.page_size
        full, rest = lengths // size - first, lengths % size
        table = self._behind(request_slot, first, int((full + (rest > 0)).max()))
        return SharedEntry(table, first, full, rest, is_compressed=False)

    def cut(self, number: int, tokens: int) -> None:
        """Drop the newest ``tokens`` tokens of what an ended request has left: as many entries of each row.

        Raises:
            ValueError: there is no such entry, or it was not left so, or has not so many.
        """
        entry, size = self[number], self.rows.page_size
        left = entry.full * size + entry.rest - tokens
        if entry.is_compressed or self.borrowers(number) or tokens < 1 or (left < 0).any():
            raise ValueError(f"{tokens} tokens of shared entry {number} cannot be dropped")
        full, rest = left // size, left % size
        dropped = entry.behind(full + (rest > 0))
        self.rows.pool.free(dropped)
        self.pages[False] -= len(dropped)
        self._entries[number] = replace(entry, full=full, rest=rest)

    def _set_lengths(self, request_slot: int, lengths: IntArray) -> None:
        """A request's rows have other lengths, int64 [rows], on the host and on the device."""
        self.rows.tables.kv_len[request_slot] = to_device(lengths.astype(np.int32), self.rows.device)
        self.rows.lengths.replace(request_slot, 0, lengths)

    def _lengths_to_share(self, request_slot: int, columns: int | None) -> IntArray:
        """Up to where each row of a request is to be shared, int64 [rows]; arguments and errors as of `freeze`."""
        size, borrowed = self.rows.page_size, self.columns[request_slot]
        lengths = self.rows.lengths.of(request_slot).ravel()
        kinds = {self[number].is_compressed for number, _ in self._loans.get(request_slot, ())}
        if columns is None:
            if not lengths.any() or False in kinds:
                raise ValueError(f"request slot {request_slot} holds no rows of its own that could be shared")
            return lengths
        first = int(borrowed.max())
        stop = first + columns
        if columns < 1 or stop * size > lengths.min() or int(borrowed.min()) < first or True in kinds:
            raise ValueError(f"columns {first} to {stop} of request slot {request_slot} cannot be frozen")
        return np.full_like(lengths, stop * size)

    def _behind(self, request_slot: int, first: IntArray, width: int) -> torch.Tensor:
        """A request's page table from column first[r] of each row r on, int32 [rows, width]."""
        region = self.rows.tables.region(request_slot)
        column = to_device(first, region.device)[:, None] + torch.arange(width, device=region.device)
        return region.gather(1, column.clamp_(max=region.shape[1] - 1))

    def begin(self, request_slot: int, parts: Sequence[Loan], tail: int | None = None) -> None:
        """Begin an empty request with shared entries, one after the other.

        Takes a page for each row that ends within one, if there is no tail.

        Args:
            tail: the entry that another request has left behind these (:meth:`freeze_tail`); it becomes this one's own.

        Raises:
            ValueError: there is no such entry, or one does not follow the columns before it.
            RuntimeError: the pool has too few free pages. In both cases nothing has changed.
        """
        full, rest = self._columns_of(parts)
        if tail is not None:
            self._begin_with_tail(request_slot, parts, full, tail)
            return
        self.rows.pool.require(int((rest > 0).sum()))
        region = self._set_table(request_slot, parts, full * self.rows.page_size + rest)
        self._copy_partial(region, full, rest)
        self._lend(request_slot, parts, full)

    def _columns_of(self, parts: Sequence[Loan]) -> tuple[IntArray, IntArray]:
        """Full pages of each row, and entries in its last one if that is partial, of entries one after the other.

        Raises:
            ValueError: as of :meth:`begin`.
        """
        full = rest = np.zeros(self.rows.tables.num_rows, np.int64)
        for number, columns in parts:
            entry = self[number]
            filled = entry.first - full
            follows = (filled == 0) | ((filled == 1) & (rest > 0))
            # An entry that is not compressed does not begin with what its parent has in partial pages.
            if not follows.all() or (rest.any() and not entry.is_compressed):
                raise ValueError(f"shared entry {number} does not follow the columns before it")
            full = entry.first + (entry.full if columns is None else columns)
            rest = entry.rest if columns is None else rest
        return full, rest

    def _begin_with_tail(self, request_slot: int, parts: Sequence[Loan], full: IntArray, tail: int) -> None:
        """As :meth:`begin`; its first pages begin with what its parent has in partial ones, so nothing is copied."""
        entry = self[tail]
        if (full != entry.first).any() or entry.is_compressed or self.borrowers(tail):
            raise ValueError(f"shared entry {tail} is no tail of the columns before it")
        lengths = (full + entry.full) * self.rows.page_size + entry.rest
        self._set_table(request_slot, [*parts, (tail, None)], lengths)
        self._lend(request_slot, parts, full)
        self.pages[False] -= len(entry.pages)
        del self._entries[tail], self._slots[tail]

    def _set_table(self, request_slot: int, parts: Sequence[Loan], lengths: IntArray) -> torch.Tensor:
        """Give an empty request the pages of shared entries; its page table, int32 [rows, columns]."""
        tables, joined = self.rows.tables, self._joined(parts)
        tables.make_room(np.array([request_slot]), np.array([joined.shape[1]]))
        region = tables.region(request_slot)
        region[:, : joined.shape[1]] = joined
        self._set_lengths(request_slot, lengths)
        return region

    def end(self, request_slot: int) -> None:
        """A request borrows nothing any more."""
        self.shorten(request_slot, slice(None), np.zeros(self.rows.tables.num_rows, np.int64))

    def shorten(self, request_slot: int, rows: slice, columns: IntArray) -> None:
        """Some rows of a request borrow fewer pages, columns[r] each: it has copies of all else that they keep."""
        self.columns[request_slot, rows] = columns
        # Of its loans only those remain that some row goes on with, and as much of them.
        for number, count in self._loans.pop(request_slot, ()):
            self._slots[number].remove(request_slot)
            if left := self._left(request_slot, number):
                self._add(request_slot, number, count and min(count, left))

    def _add(self, request_slot: int, number: int, columns: int | None) -> None:
        """A request has a loan more, behind its others."""
        self._loans.setdefault(request_slot, []).append((number, columns))
        self._slots[number].add(request_slot)

    def _left(self, request_slot: int, number: int) -> int:
        """The most columns that some row of a request borrows from the first of an entry on."""
        return max(0, int((self.columns[request_slot] - self[number].first).max()))

    def drop(self, number: int) -> None:
        """End a shared entry and free its pages. What one request borrows of a compressed one becomes that request's.

        Entries that follow it go before it.

        Raises:
            ValueError: there is no such entry; or a request borrows of it, several do of a compressed one; or one does
                of an entry that follows it.
        """
        entry, borrowers = self[number], self.borrowers(number)
        is_last = all(self._loans[slot][-1][0] == number for slot in borrowers)
        if len(borrowers) > (1 if entry.is_compressed else 0) or not is_last:
            raise ValueError(f"shared entry {number} is borrowed by request slots {borrowers}")
        self.pages[entry.is_compressed] -= len(entry.pages)
        for request_slot in borrowers:
            self.rows.pool.free(entry.behind(self.columns[request_slot] - entry.first))
            self.shorten(request_slot, slice(None), entry.first)
        if not borrowers:
            self.rows.pool.free(entry.pages)
        del self._entries[number], self._slots[number]

    def checksum(self, number: int) -> int:
        """A number that changes when anything in a shared entry's pages does (waits for the device)."""
        return self.rows.memory.checksum(self[number].pages)

    def relocate(self, moved: torch.Tensor) -> None:
        """Page i is at moved[i] (int32 [num_pages]) now."""
        for number, entry in self._entries.items():
            self._entries[number] = replace(entry, table=moved[entry.table])

    def owned_pages(self, request_slot: int, rows: slice = slice(None)) -> torch.Tensor:
        """Pages of a request's rows that it does not borrow, row by row, int32."""
        first = self.columns[request_slot, rows]
        stop = self.rows.pages_for(self.rows.lengths.of(request_slot).ravel()[rows])
        return pages_between(self.rows.tables.region(request_slot)[rows], first, stop)

    def owners(self) -> torch.Tensor:
        """How many rows own each page, those of requests and of shared entries, int64 [num_pages] (waits)."""
        first, stop = self.columns, self.rows.pages_for(self.rows.lengths.of_all())
        counts = to_device(np.maximum(stop - first, 0), self.rows.device).flatten()
        starts = (self.rows.tables.row_starts + to_device(first, self.rows.device)).flatten()
        places = (starts - (counts.cumsum(0) - counts)).repeat_interleave(counts)
        owned = self.rows.tables.pages_at(places + torch.arange(places.numel(), device=self.rows.device))
        shared = [entry.pages for entry in self._entries.values()]
        return torch.bincount(torch.cat([owned, *shared]), minlength=len(self.rows.memory.storage))

    def verify(self) -> None:
        """Raise RuntimeError unless borrowers' tables begin with pages of shared entries, which know them (waits)."""
        loans = {(number, slot) for slot, parts in self._loans.items() for number, _ in parts}
        if loans != {(number, slot) for number, slots in self._slots.items() for slot in slots}:
            raise RuntimeError("a shared entry does not know the request slots that have loans of it")
        for slot in np.flatnonzero(self.columns.any(1)).tolist():
            pages = self._joined(self._loans.get(slot, ()))
            most = int(self.columns[slot].max())
            table = self.rows.tables.region(slot)[:, :most]
            column = torch.arange(most, device=table.device)
            borrowed = column < to_device(self.columns[slot], table.device)[:, None]
            if most > pages.shape[1] or ((table != pages[:, :most]) & borrowed).any():
                raise RuntimeError(f"request slot {slot} borrows pages that no shared entry of it owns")

    def _joined(self, parts: Sequence[Loan]) -> torch.Tensor:
        """Page tables of shared entries one after the other, int32 [rows, columns]."""
        arena, entries = self.rows.tables.arena, [(self._entries[number], count) for number, count in parts]
        tables = [(entry.first, entry.table[:, :count]) for entry, count in entries]
        width = max((int(first.max()) + table.shape[1] for first, table in tables), default=0)
        joined = arena.new_zeros(self.rows.tables.num_rows, width)
        for first, table in tables:
            column = torch.arange(table.shape[1], device=arena.device)
            # Behind its pages an entry's table may say anything, and the next one's is written over that.
            joined.scatter_(1, to_device(first, arena.device)[:, None] + column, table)
        return joined

    def _lend(self, request_slot: int, parts: Sequence[Loan], columns: IntArray) -> None:
        """Let a request borrow the first columns[r] pages of each row, of those entries that reach so far."""
        self.columns[request_slot] = columns
        known = {number for number, _ in self._loans.get(request_slot, ())}
        for number, count in parts:
            if number not in known and self._left(request_slot, number):
                self._add(request_slot, number, count)

    def _copy_partial(self, table: torch.Tensor, full: IntArray, rest: IntArray) -> None:
        """Replace the partial page of each row in a page table by a copy, zero behind its entries."""
        rows, partial = self.rows, np.flatnonzero(rest)
        if not partial.size:
            return
        row, column, stored = to_device(np.stack([partial, full[partial], rest[partial]]), rows.device)
        # One page of each row, so none is the neighbour of another.
        source, copies = table[row, column].to(torch.int64), rows.pool.allocate(partial.size)
        rows.memory.blank_pages(copies)
        which, entry = rows.first_entries(stored, int(rest.sum()))
        rows.memory.move((source[which], entry), (copies.to(torch.int64)[which], entry))
        table[row, column] = copies
