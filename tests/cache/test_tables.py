import numpy as np
import pytest
import torch

from vllm_kvevict.cache import PageTables


def fill(tables, slot, columns):
    """Put ids that name slot, row and column into a region; returns the expected table."""
    want = slot * 1000 + torch.arange(tables.num_rows)[:, None] * 100 + torch.arange(columns)
    tables.region(slot)[:, :columns] = want
    return want.int()


def grow(tables, slot, columns):
    tables.make_room(np.array([slot]), np.array([columns]))


def test_regions_keep_their_content_while_others_come_and_go():
    tables = PageTables(8, 3, "cpu")
    rng = np.random.default_rng(0)
    want = {}
    for _ in range(300):
        slot = int(rng.integers(8))
        if rng.random() < 0.2:
            tables.release(np.array([slot]))
            want.pop(slot, None)
        elif rng.random() < 0.3 and slot in want:
            columns = int(rng.integers(1, want[slot].shape[1] + 1))
            tables.shrink(slot, columns)
            want[slot] = want[slot][:, :columns]
        else:
            columns = int(rng.integers(1, 90))
            grow(tables, slot, columns)
            want[slot] = fill(tables, slot, columns)
        for other, table in want.items():
            assert torch.equal(tables.region(other)[:, : table.shape[1]], table)
            got = tables.block_tables(torch.tensor([other]), 1, table.shape[1])
            assert torch.equal(got[0], table)


def test_block_tables_of_several_requests_stays_inside_the_arena():
    tables = PageTables(3, 4, "cpu")
    for slot in range(3):
        grow(tables, slot, 5)
        fill(tables, slot, 5)
    got = tables.block_tables(torch.tensor([2, 0]), 2, 50)
    assert got.shape == (2, 4, 50)
    assert got.dtype == torch.int32
    assert got[1, :, 3].tolist() == [2203, 2303, 203, 303]
    assert set(got.flatten().tolist()) <= {0, *tables.arena.tolist()}


def test_release_returns_the_memory():
    tables = PageTables(2, 4, "cpu")
    small = tables.nbytes
    grow(tables, 0, 1000)
    tables.kv_len[0] = 7
    tables.release(np.array([0]))
    assert tables.nbytes == small
    assert not tables.kv_len.any()


@pytest.mark.parametrize("step", [8192, 2048])
def test_tables_stay_below_three_percent_of_the_kv_bytes(step):
    """256 requests of 128k tokens, admitted in chunks, then evicted at budget 0.2.

    Bytes per row are the same for any number of rows, so a few rows stand for all layers and heads.
    """
    requests, tokens, rows, page_size, head_dim = 256, 128 * 1024, 4, 32, 64
    page_bytes = 2 * page_size * head_dim * 2
    rng = np.random.default_rng(0)
    tables = PageTables(requests, rows, "cpu")
    pages = np.zeros((requests, rows), np.int64)
    peak = 0.0

    def check():
        nonlocal peak
        # What the kernel is given besides: the wide table of one layer, here all rows at once.
        dense = pages.max() * (pages > 0).sum() * 4
        peak = max(peak, (tables.nbytes + dense) / (pages.sum() * page_bytes))

    # As a server does: each request is prefilled in chunks and evicted before the next one starts.
    for slot in range(requests):
        for stop in range(step, tokens + 1, step):
            pages[slot] = stop // page_size
            grow(tables, slot, stop // page_size)
        if slot % 32 == 0:
            check()
        # Shares of the heads between 0.2 and 2.7 times the mean.
        share = rng.dirichlet(np.ones(rows)) * rows
        kept = np.clip(0.2 * tokens * share, 64, tokens).astype(np.int64)
        pages[slot] = -(-kept // page_size)
        tables.shrink(slot, int(pages[slot].max()))
        check()
    # All of them evicted at once, one head of each keeping nearly everything.
    pages[:] = 0.2 * tokens / page_size / rows
    pages[:, 0] = 0.2 * tokens / page_size * (rows - 1)
    for slot in range(requests):
        tables.shrink(slot, int(pages[slot].max()))
    check()
    assert peak < 0.03
