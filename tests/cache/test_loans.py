"""Shared entries: what requests begin with, lent to each of them, while they go on writing behind it."""

import pytest
import torch

from .filling import append, entries
from .writers import MORE, WritableCache, plain, transposed, writer

L, H, D, PS = 2, 2, 32, 32


@pytest.fixture(params=[(plain, plain), (transposed, plain)], ids=["plain", "transposed"])
def cache(request):
    """A cache whose pages are full of what somebody left there: if attention read it, every sum would be NaN."""
    storage = torch.full((80, PS * (2 * D + 1)), torch.nan)
    return WritableCache(
        storage,
        num_layers=L,
        num_kv_heads=H,
        page_size=PS,
        max_requests=6,
        write=writer(PS, *request.param),
        more=MORE,
    )


def read(cache, tokens, kept=()):
    """A request that stored so many tokens, and kept the first entries of each row if that is given; its slot."""
    slot = cache.open()
    append(cache, slot, tokens)
    for layer in range(L if kept else 0):
        rows = kept[layer * H : (layer + 1) * H]
        cache.compact(slot, layer, [torch.arange(count) for count in rows])
    cache.settle(slot)
    return slot


def shared_entries(cache, number):
    """All rows of a shared entry as of `entries`, with what lies behind them in partial pages."""
    entry, found = cache.loans[number], []
    for row, count in enumerate((entry.full + (entry.rest > 0)).tolist()):
        places = cache.rows.places(entry.table, torch.full((count * PS,), row), torch.arange(count * PS))
        found.append(
            torch.cat([cache.memory.read(f.name, *places) for f in cache.memory.layout.fields], 1)[None]
        )
    return found


def same(cache, first, second, tokens):
    """Whether two requests begin with the same entries in each row."""
    pairs = zip(entries(cache, first), entries(cache, second), strict=True)
    return all(torch.equal(one[:, :tokens], other[:, :tokens]) for one, other in pairs)


KEPT = [64, 70, 1, 33]


# What an eviction left.


def test_the_checksum_of_a_shared_entry_tells_whether_anybody_wrote_to_it(cache):
    loans, donor = cache.loans, read(cache, 100, KEPT)
    loans.freeze(7, donor)
    checksum = loans.checksum(7)
    append(cache, cache.open([(7, None)]), 40)
    assert loans.checksum(7) == checksum
    for memory in (cache.storage, *cache.memory.asides):
        for page in loans[7].pages[[0, -1]]:
            memory[page, 0] += 1
            assert loans.checksum(7) != checksum
            memory[page, 0] -= 1
    pages = loans[7].pages[:2]
    cache.storage[pages] = cache.storage[pages.flip(0)]
    assert loans.checksum(7) != checksum
    with pytest.raises(ValueError, match="there is no shared entry 8"):
        loans.checksum(8)


def test_a_borrower_has_what_was_kept_and_takes_partial_pages_only(cache):
    loans, donor = cache.loans, read(cache, 100, KEPT)
    before, held = entries(cache, donor), cache.held(donor)
    loans.freeze(7, donor)
    assert (cache.held(donor), len(loans[7].pages)) == (3, held) == (3, 2 + 3 + 1 + 2)
    assert loans.pages == {True: 8, False: 0}
    fork = cache.open([(7, None)])
    assert (cache.held(fork), cache.borrowed(fork)) == (3, 2 + 2 + 0 + 1)
    assert loans.borrowers(7) == [donor, fork]
    assert cache.lengths.of(fork).ravel().tolist() == KEPT
    for slot in (donor, fork):
        assert all(torch.equal(*pair) for pair in zip(before, entries(cache, slot), strict=True))
    for old, new in zip(before, shared_entries(cache, 7), strict=True):
        assert torch.equal(old, new[:, : old.shape[1]])
        assert not new[:, old.shape[1] :, : 2 * D + 1].any(), "nothing is left of what was evicted"
    keys, *_ = cache.gather(donor, 0, torch.tensor([1]), torch.tensor([70]))
    assert keys.any(), "the donor's own page has old entries behind its last one, so the copy must be cleared"
    cache.verify()


def test_what_a_borrower_has_copied_in_part_is_freed_when_it_gets_the_rest(cache):
    loans, donor = cache.loans, read(cache, 100, KEPT)
    loans.freeze(7, donor)
    cache.compact(donor, 0, [torch.arange(3)] * H)
    assert cache.borrowed(donor) == 1 and loans.borrowers(7) == [donor]
    cache.verify()
    loans.drop(7)
    assert cache.held(donor) == cache.physical_pages == 1 + 1 + 1 + 2
    cache.verify()


