"""Blocks that become pages and back: both sides' accounts."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.engine.scheduler.blocks import SharedBlocks
from vllm_kvevict.engine.scheduler.outbox import Outbox
from vllm_kvevict.engine.worker.blocks import BlockPages

BLOCKS, RESERVE = 20, 5


@given(st.lists(st.tuples(st.sampled_from(["grow", "shrink", "take", "give", "step"]), st.integers(0, 12))))
def test_workers_know_which_blocks_are_pages(moves):
    pool = BlockPool(BLOCKS, enable_caching=False, hash_block_size=16)
    outbox = Outbox()
    shared = SharedBlocks(pool, RESERVE, outbox)
    assert (shared.most, shared.beyond_withheld(shared.of_others)) == (BLOCKS - RESERVE, 0)
    others, known = [], set()
    for move, count in [*moves, ("step", 0)]:
        free = pool.get_num_free_blocks()
        if move == "grow":
            shared.grow(min(count, free + len(shared.as_pages)))
        elif move == "shrink":
            before = len(shared.as_pages)
            assert shared.shrink(count) == (count < before)
            assert len(shared.as_pages) == min(count, before)
        elif move == "take":
            others += pool.get_new_blocks(min(count, free))
        elif move == "give":
            pool.free_blocks(others[:count])
            others = others[count:]
        else:
            message = outbox.flush(None, None)
            new, lost = message.new_blocks, message.lost_blocks
            assert known.isdisjoint(new) and known.issuperset(lost)
            known = (known | set(new)) - set(lost)
            assert known == {block.block_id for block in shared.as_pages}
        ids = [block.block_id for block in (*others, *shared.as_pages)]
        assert len(ids) + pool.get_num_free_blocks() == BLOCKS - 1
        assert len(set(ids)) == len(ids) and 0 not in ids
        # The first of the reserve is vLLM's padding.
        assert shared.of_others == len(others) + 1
        assert shared.beyond_withheld(shared.of_others) == max(0, len(others) + 1 - RESERVE)


def test_growing_takes_no_more_than_is_free():
    pool = BlockPool(BLOCKS, enable_caching=False, hash_block_size=16)
    shared = SharedBlocks(pool, RESERVE, Outbox())
    pool.get_new_blocks(15)
    assert not shared.grow(5) and not shared.as_pages
    assert shared.grow(4) and len(shared.as_pages) == 4


def layout(layers: int, block_bytes: int, num_blocks: int, outermost: bool):
    """vLLM's description of a group of layers in memory: blocks in each layer, or layers in each block."""
    block_stride = layers * block_bytes if outermost else block_bytes
    layer_stride = block_bytes if outermost else num_blocks * block_bytes
    return SimpleNamespace(
        size=layers * num_blocks * block_bytes, layer_stride=layer_stride, block_stride=block_stride
    )


@pytest.mark.parametrize("outermost", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_pages_of_a_block_are_its_bytes_in_each_layer(layers, outermost):
    page, per_layer, num_blocks = 64, 4, 6
    tensor = layout(layers, per_layer * page, num_blocks, outermost)
    pages = BlockPages.of(tensor, num_blocks, page)
    assert pages.per_block == layers * per_layer
    for block in range(num_blocks):
        expected = set()
        for layer in range(layers):
            first = layer * tensor.layer_stride + block * tensor.block_stride
            expected |= {(first + offset) // page for offset in range(0, per_layer * page, page)}
        assert set(pages.in_blocks([block], torch.device("cpu")).tolist()) == expected
    everything = pages.in_blocks(range(num_blocks), torch.device("cpu"))
    assert sorted(everything.tolist()) == list(range(layers * per_layer * num_blocks))


@pytest.mark.parametrize("block_bytes", [32, 96])
def test_blocks_that_are_no_whole_number_of_pages_are_refused(block_bytes):
    with pytest.raises(
        KVEvictionError, match=r"^--kv-eviction cannot divide vLLM's blocks into pages of 64 bytes"
    ):
        BlockPages.of(layout(3, block_bytes, 6, False), 6, 64)
