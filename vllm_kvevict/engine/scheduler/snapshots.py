"""What layers that are not evicted remember at the end of a compressed prefix, so that requests can go on there.

    a window    | null | null | 7 | 9 |     the blocks over which it lies; the last one may go on behind the prefix
    a state     | null | null | null | 4 |  a copy, since the request that has read the prefix changes its own

Whoever begins in the middle of a block gets a copy of that block by vLLM. Owns the references on blocks that snapshots
have, and the copies of states that are still to be made.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import MambaManager


@dataclass(eq=False)
class Snapshot:
    """Blocks in which other layers hold what they remember of a prefix.

    Attributes:
        blocks: of each of vLLM's groups, in their places.
        is_complete: whether a request can begin with it.
    """

    blocks: tuple[list[KVCacheBlock], ...]
    is_complete: bool

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return (block for of_group in self.blocks for block in of_group if not block.is_null)

    def complete(self) -> None:
        """Its states were copied."""
        self.is_complete = True


class Copies(NamedTuple):
    """Copies of states for a snapshot: pairs of blocks, which both have a reference until they are made."""

    snapshot: Snapshot
    pairs: list[tuple[KVCacheBlock, KVCacheBlock]]


class Snapshots:
    """All snapshots of a server."""

    def __init__(self, manager: KVCacheManager):
        self._manager = manager
        self._refs: Counter[int] = Counter()
        """Of snapshots, by the numbers of their blocks."""
        self._to_copy: list[Copies] = []
        """Once the step is done that is being scheduled."""
        self._due: list[Copies] = []
        """Before the step that is being scheduled."""

    @property
    def new_blocks(self) -> int:
        """Blocks that a snapshot takes at once."""
        return sum(isinstance(x, MambaManager) for x in self._manager.coordinator.single_type_managers)

    def new_step_starts(self) -> None:
        """States of prefixes that the last step has read are copied before this one; requests can begin with them in
        the next."""
        for copies in self._due:
            copies.snapshot.complete()
        self._due, self._to_copy = self._to_copy, []

    def due_copies(self) -> list[tuple[KVCacheBlock, KVCacheBlock]]:
        """Pairs of blocks that workers copy before the step that is being scheduled. Who asks gives the references
        back."""
        return [pair for copies in self._due for pair in copies.pairs]

    def make(self, request_id: str, tokens: int) -> Snapshot:
        """A snapshot of a request at so many tokens, at which the step ends that is being scheduled. There must be
        :attr:`new_blocks` free blocks."""
        pool, groups, pairs = self._manager.block_pool, [], []
        for manager in self._manager.coordinator.single_type_managers:
            skipped = manager.get_num_skipped_tokens(tokens) // manager.block_size
            blocks = manager.req_to_blocks[request_id][skipped : cdiv(tokens, manager.block_size)]
            if isinstance(manager, MambaManager):
                copies = pool.get_new_blocks(len(blocks))
                pairs += list(zip(blocks, copies, strict=True))
                blocks = copies
            else:
                pool.touch(blocks)
            groups.append([*[pool.null_block] * (skipped if blocks else 0), *blocks])
        snapshot = Snapshot(tuple(groups), not pairs)
        self._refs.update(block.block_id for block in snapshot)
        if pairs:
            pool.touch([block for pair in pairs for block in pair])
            self._to_copy.append(Copies(snapshot, pairs))
        return snapshot

    def release(self, snapshot: Snapshot) -> None:
        """Nobody begins with it any more."""
        blocks = list(snapshot)
        self._refs.subtract(block.block_id for block in blocks)
        self._refs = +self._refs
        for copies in self._to_copy:
            if copies.snapshot is snapshot:
                blocks += [block for pair in copies.pairs for block in pair]
        self._to_copy = [copies for copies in self._to_copy if copies.snapshot is not snapshot]
        self._manager.block_pool.free_blocks(reversed(blocks))

    def blocks_without(self, kept: Snapshot | None = None) -> int:
        """Blocks that would be free if there were no snapshots but one."""
        blocks, own = self._manager.block_pool.blocks, {block.block_id for block in kept or ()}
        return sum(blocks[number].ref_cnt == refs for number, refs in self._refs.items() if number not in own)

    def references(self) -> Counter[int]:
        """Of snapshots and copies that are to be made, by the numbers of blocks."""
        pending = (block for copies in self._to_copy for pair in copies.pairs for block in pair)
        return self._refs + Counter(block.block_id for block in pending)
