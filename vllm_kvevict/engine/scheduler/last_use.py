"""When what layers that are not evicted remember was used last, in vLLM's cached blocks. Owns these times."""

from collections.abc import Iterator, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock


class LastUse:
    """Of all blocks of a pool. Free ones are taken in this order."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._times: dict[int, int] = {}
        """By number of a block. Who uses others gives it another time, so those of what a block held before do no
        harm: they are earlier."""

    def use(self, blocks: Sequence[KVCacheBlock], now: int) -> None:
        """Blocks are used now, by the clock of segments."""
        self._times.update((block.block_id, now) for block in blocks)
        # vLLM takes them last from now on.
        self._pool.touch(blocks)
        self._pool.free_blocks(reversed(blocks))

    def times(self) -> Iterator[int]:
        """Of the free blocks, in the order in which vLLM takes them; 0 of those that hold nothing."""
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        while block is not None and block.next_free_block is not None:  # the last one stands for the end
            yield self._times.get(block.block_id, 0) if block.block_hash is not None else 0
            block = block.next_free_block
