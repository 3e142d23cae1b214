"""The free pages of one worker rank."""

import torch


class PagePool:
    """A stack of free page ids on the device whose height the host knows.

    Every caller knows how many pages it takes or gives (see :mod:`vllm_kvevict.cache.lengths`), so taking is
    a slice of the stack and exhaustion is noticed without asking the device.

    Attributes:
        num_pages: pages in the pool.
        owners: int8 [num_pages], number of rows that hold the page: 0 or 1.
    """

    def __init__(self, num_pages: int, device: torch.device | str) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self.owners = torch.zeros(num_pages, dtype=torch.int8, device=device)
        self._one = self.owners.new_ones(1)
        # Lowest ids on top: a lightly used pool stays in few memory pages.
        self._stack = torch.arange(num_pages - 1, -1, -1, dtype=torch.int32, device=device)
        self._height = num_pages

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return self._height

    def require(self, count: int) -> None:
        """Raise RuntimeError unless ``count`` pages are free."""
        if count > self._height:
            raise RuntimeError(
                f"the page pool is exhausted: {count} pages needed, {self._height} of {self.num_pages} free"
            )

    def take(self, count: int) -> torch.Tensor:
        """Take ``count`` pages.

        Returns:
            Their ids, int32 [count], all distinct.

        Raises:
            RuntimeError: fewer pages are free; nothing was taken.
        """
        self.require(count)
        self._height -= count
        # From the top downwards, so that neighbours come in ascending order: a row's pages are read as one stream.
        # A copy, since the next give writes over this part of the stack.
        ids = self._stack[self._height : self._height + count].flip(0)
        self.owners.index_add_(0, ids, self._one.expand(count))
        return ids

    def give(self, ids: torch.Tensor) -> None:
        """Give pages back.

        Args:
            ids: int32 [count], distinct ids of pages that were taken.

        Raises:
            RuntimeError: more pages come back than were taken; nothing was given.
        """
        count = ids.numel()
        if self._height + count > self.num_pages:
            taken = self.num_pages - self._height
            raise RuntimeError(f"{count} pages were given back to the page pool, but only {taken} were taken")
        self.owners.index_add_(0, ids, self._one.expand(count), alpha=-1)
        self._stack[self._height : self._height + count] = ids.flip(0)
        self._height += count

    def verify(self) -> None:
        """Raise RuntimeError unless every page is free once or owned once (waits for the device)."""
        free = torch.bincount(self._stack[: self._height], minlength=self.num_pages)
        wrong = ((self.owners + free) != 1) | (self.owners < 0)
        if wrong.any():
            page = int(wrong.nonzero()[0])
            raise RuntimeError(
                f"page {page} has {int(self.owners[page])} owners and is {int(free[page])} times free"
            )