def test_what_is_refused_changes_nothing(cache):
    loans, donor = cache.loans, read(cache, 100, KEPT)
    with pytest.raises(ValueError, match="no rows of its own"):
        loans.freeze(6, cache.open())
    with pytest.raises(ValueError, match="there is no shared entry 7"):
        cache.open([(7, None)])
    loans.freeze(7, donor)
    with pytest.raises(ValueError, match="columns 2 to 3 of request slot 0 cannot be frozen"):
        loans.freeze(8, donor, 1)
    with pytest.raises(ValueError, match="there is a shared entry 7"):
        loans.freeze(7, read(cache, 5))
    even = read(cache, 32, [32] * 4)
    loans.freeze(8, even)
    append(cache, even, 40)
    with pytest.raises(ValueError, match=f"columns 1 to 2 of request slot {even} cannot be frozen"):
        loans.freeze(9, even, 1)
    cache.close([even])
    loans.drop(8)
    filler = cache.open()
    append(cache, filler, 32 * (cache.num_free // 4) - 20)
    assert cache.num_free < 3
    before = cache.num_free, len(cache._closed)
    with pytest.raises(RuntimeError, match="3 pages needed"):
        cache.open([(7, None)])
    with pytest.raises(RuntimeError, match="4 pages needed"):
        loans.freeze(8, filler)
    assert (cache.num_free, len(cache._closed), list(loans)) == (*before, [7])
    cache.verify()


# What further evictions leave behind what the first has left, which stays as it is.


def evict_on(cache, slot, tokens, kept):
    """A request stores so many tokens more, and keeps so many of them in each row."""
    before = cache.lengths.of(slot).ravel()
    append(cache, slot, tokens)
    for layer in range(L):
        rows = slice(layer * H, (layer + 1) * H)
        cache.compact(slot, layer, [torch.arange(count) for count in kept[rows]], before[rows])
    cache.settle(slot)


def test_a_chain_of_evictions_and_a_branch(cache):
    """Rows end unevenly, one keeps nothing of the second part, and one ends with a page."""
    loans, donor = cache.loans, read(cache, 100, KEPT)
    loans.freeze(1, donor)
    evict_on(cache, donor, 60, [40, 26, 0, 31])
    loans.freeze(2, donor)
    assert loans[2].first.tolist() == [2, 2, 0, 1]
    assert (loans[2].full.tolist(), loans[2].rest.tolist()) == ([1, 1, 0, 1], [8, 0, 1, 0])
    kept = [sum(pair) for pair in zip(KEPT, [40, 26, 0, 31], strict=True)]
    content, first = entries(cache, donor), loans.checksum(1)
    fork = cache.open([(1, None), (2, None)])
    assert cache.lengths.of(fork).ravel().tolist() == kept
    assert all(torch.equal(*pair) for pair in zip(content, entries(cache, fork), strict=True))
    assert cache.held(fork) == 2  # copies of the partial pages
    branch = cache.open([(1, None)])
    assert cache.lengths.of(branch).ravel().tolist() == KEPT
    evict_on(cache, branch, 50, [10, 50, 20, 5])
    loans.freeze(3, branch)
    for slot in (donor, fork, branch):
        append(cache, slot, 40)
        cache.verify()
    again = cache.open([(1, None), (2, None)])
    assert all(torch.equal(*pair) for pair in zip(content, entries(cache, again), strict=True))
    assert loans.checksum(1) == first
    assert same(cache, cache.open([(1, None), (3, None)]), branch, 1)


def test_check_mode_knows_chains_whose_longest_rows_are_others(cache):
    """What both entries span together is nearly twice as wide as any row."""
    donor = read(cache, 400, [400, 1, 1, 1])
    cache.loans.freeze(1, donor)
    evict_on(cache, donor, 400, [1, 400, 1, 1])
    cache.loans.freeze(2, donor)
    cache.verify()


def in_common(cache):
    """A request that has left two entries, the second of which fills the first; its slot, and what it holds."""
    donor = read(cache, 100, KEPT)
    cache.loans.freeze(1, donor)
    evict_on(cache, donor, 60, [40, 26, 0, 40])
    assert cache.loans.freeze(2, donor, fills=1) == 2  # one row ends with a page, one keeps nothing more
    return donor, entries(cache, donor)


def test_what_two_entries_have_in_common_is_stored_once(cache):
    loans, (donor, content) = cache.loans, in_common(cache)
    first, second = loans[1], loans[2]
    filled = (second.first - first.full).tolist()
    assert sum(filled) == 2
    kept = [sum(pair) for pair in zip(KEPT, [40, 26, 0, 40], strict=True)]
    twice = sum(rest > 0 and not done for rest, done in zip(first.rest.tolist(), filled, strict=True))
    assert len(first.pages) + len(second.pages) == sum(-(-rows // PS) for rows in kept) + twice
    cache.verify()
    fork, branch = cache.open([(1, None), (2, None)]), cache.open([(1, None)])
    assert all(torch.equal(*pair) for pair in zip(content, entries(cache, fork), strict=True))
    assert cache.lengths.of(branch).ravel().tolist() == KEPT
    assert cache.held(branch) == int((first.rest > 0).sum())
    for own, of_both in zip(entries(cache, branch), content, strict=True):
        assert torch.equal(own, of_both[:, : own.shape[1]])
    evict_on(cache, branch, 50, [10, 50, 20, 5])
    loans.freeze(3, branch)
    of_branch, checksums = entries(cache, branch), [loans.checksum(number) for number in (1, 2, 3)]
    for slot in (donor, fork, branch):
        append(cache, slot, 40)
        cache.verify()
    assert checksums == [loans.checksum(number) for number in (1, 2, 3)]
    cache.close([donor, fork])
    loans.drop(2)
    # Nobody uses what was behind it: another one may take that place.
    third = cache.open([(1, None)])
    evict_on(cache, third, 60, [40, 40, 40, 40])
    assert loans.freeze(4, third, fills=1) == int((first.rest > 0).sum())
    again = cache.open([(1, None), (3, None)])
    assert all(torch.equal(*pair) for pair in zip(of_branch, entries(cache, again), strict=True))
    cache.verify()


def test_one_that_uses_a_completed_page_goes_on_without_the_entry_that_did(cache):
    loans, (donor, content) = cache.loans, in_common(cache)
    loans.drop(2)
    assert (loans.borrowers(1), cache.borrowed(donor)) == ([donor], int(loans[1].full.sum()) + 2)
    cache.verify()
    evict_on(cache, donor, 40, [3, 4, 5, 6])
    of_donor = entries(cache, donor)
    loans.freeze(3, donor)
    fork = cache.open([(1, None), (3, None)])
    assert all(torch.equal(*pair) for pair in zip(of_donor, entries(cache, fork), strict=True))
    cache.close([fork])
    loans.drop(3)
    loans.drop(1)
    assert cache.borrowed(donor) == 0 and loans.pages == {True: 0, False: 0}
    for one, two in zip(content, entries(cache, donor), strict=True):
        assert torch.equal(one, two[:, : one.shape[1]])
    cache.verify()
    cache.close([donor])
    assert cache.physical_pages == 0


def test_only_the_entry_before_is_filled(cache):
    loans, (donor, _) = cache.loans, in_common(cache)
    evict_on(cache, donor, 60, [40, 40, 40, 40])
    with pytest.raises(ValueError, match=f"request slot {donor} does not go on behind shared entry 1"):
        loans.freeze(3, donor, fills=1)
    loans.drop(2)
    with pytest.raises(ValueError, match=f"request slot {donor} does not go on behind shared entry 1"):
        loans.freeze(3, donor, fills=1)


# Whole columns that were read, each part of them behind its parents.


def test_what_columns_cannot_be_frozen_or_begun_with(cache):
    donor = read(cache, 100)
    with pytest.raises(ValueError, match="columns 0 to 4 of request slot 0 cannot be frozen"):
        cache.loans.freeze(1, donor, 4)
    cache.loans.freeze(1, donor, 2)
    with pytest.raises(ValueError, match="columns 2 to 2"):
        cache.loans.freeze(2, donor, 0)
    with pytest.raises(ValueError, match="no rows of its own"):
        cache.loans.freeze(2, donor)
    with pytest.raises(ValueError, match="shared entry 1 does not follow"):
        cache.open([(1, 1), (1, 1)])
    with pytest.raises(ValueError, match="there is no shared entry 2"):
        cache.open([(1, 2), (2, 1)])
    cache.verify()


# Who borrows of an entry.


def test_verify_sees_an_entry_that_does_not_know_its_borrowers(cache):
    donor = read(cache, 100)
    cache.loans.freeze(7, donor, 2)
    cache.verify()
    for slots in (set(), {donor, donor + 1}):
        cache.loans._slots[7] = slots
        with pytest.raises(RuntimeError, match="does not know the request slots"):
            cache.verify()


def test_verify_sees_who_points_elsewhere_and_pages_with_two_owners_or_none(cache):
    compressed, whole = read(cache, 100, KEPT), read(cache, 100)
    cache.loans.freeze(7, compressed)
    cache.loans.freeze(8, whole, 2)
    for slot in (compressed, whole):
        table = cache.tables.region(slot)
        table[0, 0], table[0, 1] = int(table[0, 1]), int(table[0, 0])
        with pytest.raises(
            RuntimeError, match=f"request slot {slot} borrows pages that no shared entry of it owns"
        ):
            cache.verify()
        table[0, 0], table[0, 1] = int(table[0, 1]), int(table[0, 0])
        cache.verify()
    cache.loans.columns[whole] -= 1  # as if the first one were its own, too
    with pytest.raises(RuntimeError, match="do not hold exactly the pages"):
        cache.verify()
    cache.loans.columns[whole] += 2  # as if its last one were borrowed
    with pytest.raises(RuntimeError, match="borrows pages that no shared entry of it owns"):
        cache.verify()
