"""The free pages of one worker rank.

Owns the list of free pages. A page of the pool is free once or allocated once, to one owner, who frees the
same pages.
"""

import torch

from vllm_kvevict.kernels.masks import true_places

OUTSIDE = -128
"""Owners of a page that is not in the pool."""


class PagePool:
    """A list of free page ids on the device whose length the host knows.

    Every caller knows how many pages it allocates or frees (see :mod:`vllm_kvevict.cache.lengths`), so allocating
    takes a slice of the list and exhaustion is noticed without asking the device.

    Attention reads neighbouring pages of a row as one stream, several times faster than scattered ones. So rows that
    take many pages at once get them in ascending order from the low end, where compaction leaves long gaps, and rows
    that grow page by page, whose pages are never neighbours, take from the high end and do not fray those gaps.

    The memory may be shared: pages can be added and removed while the pool is in use.

    Args:
        size: pages in the memory.
        device: where the list is.
        is_empty: whether all of them begin as somebody else's.

    Attributes:
        num_pages: pages in the pool.
        owners: int8 [size], whether the page is allocated, 0 or 1, or OUTSIDE.
        fewest_free: the fewest free pages there were since the caller last set it.
    """

    def __init__(self, size: int, device: torch.device | str, is_empty: bool = False) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.owners = torch.full((size,), OUTSIDE if is_empty else 0, dtype=torch.int8, device=device)
        self._one = self.owners.new_ones(1)
        self._ids = torch.arange(size, dtype=torch.int32, device=device)
        self.num_pages = self.fewest_free = 0 if is_empty else size
        # The free ones are a part of the list.
        self._low, self._high = 0, self.num_pages
        self._ascends = True

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return self._high - self._low

    def require(self, count: int) -> None:
        """Raise RuntimeError unless ``count`` pages are free."""
        if count > self.num_free:
            raise RuntimeError(
                f"the page pool is exhausted: {count} pages needed, {self.num_free} of {self.num_pages} free"
            )

    def allocate(self, count: int) -> torch.Tensor:
        """Allocate ``count`` pages for rows that grow page by page.

        Returns:
            Their ids, int32 [count], all distinct.

        Raises:
            RuntimeError: fewer pages are free; nothing was allocated.
        """
        self.require(count)
        self._high -= count
        return self._own(self._high, count)

    def allocate_stretch(self, count: int) -> torch.Tensor:
        """Allocate ``count`` pages for rows that get many: neighbours as far as possible, in ascending order.

        The pool is scanned if pages came back since the last time, which takes far less than to fill the pages.

        Returns and raises: as :meth:`allocate`.
        """
        self.require(count)
        if not self._ascends:
            self._list(self.num_free)
        self._low += count
        return self._own(self._low - count, count)

    def free(self, ids: torch.Tensor) -> None:
        """Free pages.

        Args:
            ids: int32 [count], distinct ids of pages that were allocated.

        Raises:
            RuntimeError: more pages come back than were allocated; nothing was freed.
        """
        count, free = ids.numel(), self.num_free
        if free + count > self.num_pages:
            raise RuntimeError(
                f"{count} pages were freed in the page pool, but only {self.num_pages - free} were allocated"
            )
        if self._high + count > self._ids.numel():
            self._ids[:free] = self._ids[self._low : self._high].clone()
            self._low, self._high = 0, free
        self.owners.index_add_(0, ids, self._one.expand(count), alpha=-1)
        self._ids[self._high : self._high + count] = ids
        self._high += count
        self._ascends = False

    def add(self, ids: torch.Tensor) -> None:
        """Add pages to the pool, free.

        Args:
            ids: int64 [count], distinct ids of pages that are not in the pool.
        """
        free = self.num_free + ids.numel()
        self.owners[ids] = 0
        self.num_pages += ids.numel()
        self._list(free)

    def remove(self, ids: torch.Tensor) -> None:
        """Remove free pages from the pool; ids as of :meth:`add`, of pages that are in the pool and free."""
        self.require(ids.numel())
        free = self.num_free - ids.numel()
        self.owners[ids] = OUTSIDE
        self.num_pages -= ids.numel()
        self._list(free)

    def _list(self, free: int) -> None:
        """List the free pages anew, of which there are so many."""
        self._ids[:free] = true_places(self.owners == 0, free)
        self._low, self._high, self._ascends = 0, free, True

    def _own(self, first: int, count: int) -> torch.Tensor:
        self.fewest_free = min(self.fewest_free, self.num_free)
        # A copy, since what is freed next may be written over this part of the list.
        ids = self._ids[first : first + count].clone()
        self.owners.index_add_(0, ids, self._one.expand(count))
        return ids

    def verify(self) -> None:
        """Raise RuntimeError unless every page of the pool is free once or owned once (waits for the device)."""
        free = torch.bincount(self._ids[self._low : self._high], minlength=self.owners.numel())
        outside = self.owners == OUTSIDE
        wrong = torch.where(outside, free > 0, (self.owners + free != 1) | (self.owners < 0))
        if wrong.any():
            page = int(wrong.nonzero()[0])
            raise RuntimeError(
                f"page {page} has {int(self.owners[page])} owners and is {int(free[page])} times free"
            )
        if self.num_pages != int((~outside).sum()):
            raise RuntimeError(f"the page pool counts {self.num_pages} pages and has {int((~outside).sum())}")
