"""What layers that are not evicted remember at the end of a compressed prefix, so that requests can go on there.

    a window    | null | null | 7 | 9 |     the blocks over which it lies; the last one may go on behind the prefix
    a state     | null | null | null | 4 |  a copy, since the request that has read the prefix changes its own

Whoever begins in the middle of a block gets a copy of that block by vLLM. Owns the references on blocks that snapshots
have, and the copies of states that are still to be made.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
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
    is_complete: bool = False

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return (block for of_group in self.blocks for block in of_group if not block.is_null)

    def complete(self) -> None:
        """The step was done that it is of, and states were copied."""
        self.is_complete = True


class Copies(NamedTuple):
    """Copies of states for a snapshot, none for windows: pairs of blocks, which have a reference until it is made."""

    snapshot: Snapshot
    pairs: list[tuple[KVCacheBlock, KVCacheBlock]]


class Snapshots:
    """All snapshots of a server."""

    def __init__(self, manager: KVCacheManager):
        self._manager = manager
        self._refs: Counter[int] = Counter()
        """Of snapshots, by the numbers of their blocks."""
        self._alone: int | None = None
        """Of these, the blocks that nobody else holds, since this step began; None if it is not known."""
        self._to_copy: list[Copies] = []
        """Once the step is done that is being scheduled."""
        self._due: list[Copies] = []
        """Before the step that is being scheduled."""

    @property
    def new_blocks(self) -> int:
        """Blocks that a snapshot takes at once."""
        return sum(isinstance(x, MambaManager) for x in self._manager.coordinator.single_type_managers)

    def new_step_starts(self) -> None:
        """Requests can begin with what the last step has left. States are copied before this step, so with them in the
        next."""
        self._alone = None
        done = [*self._due, *(copies for copies in self._to_copy if not copies.pairs)]
        for copies in done:
            copies.snapshot.complete()
        self._due, self._to_copy = [copies for copies in self._to_copy if copies.pairs], []

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
        snapshot = Snapshot(tuple(groups))
        self._refs.update(block.block_id for block in snapshot)
        pool.touch([block for pair in pairs for block in pair])
        self._to_copy.append(Copies(snapshot, pairs))
        return snapshot

    def release(self, snapshot: Snapshot) -> None:
        """Nobody begins with it any more."""
        blocks = list(snapshot)
        for block in blocks:
            self._lose(block)
        for copies in self._to_copy:
            if copies.snapshot is snapshot:
                blocks += [block for pair in copies.pairs for block in pair]
        self._to_copy = [copies for copies in self._to_copy if copies.snapshot is not snapshot]
        self._manager.block_pool.free_blocks(reversed(blocks))

    def _lose(self, block: KVCacheBlock) -> None:
        """A snapshot does not hold a block any more."""
        self._refs[block.block_id] -= 1
        if not self._refs[block.block_id]:
            del self._refs[block.block_id]
            if self._alone is not None and block.ref_cnt == 1:
                self._alone -= 1

    def blocks_without(self, kept: Iterable[KVCacheBlock] = ()) -> int:
        """Blocks that would be free if there were no snapshots, apart from some."""
        if self._alone is None:
            blocks = self._manager.block_pool.blocks
            self._alone = sum(map(self._is_alone, map(blocks.__getitem__, self._refs)))
        return self._alone - len({block.block_id for block in kept if self._is_alone(block)})

    def _is_alone(self, block: KVCacheBlock) -> bool:
        """Whether only snapshots hold a block."""
        return block.ref_cnt == self._refs.get(block.block_id)

    def references(self) -> Counter[int]:
        """Of snapshots and copies that are to be made, by the numbers of blocks."""
        pending = (block for copies in self._to_copy for pair in copies.pairs for block in pair)
        return self._refs + Counter(block.block_id for block in pending)
