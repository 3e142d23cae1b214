"""Blocks of vLLM's that become pages and back, where a model has layers of other kinds beside evicted ones.

Owns which blocks are pages.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvevict.engine.scheduler.outbox import Outbox


class NoBlocks(KVCacheBlocks):
    """Blocks without ids: workers place pages themselves."""

    def get_block_ids(self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None) -> Any:
        # Never None (the V1 runner asserts on it when a request resumes), and fresh lists (it extends them).
        return tuple([] for _ in (self.blocks if group_ids is None else group_ids))


class SharedBlocks:
    """The scheduler's account of which blocks are pages.

    Blocks change hands when either side needs them. The workers hear of it with the step, before which they move what
    lies in the pages that they lose: counts are exact, so there is room for it.

    Args:
        pool: vLLM's blocks, which other layers take from, too.
        withheld: blocks that are never made pages.

    Attributes:
        as_pages: the blocks that are pages now.
    """

    def __init__(self, pool: BlockPool, withheld: int, outbox: Outbox):
        self._pool, self.outbox = pool, outbox
        self.withheld = withheld
        self.as_pages: list[KVCacheBlock] = []

    @property
    def most(self) -> int:
        """Blocks that may be pages at once."""
        return self._pool.num_gpu_blocks - self.withheld

    @property
    def of_others(self) -> int:
        """Blocks that are neither free nor pages. vLLM's null block is one of them; it is among those withheld."""
        return self._pool.num_gpu_blocks - self._pool.get_num_free_blocks() - len(self.as_pages)

    def beyond_withheld(self, others: int) -> int:
        """Of so many blocks of other layers, those that could be pages."""
        return max(0, others - self.withheld)

    def grow(self, count: int) -> bool:
        """Make blocks pages, until there are at least ``count``; whether so many were free or pages already."""
        missing = count - len(self.as_pages)
        if missing <= 0:
            return True
        if missing > self._pool.get_num_free_blocks():
            return False
        blocks = self._pool.get_new_blocks(missing)
        self.as_pages += blocks
        self.outbox.blocks_become_pages(block.block_id for block in blocks)
        return True

    @contextlib.contextmanager
    def holding(self, blocks: Sequence[KVCacheBlock]) -> Iterator[None]:
        """Keep cached blocks that a request is to begin with from becoming pages meanwhile."""
        self._pool.touch(blocks)
        try:
            yield
        finally:
            self._pool.free_blocks(reversed(blocks))

    def invalidate(self) -> None:
        """Let no further request begin with what blocks of other layers remember."""
        self._pool.evict_blocks(
            {block.block_id for block in self._pool.blocks if block.block_hash is not None}
        )

    def shrink(self, count: int) -> bool:
        """Give other layers blocks, until at most ``count`` are pages; whether that changed anything."""
        count = max(count, 0)
        given, self.as_pages = self.as_pages[count:], self.as_pages[:count]
        self.outbox.blocks_are_lost(block.block_id for block in given)
        self._pool.free_blocks(given)
        return bool(given)
