"""Segments: what prompts were read to, shared uncompressed by requests that go on writing behind it."""

import pytest
import torch

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.cache.segments import Segments

from .test_runs import PS, D, H, L, append, entries
from .writers import plain, transposed, writer


@pytest.fixture(params=[(plain, plain), (transposed, plain)], ids=["plain", "transposed"])
def cache(request):
    """A cache whose pages are full of what somebody left there: if attention read it, every sum would be NaN."""
    return PagedKVCache(
        torch.full((80, 2 * PS * D), torch.nan),
        num_layers=L,
        num_kv_heads=H,
        page_size=PS,
        max_requests=6,
        write=writer(PS, *request.param),
    )


@pytest.fixture
def segments(cache):
    return Segments(cache)


def check(segments):
    """Each page has one owner, and borrowers have the pages of their segments."""
    segments.cache.verify(segments.all_pages())
    segments.verify()


def read(cache, tokens):
    """A request that stored so many tokens; its slot."""
    slot = cache.open()
    append(cache, slot, tokens)
    return slot


def same(cache, first, second, tokens):
    """Whether two requests begin with the same entries in each row."""
    pairs = zip(entries(cache, first), entries(cache, second), strict=True)
    return all(torch.equal(one[:, :tokens], other[:, :tokens]) for one, other in pairs)


def test_what_is_frozen_is_shared_and_nobody_changes_it(cache, segments):
    donor = read(cache, 100)
    segments.freeze(1, donor, 2)
    segments.freeze(2, donor, 1)
    assert (cache.held(donor), cache.lent(donor), segments.pages) == (L * H, 3 * L * H, 3 * L * H)
    checksums = [segments.checksum(number) for number in (1, 2)]
    fork = segments.begin([(1, 2), (2, 1)])
    check(segments)
    assert same(cache, donor, fork, 96) and cache.held(fork) == 0
    append(cache, fork, 1)
    append(cache, donor, 70)
    check(segments)
    assert [segments.checksum(number) for number in (1, 2)] == checksums
    assert same(cache, donor, fork, 96) and not same(cache, donor, fork, 97)


def test_a_chain_may_leave_its_parent_in_the_middle(cache, segments):
    donor = read(cache, 128)
    segments.freeze(1, donor, 4)
    other = segments.begin([(1, 2)])
    append(cache, other, 64)
    segments.freeze(2, other, 2)
    third = segments.begin([(1, 2), (2, 1)])
    check(segments)
    assert same(cache, other, third, 96) and same(cache, donor, third, 64)
    assert not same(cache, donor, third, 96)


KEPT = [[64, 70, 1, 33], [128, 128, 128, 128], [32, 64, 96, 128], [1, 1, 1, 1]]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("counts", KEPT)
@pytest.mark.parametrize("columns", [1, 3])
def test_a_borrower_is_evicted_by_copying(cache, segments, counts, columns, at_once):
    donor = read(cache, 128)
    segments.freeze(1, donor, columns)
    before, checksum = entries(cache, donor), segments.checksum(1)
    kept = [torch.randperm(128)[:count].sort().values for count in counts]
    calls = [(0, kept)] if at_once else [(layer, kept[layer * H : layer * H + H]) for layer in range(L)]
    less = sum(cache.compact(donor, layer, rows) for layer, rows in calls)
    segments.end_loan(donor)
    check(segments)
    pages = [-(-count // PS) for count in counts]
    assert less == sum(4 - count for count in pages)
    assert (cache.held(donor), cache.lent(donor)) == (sum(pages), 0)
    assert segments.checksum(1) == checksum
    for rows, old, new in zip(kept, before, entries(cache, donor), strict=True):
        assert torch.equal(old[:, rows], new)
    # Attention reads pages to their end.
    assert cache.storage[cache.own_pages(donor).long()].isfinite().all()
    segments.drop(1)
    append(cache, donor, 40)
    check(segments)
    cache.close([donor])
    assert cache.num_free == 80


def test_extra_entries_of_a_borrower_are_cut_but_not_what_it_borrows(cache, segments):
    donor = read(cache, 100)
    segments.freeze(1, donor, 2)
    append(cache, donor, 50)
    cache.truncate([donor], [50])
    check(segments)
    with pytest.raises(ValueError, match="cannot drop 37 tokens: a row has 36 of its own"):
        cache.truncate([donor], [37])
    cache.truncate([donor], [36])
    check(segments)


def test_copies_need_pages(cache, segments):
    donor = read(cache, 128)
    segments.freeze(1, donor, 4)
    others = [read(cache, 32 * 7), read(cache, 32 * 7)]
    with pytest.raises(RuntimeError, match="the page pool is exhausted"):
        cache.compact(donor, 0, [torch.arange(128)] * (L * H))
    cache.close(others)
    assert cache.compact(donor, 1, [torch.arange(10)] * H) == H * 3


def test_what_is_refused_changes_nothing(cache, segments):
    donor = read(cache, 100)
    with pytest.raises(ValueError, match="columns 0 to 4 of request slot 0 cannot be frozen"):
        segments.freeze(1, donor, 4)
    segments.freeze(1, donor, 2)
    with pytest.raises(ValueError, match="columns 2 to 3"):
        segments.freeze(1, donor, 1)
    with pytest.raises(ValueError, match="there is no segment 2"):
        segments.begin([(1, 2), (2, 1)])
    with pytest.raises(ValueError, match="segment 1 is borrowed by request slot 0"):
        segments.drop(1)
    with pytest.raises(ValueError, match="there is no segment 7"):
        segments.drop(7)
    check(segments)
    cache.close([donor])
    segments.end_loan(donor)
    segments.drop(1)
    check(segments)
    assert cache.num_free == 80


def test_verify_sees_a_borrower_that_points_elsewhere_and_a_page_with_two_owners(cache, segments):
    donor = read(cache, 100)
    segments.freeze(1, donor, 2)
    table = cache.tables.region(donor)
    table[0, 0], table[0, 1] = int(table[0, 1]), int(table[0, 0])
    with pytest.raises(RuntimeError, match="request slot 0 borrows pages that segments do not own"):
        segments.verify()
    table[0, 0], table[0, 1] = int(table[0, 1]), int(table[0, 0])
    check(segments)
    with pytest.raises(RuntimeError, match="do not hold exactly the pages"):
        cache.verify(segments.all_pages()[1:])
    with pytest.raises(RuntimeError, match="do not hold exactly the pages"):
        cache.verify(torch.cat([segments.all_pages(), cache.own_pages(donor)[:1]]))
