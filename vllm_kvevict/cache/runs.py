"""Runs: rows that belong to no request, are never written again, and lend their pages to requests.

What a prefix keeps is compressed once, by the request that read it. :meth:`Runs.freeze` makes a run of that; every
further request with the prefix starts as a fork of the run, without reading it.

    row of the run       [page][page][page][part]          all its own; the part is a copy, zero behind its entries
                            |     |     |     copied
    row of a borrower    [  .][  .][  .][part][page]...     borrowed, then its own: it writes behind its entries

Full pages are shared as they are, since nobody writes to them. A partial page is copied, since each borrower goes on
writing to it. So sharing needs no reference counts of pages: a page has one owner, and whoever borrows a run borrows
all of its full pages.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_kvevict.cache.lengths import IntArray
from vllm_kvevict.cache.steps import to_device
from vllm_kvevict.cache.tables import NOBODY

if TYPE_CHECKING:
    from vllm_kvevict.cache.paged import PagedKVCache


class Runs:
    """The runs of a cache; each takes a request slot of it.

    Nothing here but ``checksum`` waits for the device.
    """

    def __init__(self, cache: "PagedKVCache") -> None:
        self.cache = cache
        self._runs: set[int] = set()

    @property
    def pages(self) -> int:
        """Pages that runs hold."""
        return int(self.cache.lengths.pages[list(self._runs)].sum())

    @property
    def entries(self) -> int:
        """Entries in runs, over all layers and KV heads."""
        return self.cache.lengths.entries(list(self._runs))

    def borrowers(self, run: int) -> list[int]:
        """Request slots that begin with the pages of a run."""
        found: list[int] = np.flatnonzero(self.cache.tables.lenders == run).tolist()
        return found

    def freeze(self, request_slot: int) -> int:
        """Make a run of all that a request holds; the request goes on as its first borrower.

        Needs a page for each row that ends within one.

        Returns:
            The run.

        Raises:
            ValueError: the request holds nothing, or itself borrows pages.
            RuntimeError: the pool has too few free pages, or all request slots are in use. Nothing has changed.
        """
        if self.cache.tables.lenders[request_slot] != NOBODY or not self.cache.held(request_slot):
            raise ValueError(f"request slot {request_slot} holds no rows of its own that could become a run")
        run = self._copy(request_slot)
        full, _ = self._split(run)
        self._clear_behind(run)
        self.cache.lengths.pages[run] += full.sum()
        self.cache.lengths.pages[request_slot] -= full.sum()
        self._lend(run, request_slot, full)
        self._runs.add(run)
        return run

    def fork(self, run: int) -> int:
        """Begin a request with all that a run holds, and return its slot.

        Raises:
            ValueError: there is no such run.
            RuntimeError: as of :meth:`freeze`.
        """
        self._require(run)
        request_slot = self._copy(run)
        full, _ = self._split(run)
        self._lend(run, request_slot, full)
        return request_slot

    def drop(self, run: int) -> None:
        """End a run. What one request still borrows becomes that request's own.

        Raises:
            ValueError: there is no such run, or several requests borrow it.
        """
        self._require(run)
        tables, borrowers = self.cache.tables, self.borrowers(run)
        if len(borrowers) > 1:
            raise ValueError(f"run {run} is borrowed by {len(borrowers)} requests")
        if borrowers:
            full, _ = self._split(run)
            tables.borrow(run, borrowers[0], full)
            tables.borrow(borrowers[0], NOBODY, np.zeros_like(full))
            self.cache.lengths.pages[borrowers[0]] += full.sum()
            self.cache.lengths.pages[run] -= full.sum()
        self._runs.remove(run)
        self.cache.close([run])

    def checksum(self, run: int) -> int:
        """A number that changes when anything in a run's pages does (waits for the device).

        Raises:
            ValueError: there is no such run.
        """
        self._require(run)
        return self.cache.checksum(self.cache.own_pages(run))

    def _lend(self, run: int, request_slot: int, full: IntArray) -> None:
        """Let a request use a run's full pages; without any it does not depend on the run."""
        if full.any():
            self.cache.tables.borrow(request_slot, run, full)

    def _require(self, run: int) -> None:
        if run not in self._runs:
            raise ValueError(f"there is no run {run}")

    def _split(self, request_slot: int) -> tuple[IntArray, IntArray]:
        """Full pages of each row, int64 [rows]; and the rows that end within a page, int64."""
        lengths = self.cache.lengths.of(request_slot).ravel()
        return lengths // self.cache.page_size, np.flatnonzero(lengths % self.cache.page_size)

    def _copy(self, source: int) -> int:
        """Open a request with the rows of another: the same full pages, which are not counted, and copies of others."""
        cache = self.cache
        full, partial = self._split(source)
        cache.pool.require(partial.size)
        copy = cache.open()
        cache.tables.copy(source, copy, int(full.max()) + 1)
        cache.lengths.copy(source, copy)
        cache.lengths.pages[copy] = partial.size
        if partial.size:
            rows, columns = to_device(np.stack([partial, full[partial]]), cache.device)
            pages = cache.tables.region(copy)[rows, columns]
            # One page of each row, so none is the neighbour of another.
            own = cache.pool.take(partial.size)
            cache.storage[own.to(torch.int64)] = cache.storage[pages.to(torch.int64)]
            cache.tables.region(copy)[rows, columns] = own
        return copy

    def _clear_behind(self, run: int) -> None:
        """Zero what lies behind the entries of a run's partial pages: entries that were evicted, or another's.

        Attention reads pages to their end, and inf or NaN there would spoil it.
        """
        cache, size = self.cache, self.cache.page_size
        full, partial = self._split(run)
        if not partial.size:
            return
        rows, columns = to_device(np.stack([partial, full[partial]]), cache.device)
        stored = cache.tables.kv_len[run].to(torch.int64)[rows] % size
        place = torch.arange(size, device=cache.device)
        first = cache.tables.region(run)[rows, columns].to(torch.int64) * size
        unused = int((size - cache.lengths.of(run).ravel()[partial] % size).sum())
        behind = (first[:, None] + place).flatten()
        behind = behind[torch.nonzero_static((place >= stored[:, None]).flatten(), size=unused).flatten()]
        nothing = cache.storage.new_zeros(unused, cache.head_dim)
        cache.write(nothing, nothing, behind)
