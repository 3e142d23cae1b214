"""Entries of each row, the newest or from some entry on, of unequal rows too, against the entries one by one."""

import numpy as np
import pytest
import torch

from vllm_kvevict.cache import reading
from vllm_kvevict.cache.format import Part

from .writers import WritableCache, dim_pairs, plain, token_pairs, transposed, writer

L, H, D, PS = 2, 3, 32, 32


@pytest.fixture(params=[(plain, plain), (transposed, plain), (dim_pairs, token_pairs)])
def cache(request):
    storage = torch.full((100, 2 * PS * D), torch.nan)
    sizes = {"num_layers": L, "num_kv_heads": H, "page_size": PS, "max_requests": 2}
    return WritableCache(storage, **sizes, write=writer(PS, *request.param))


def read(cache, lengths=None):
    """A request of 110 tokens of which each head of layer 1 has kept so many entries; its slot."""
    slot = cache.open()
    for places in cache.entry_slots(cache.extend([slot], [110])):
        keys = torch.randn(places.numel(), D)
        cache.write(keys, -keys, places)
    if lengths:
        cache.compact(slot, 1, [torch.arange(n) + 110 - n for n in lengths])
        # What lies behind the entries is not theirs.
        for head, n in enumerate(lengths):
            behind = torch.arange(n, -(-n // PS) * PS)
            pages, tokens = cache.rows.places(cache.table(slot, 1), torch.full_like(behind, head), behind)
            nothing = torch.full((len(behind), D), torch.nan)
            cache.write(nothing, nothing, pages * PS + tokens)
    return slot


def expected(cache, slot, counts):
    """Keys of layer 1, row by row."""
    most, found = max(counts), torch.zeros(H, max(counts), D)
    for head, (count, length) in enumerate(zip(counts, cache.lengths.of(slot)[1].tolist(), strict=True)):
        entries = torch.arange(length - count, length)
        found[head, most - count :] = cache.gather(slot, 1, torch.full_like(entries, head), entries)[0]
    return found


def differ(cache, slot, counts):
    """Whether what is read differs from that."""
    found = cache.read_last("key", slot, 1, np.array(counts, np.int64))
    return not torch.equal(found, expected(cache, slot, counts))


LENGTHS = [None, [50, 50, 50], [64, 64, 64], [33, 110, 70], [1, 64, 32]]
COUNTS = [None, [0, 0, 0], [1, 1, 1], [1, 0, 1], [1, 33, 20], [0, 40, 32], [1, 50, 31]]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_row_ends_with_its_last_entry(cache, lengths, counts):
    slot = read(cache, lengths)
    assert not differ(cache, slot, counts or cache.lengths.of(slot)[1].tolist())


def test_equal_rows_are_read_page_by_page(cache, monkeypatch):
    """And what is found by places is the same."""
    slot = read(cache)
    monkeypatch.setattr(Part, "read", lambda *arguments: pytest.fail("by places"))
    monkeypatch.setattr(reading, "read_columns", lambda *arguments: arguments[3:])
    assert cache.read_last("key", slot, 1, np.array([45] * H)) == (65, 110)
    with pytest.raises(pytest.fail.Exception, match="by places"):
        cache.read_last("key", slot, 1, np.array([45, 45, 44]))


@pytest.mark.parametrize("counts", [[111, 1, 1], [1, 1, 34], [-1, 1, 1], [1, 1], [[1, 1, 1]]])
def test_what_rows_do_not_hold_is_refused(cache, counts):
    slot = read(cache, [110, 110, 33])
    with pytest.raises(ValueError, match=r"were asked of rows that hold \[110, 110, 33\]"):
        cache.read_last("key", slot, 1, np.array(counts, np.int64))


def test_other_entries_are_noticed(cache, monkeypatch):
    slot, read_last = read(cache, [33, 110, 70]), reading.read_last
    read_from = "vllm_kvevict.cache.paged.read_last"
    monkeypatch.setattr(read_from, lambda *arguments: read_last(*arguments).roll(1, 1))
    assert differ(cache, slot, [1, 33, 20])
    monkeypatch.setattr(read_from, lambda *arguments: read_last(*arguments).add(1e-6))
    assert differ(cache, slot, [1, 33, 20])


def behind(cache, slot, first, counts):
    """What is read of layer 1 from some entries on, [2, H, most, D], and the same one by one."""
    first, counts = np.array(first, np.int64), np.array(counts, np.int64)
    found = torch.stack([cache.read_behind(name, slot, 1, first, counts) for name in ("key", "value")])
    wanted = torch.zeros_like(found)
    for head, (start, count) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
        entries = torch.arange(start, start + count)
        wanted[:, head, :count] = torch.stack(cache.gather(slot, 1, torch.full_like(entries, head), entries))
        found[:, head, count:] = 0
    return found, wanted


@pytest.mark.parametrize(
    "first, counts", [([0, 0, 0], [1, 64, 32]), ([20, 3, 31], [13, 100, 39]), ([33, 9, 9], [0, 1, 1])]
)
def test_entries_behind_others(cache, first, counts):
    slot = read(cache, [33, 110, 70])
    found, wanted = behind(cache, slot, first, counts)
    assert torch.equal(found, wanted)
    if any(first):
        assert not torch.equal(found, behind(cache, slot, [max(0, start - 1) for start in first], counts)[1])


@pytest.mark.parametrize(
    "first, counts", [([0, 0, 0], [34, 1, 1]), ([33, 0, 0], [1, 1, 1]), ([-1, 0, 0], [1, 1, 1])]
)
def test_entries_that_rows_do_not_hold_are_refused(cache, first, counts):
    slot = read(cache, [33, 110, 70])
    for name in ("key", "value"):
        with pytest.raises(ValueError, match=r"were asked of rows that hold \[33, 110, 70\]"):
            cache.read_behind(name, slot, 1, np.array(first, np.int64), np.array(counts, np.int64))
