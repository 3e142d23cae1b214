"""What the parts of a cache work on: the pool's memory, and which pages and how many entries each row has.

A row is one (layer, KV head) of one request, row layer * num_kv_heads + head of its page table. Owns nothing by itself;
keeps what everybody relies on: a new page that its entries will not fill is zero before anybody reads it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

from vllm_kvevict.cache.format import PageMemory, Places
from vllm_kvevict.cache.lengths import IntArray, RowLengths
from vllm_kvevict.cache.pool import PagePool
from vllm_kvevict.cache.steps import to_device
from vllm_kvevict.cache.tables import PageTables
from vllm_kvevict.kernels.masks import true_places

Counts = TypeVar("Counts", IntArray, torch.Tensor)


@dataclass(frozen=True)
class RowTables:
    """Memory and rows of one rank.

    Attributes:
        memory: the pages.
        pool, tables, lengths: free pages, page tables and kv_len; lengths are what the tables' kv_len is on the device.
    """

    memory: PageMemory
    pool: PagePool
    tables: PageTables
    lengths: RowLengths

    @cached_property
    def page_size(self) -> int:
        """Entries of a page."""
        return self.memory.layout.page_size

    @property
    def device(self) -> torch.device:
        """Where pages and tables are."""
        return self.memory.storage.device

    @cached_property
    def in_page(self) -> torch.Tensor:
        """Places in a page, int64 [page_size]."""
        return torch.arange(self.page_size, device=self.device)

    def places(self, table: torch.Tensor, rows: torch.Tensor, entries: torch.Tensor) -> Places:
        """Where entries, int64 [N], of rows of ``table``, int64 [N], lie."""
        return table[rows, entries // self.page_size].to(torch.int64), entries % self.page_size

    def first_entries(self, counts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and number of the first counts[r] entries of each row r, ``total`` in all, int64 [total] each."""
        rows = torch.arange(len(counts), device=self.device).repeat_interleave(counts, output_size=total)
        return rows, torch.arange(total, device=self.device) - (counts.cumsum(0) - counts)[rows]

    def pages_for(self, entries: Counts) -> Counts:
        """Pages of rows with so many entries."""
        return -(-entries // self.page_size)

    def take_for(self, lengths: IntArray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take pages for rows of these lengths: the row and the column of each page, int64, and the pages.

        Raises:
            RuntimeError: the pool has too few free pages; nothing has changed.
        """
        widths = self.pages_for(lengths)
        row = np.repeat(np.arange(len(widths)), widths)
        column = np.arange(len(row)) - np.repeat(widths.cumsum() - widths, widths)
        taken = self.pool.allocate_stretch(len(row))
        ends_within = np.flatnonzero((column == (widths - 1)[row]) & (lengths % self.page_size > 0)[row])
        self.memory.blank_pages(taken[to_device(ends_within, self.device)])
        return to_device(row, self.device), to_device(column, self.device), taken


def pages_between(table: torch.Tensor, first: IntArray, stop: IntArray) -> torch.Tensor:
    """Pages in columns first[r] to stop[r] of each row r of a page table, row by row, int32.

    Args:
        table: int32 [rows, columns].
        first, stop: int64 [rows] on the host, which knows the number of pages by them.
    """
    begin, end = (to_device(columns, table.device)[:, None] for columns in (first, stop))
    column = torch.arange(table.shape[1], device=table.device)
    return table.flatten()[true_places((column >= begin) & (column < end), int((stop - first).sum()))]
