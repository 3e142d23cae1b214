"""Blocks in which layers that are not evicted compute the repeat of a prompt, beside what they remember of it.

Owns these blocks. They are taken for good: a step repeats a part of one prompt, what it computes is dropped after it,
and the next step may use them for another. So no repeat waits for blocks.
"""

from collections.abc import Sequence

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy
from vllm.v1.core.single_type_kv_cache_manager import MambaManager

from vllm_kvevict.engine.layers import is_evicted, keeps_all


class ScratchBlocks:
    """Of each group of layers that is not evicted.

    Args:
        manager: vLLM's, with nothing held yet.
        counts: blocks of each of these groups, in vLLM's order.
        drafts: tokens that a draft model stores behind those of a step.
    """

    def __init__(self, manager: KVCacheManager, counts: Sequence[int], drafts: int):
        self._drafts, self._max_model_len = drafts, manager.max_model_len
        self._managers = manager.coordinator.single_type_managers
        self._null_block = manager.block_pool.null_block
        self._blocks: dict[int, list[KVCacheBlock]] = {}
        others = [group for group in self._managers if not is_evicted(group.kv_cache_spec)]
        for group, count in zip(others, counts, strict=True):
            self._blocks[group.kv_cache_group_id] = manager.block_pool.get_new_blocks(count)

    def tables(self, request_id: str, first: int, end: int) -> tuple[list[int], ...]:
        """Block ids of each group, for tokens from ``first`` to ``end`` that follow all that a request has computed."""
        tables = []
        for manager in self._managers:
            table = self._blocks.get(manager.kv_cache_group_id, [])
            if keeps_all(manager.kv_cache_spec):
                # What a draft model stores of them, and of what it drafts behind them, nobody reads.
                stored = min(end + self._drafts, self._max_model_len)
                table = [self._null_block] * cdiv(stored, manager.block_size)
            elif table and isinstance(manager, MambaManager):
                # Where states are kept, vLLM looks for them in the columns of their tokens.
                is_kept = manager.mamba_cache_mode == "align"
                table = table * cdiv(end, manager.block_size) if is_kept else table
            elif table:
                own, size = manager.req_to_blocks[request_id], manager.block_size
                table = [*own[: cdiv(first, size)], *table][: cdiv(end, size)]
            tables.append([block.block_id for block in table])
        return tuple(tables)

    def copies(self, request_id: str) -> list[KVCacheBlockCopy]:
        """What is copied into them before: a request's states, which its tokens would otherwise change."""
        return [
            KVCacheBlockCopy(manager.req_to_blocks[request_id][-1].block_id, scratch[0].block_id)
            for manager in self._managers
            if isinstance(manager, MambaManager) and (scratch := self._blocks[manager.kv_cache_group_id])
        ]
