"""Which pages lie in vLLM's blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_kvevict.engine.config import KVEvictionError


@dataclass(frozen=True)
class BlockPages:
    """Pages by block, over one allocation that all groups of layers share.

    Attributes:
        starts: of each stretch of pages in block 0: one for each place of a layer, or one in all where the places of a
            block lie side by side.
        length: pages of such a stretch; the next block's begins where it ends.
    """

    starts: tuple[int, ...]
    length: int

    @classmethod
    def of(cls, layers: Any, num_blocks: int, page_bytes: int) -> "BlockPages":
        """The pages of blocks that vLLM has laid out.

        Args:
            layers: vLLM's KVCacheTensor of a group.
            num_blocks: in the allocation.
            page_bytes: of one of our pages.

        Raises:
            KVEvictionError: blocks are no whole number of pages.
        """
        side_by_side = layers.block_stride * num_blocks == layers.size
        places = 1 if side_by_side else layers.size // layers.layer_stride
        starts = [place * layers.layer_stride for place in range(places)]
        whole = places * layers.block_stride * num_blocks == layers.size
        if not whole or any(start % page_bytes for start in (*starts, layers.block_stride)):
            raise KVEvictionError(
                f"--kv-eviction cannot divide vLLM's blocks into pages of {page_bytes} bytes: a block has "
                f"{layers.block_stride} bytes for each of {places} layers, so change --block-size or "
                "--kv-eviction-config.page_size"
            )
        return cls(tuple(start // page_bytes for start in starts), layers.block_stride // page_bytes)

    @property
    def per_block(self) -> int:
        """Pages of a block."""
        return len(self.starts) * self.length

    def in_blocks(self, blocks: Sequence[int], device: torch.device) -> Tensor:
        """Pages of these blocks, int64 [blocks * per_block]."""
        block = torch.tensor(blocks, dtype=torch.int64, device=device)[:, None, None]
        start = torch.tensor(self.starts, device=device)[None, :, None]
        return (start + block * self.length + torch.arange(self.length, device=device)).flatten()
