"""What a request that ends leaves behind the shared entries that it borrows: one other request goes on with that."""

import pytest
import torch

from . import test_loans
from .filling import append, entries
from .test_loans import KEPT, H, L, evict_on, read, same

cache = test_loans.cache


def left_by(cache, tokens):
    """A request that has stored so many tokens behind what it borrows of entry 1, its tail 2, and its rows before."""
    slot = read(cache, 100, KEPT)
    cache.loans.freeze(1, slot)
    append(cache, slot, tokens)
    content = entries(cache, slot)
    cache.loans.freeze_tail(2, slot)
    return slot, content


def lengths(cache, slot):
    return cache.lengths.of(slot).ravel().tolist()


def is_beginning(cache, slot, content):
    """Whether a request has what each row of another had at its beginning."""
    pairs = zip(content, entries(cache, slot), strict=True)
    return all(torch.equal(one[:, : other.shape[1]], other) for one, other in pairs)


@pytest.mark.parametrize("tokens", [1, 40, 64, 75])
def test_who_goes_on_with_a_tail_holds_what_the_other_one_held(cache, tokens):
    slot, content = left_by(cache, tokens)
    assert lengths(cache, slot) == [64, 64, 0, 32] and cache.held(slot) == 0
    held, checksum = len(cache.loans[2].pages), cache.loans.checksum(2)
    assert cache.loans.pages[False] == held
    cache.verify()
    cache.close([slot])
    assert cache.physical_pages == cache.loans.pages[True] + held and cache.loans.checksum(2) == checksum
    free = cache.num_free
    heir = cache.open([(1, None)], 2)
    assert cache.num_free == free and cache.held(heir) == held, "nothing is copied"
    assert lengths(cache, heir) == [kept + tokens for kept in KEPT]
    assert is_beginning(cache, heir, content) and list(cache.loans) == [1] and not cache.loans.pages[False]
    cache.verify()
    append(cache, heir, 50)
    cache.verify()
    cache.close([heir])
    cache.loans.drop(1)
    assert cache.physical_pages == 0


@pytest.mark.parametrize("dropped", [1, 11, 43, 70])
def test_a_tail_is_cut_to_what_both_have_in_common(cache, dropped):
    slot, content = left_by(cache, 75)
    cache.close([slot])
    cache.loans.cut(2, dropped)
    cache.verify()
    heir = cache.open([(1, None)], 2)
    assert lengths(cache, heir) == [kept + 75 - dropped for kept in KEPT]
    assert is_beginning(cache, heir, content)
    before = entries(cache, heir)
    append(cache, heir, 90)
    assert all(
        torch.equal(old, new[:, : old.shape[1]])
        for old, new in zip(before, entries(cache, heir), strict=True)
    )
    cache.verify()


def test_the_heir_is_evicted_in_place(cache):
    """As if it had read the tail's tokens itself: its pages are its own."""
    slot, _ = left_by(cache, 60)
    cache.close([slot])
    heir = cache.open([(1, None)], 2)
    append(cache, heir, 4)
    for layer in range(L):
        rows = slice(layer * H, (layer + 1) * H)
        cache.compact(heir, layer, [torch.arange(9)] * H, cache.lengths.of(heir).ravel()[rows] - 64)
    cache.settle(heir)
    cache.verify()
    cache.loans.freeze(3, heir)
    assert lengths(cache, heir) == [kept + 9 for kept in KEPT]
    assert same(cache, cache.open([(1, None), (3, None)]), heir, 10)
    cache.verify()


def test_a_tail_behind_two_entries_and_behind_none_that_is_full(cache):
    donor = read(cache, 100, KEPT)
    cache.loans.freeze(1, donor)
    evict_on(cache, donor, 60, [40, 26, 0, 31])
    cache.loans.freeze(2, donor)
    append(cache, donor, 33)
    content = entries(cache, donor)
    cache.loans.freeze_tail(3, donor)
    cache.close([donor])
    assert is_beginning(cache, cache.open([(1, None), (2, None)], 3), content)
    small = read(cache, 50, [31, 1, 5, 7])
    cache.loans.freeze(4, small)
    append(cache, small, 20)
    content = entries(cache, small)
    cache.loans.freeze_tail(5, small)
    cache.close([small])
    assert is_beginning(cache, cache.open([(4, None)], 5), content)
    cache.verify()


def test_a_tail_that_is_dropped_leaves_the_chain_alone(cache):
    slot, _ = left_by(cache, 40)
    cache.close([slot])
    checksum, pages = cache.loans.checksum(1), cache.loans.pages[True]
    cache.loans.drop(2)
    cache.verify()
    assert cache.physical_pages == pages and cache.loans.checksum(1) == checksum
    assert lengths(cache, cache.open([(1, None)])) == KEPT


def test_what_is_refused_changes_nothing(cache):
    slot, _ = left_by(cache, 40)
    with pytest.raises(ValueError, match="holds no pages of its own"):
        cache.loans.freeze_tail(3, slot)
    with pytest.raises(ValueError, match="there is a shared entry 2"):
        cache.loans.freeze_tail(2, read(cache, 10))
    for number, tokens in ((1, 1), (2, 0), (2, 75)):
        with pytest.raises(ValueError, match=f"{tokens} tokens of shared entry {number} cannot be dropped"):
            cache.loans.cut(number, tokens)
    other = read(cache, 90, [50, 60, 70, 80])
    cache.loans.freeze(4, other)
    for tail, parts in ((2, [(4, None)]), (1, [(1, None)])):
        with pytest.raises(ValueError, match=f"shared entry {tail} is no tail of the columns before it"):
            cache.open(parts, tail)
    with pytest.raises(ValueError, match="there is no shared entry 9"):
        cache.open([(1, None)], 9)
    cache.verify()
