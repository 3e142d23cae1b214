"""Compaction behind entries that stay: they are not read or moved, and what is borrowed of them remains."""

import numpy as np
import pytest
import torch

from .filling import append, entries
from .writers import WritableCache, plain, transposed, writer

L, H, D, PS = 2, 2, 32, 32


@pytest.fixture(params=[(plain, plain), (transposed, plain)], ids=["plain", "transposed"])
def cache(request):
    storage, write = torch.full((80, 2 * PS * D), torch.nan), writer(PS, *request.param)
    sizes = {"num_layers": L, "num_kv_heads": H, "page_size": PS, "max_requests": 6}
    return WritableCache(storage, **sizes, write=write)


def read(cache, tokens):
    """A request that stored so many tokens; its slot."""
    slot = cache.open()
    append(cache, slot, tokens)
    return slot


def some(count, of, seed=0):
    """So many of the numbers below ``of``, ascending."""
    return torch.randperm(of, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def compact(cache, slot, first, kept, at_once=False):
    """Compact all layers, and check what is where then; the pages that are freed."""
    before, first = entries(cache, slot), np.array(first, np.int64)
    parts = [slice(0, L * H)] if at_once else [slice(i * H, (i + 1) * H) for i in range(L)]
    less = sum(cache.compact(slot, part.start // H, kept[part], first[part]) for part in parts)
    cache.verify()
    for stay, chosen, old, new in zip(first.tolist(), kept, before, entries(cache, slot), strict=True):
        assert torch.equal(new, torch.cat([old[:, :stay], old[:, stay:][:, chosen]], 1))
    return less


FIRST = [0, 1, 45, 64]
KEPT = [some(33, 100), some(0, 99), some(20, 55), some(36, 36)]


@pytest.mark.parametrize("at_once", [False, True])
def test_survivors_follow_what_stays(cache, at_once):
    slot, other = read(cache, 100), read(cache, 50)
    theirs, free = entries(cache, other), cache.num_free
    assert compact(cache, slot, FIRST, KEPT, at_once) == 2 + 3 + 1 + 0 == cache.num_free - free
    settled = cache.settle(slot)
    assert settled.kept.ravel().tolist() == [33, 1, 65, 100] and settled.pages == 2 + 1 + 3 + 4
    assert all(map(torch.equal, theirs, entries(cache, other)))
    for tokens in (1, 40):
        append(cache, slot, tokens)
        compact(cache, slot, [33, 1, 65, 100], [some(n, tokens) for n in (0, tokens, 1, 1)], at_once)


def test_with_zeros_it_is_what_it_is_without(cache):
    slots, kept = [read(cache, 100), read(cache, 100)], [some(n, 100, n) for n in (1, 32, 70, 100)]
    before = entries(cache, slots[0])
    assert cache.compact(slots[0], 0, kept) == cache.compact(slots[1], 0, kept, np.zeros(4, np.int64))
    assert np.array_equal(cache.lengths.of(slots[0]), cache.lengths.of(slots[1]))
    for old, new, chosen in zip(before, entries(cache, slots[0]), kept, strict=True):
        assert torch.equal(old[:, chosen], new)


def test_nothing_before_them_is_touched(cache):
    """Neither pages that hold only what stays nor that part of others; and keeping all writes nothing."""
    slot, first = read(cache, 100), np.array([40, 64, 0, 32])
    pages, before = cache.tables.region(slot)[:, :4].clone(), cache.storage.clone()
    compact(cache, slot, first, [torch.arange(100 - n) for n in first])
    assert torch.equal(cache.storage.nan_to_num(7), before.nan_to_num(7))
    compact(cache, slot, first, [some(20, 100 - n) for n in first])
    assert torch.equal(cache.tables.region(slot)[:, :4], pages), "rows are compacted in place"
    for row, stay in enumerate(first):
        whole = pages[row, : stay // PS].long()
        assert torch.equal(cache.storage[whole], before[whole])


@pytest.mark.parametrize("compressed", [False, True])
def test_what_is_borrowed_and_stays_is_neither_copied_nor_given_back(cache, compressed):
    slot = read(cache, 100)
    if compressed:
        cache.compact(slot, 0, [torch.arange(n) for n in (64, 70, 1, 33)])
    cache.loans.freeze(7, slot, None if compressed else 2)
    append(cache, slot, 60)
    first = cache.loans.columns[slot] * PS
    checksum, borrowed = cache.loans.checksum(7), cache.borrowed(slot)
    cache.pool.fewest_free = free = cache.num_free
    lengths = cache.lengths.of(slot).ravel()
    kept = [some(n, length - stay) for n, length, stay in zip((5, 0, 1, 2), lengths, first, strict=True)]
    kept[1] = kept[1] if first[1] else torch.tensor([0])
    less = compact(cache, slot, first, kept)
    assert less == cache.num_free - free > 0
    assert cache.pool.fewest_free == free, "no page was taken"
    assert (cache.borrowed(slot), cache.loans.borrowers(7)) == (borrowed, [slot])
    assert cache.loans.checksum(7) == checksum
    append(cache, slot, 70)
    cache.verify()
    assert cache.loans.checksum(7) == checksum
    cache.close([slot])
    cache.loans.drop(7)
    assert cache.num_free == 80


@pytest.mark.parametrize("at_once", [False, True])
def test_what_is_borrowed_and_chosen_among_is_copied(cache, at_once):
    """From the page on in which the first of them lies; a layer where all that is borrowed stays has no copies."""
    slot = read(cache, 128)
    cache.loans.freeze(1, slot, 2)
    cache.loans.freeze(2, slot, 1)
    checksums, pages = [cache.loans.checksum(n) for n in (1, 2)], cache.tables.region(slot)[:, :4].clone()
    compact(cache, slot, [96, 97, 40, 96], [some(9, 32), some(9, 31), some(9, 88), some(0, 32)], at_once)
    assert cache.loans.columns[slot].tolist() == [3, 3, 1, 3] and cache.held(slot) == 1 + 1 + 1 + 0
    assert torch.equal(cache.tables.region(slot)[:2, :4], pages[:2])
    assert [cache.loans.checksum(n) for n in (1, 2)] == checksums
    with pytest.raises(ValueError, match="cannot be frozen"):  # its rows borrow differently many pages
        append(cache, slot, 128)
        cache.loans.freeze(3, slot, 1)
    compact(cache, slot, [64] * 4, [some(3, 60, row) for row in range(4)], at_once)
    assert cache.loans.columns[slot].tolist() == [2, 2, 1, 2]
    assert (cache.loans.borrowers(1), cache.loans.borrowers(2)) == ([slot], [])
    cache.loans.drop(2)
    compact(cache, slot, [32] * 4, [some(3, 30)] * 4, at_once)
    append(cache, slot, 64)
    cache.loans.freeze(3, slot, 2)
    fork = cache.open([(1, 1), (3, 2)])
    assert cache.lengths.of(fork).ravel().tolist() == [96] * 4
    for one, other in zip(entries(cache, slot), entries(cache, fork), strict=True):
        assert torch.equal(one[:, :96], other)
    cache.verify()


def test_copies_of_a_part_need_pages(cache):
    slot = read(cache, 128)
    cache.loans.freeze(1, slot, 4)
    read(cache, cache.num_free // 4 * PS)
    before = entries(cache, slot)
    with pytest.raises(RuntimeError, match="the page pool is exhausted: 4 pages needed, 0 of 80 free"):
        cache.compact(slot, 0, [torch.arange(50)] * H, np.array([40, 64]))
    assert all(map(torch.equal, before, entries(cache, slot)))
    assert cache.compact(slot, 0, [torch.arange(0)] * H, np.array([64, 64])) == 4
    cache.verify()


@pytest.mark.parametrize(
    "first, counts",
    [
        ([0, 1], [0, 5]),  # a row would be empty
        ([5, 1], [6, 5]),  # more than there are
        ([11, 1], [0, 5]),
        ([-1, 1], [5, 5]),
        ([1], [5, 5]),
        ([1, 1, 1], [5, 5]),
    ],
)
def test_what_cannot_be_kept_is_refused(cache, first, counts):
    slot = read(cache, 10)
    before = entries(cache, slot)
    with pytest.raises(ValueError, match=rf"cannot keep .* of \[10, 10\] .* behind the first \[{first[0]}"):
        cache.compact(slot, 0, [torch.arange(n) for n in counts], np.array(first))
    cache.verify()
    assert all(map(torch.equal, before, entries(cache, slot)))
