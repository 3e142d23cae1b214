"""Runs: what a prefix keeps, shared by requests that go on writing behind it."""

import pytest
import torch

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.cache.runs import Runs

from .writers import plain, transposed, writer

L, H, D, PS = 2, 2, 32, 32


@pytest.fixture(params=[(plain, plain), (transposed, plain)], ids=["plain", "transposed"])
def cache(request):
    """A cache whose pages are full of what somebody left there: if attention read it, every sum would be NaN."""
    storage = torch.full((64, 2 * PS * D), torch.nan)
    return PagedKVCache(
        storage,
        num_layers=L,
        num_kv_heads=H,
        page_size=PS,
        max_requests=6,
        write=writer(PS, *request.param),
    )


def read(cache, tokens, kept):
    """A request that stored so many tokens and kept the first entries of each row; its slot."""
    slot = cache.open()
    step = cache.extend([slot], [tokens])
    for places in cache.entry_slots(step):
        keys = torch.randn(places.numel(), D)
        cache.write(keys, -keys, places)
    for layer in range(L):
        rows = kept[layer * H : (layer + 1) * H]
        cache.compact(slot, layer, [torch.arange(count) for count in rows])
    cache.settle(slot)
    return slot


def append(cache, slot, tokens):
    """Let a request store further tokens, by one or many."""
    step = cache.extend([slot], [tokens])
    for places in cache.entry_slots(step):
        keys = torch.randn(places.numel(), D)
        cache.write(keys, -keys, places)


def entries(cache, slot):
    """Keys and values of all rows."""
    found = []
    for row, count in enumerate(cache.lengths.of(slot).ravel().tolist()):
        heads = torch.full((count,), row % H)
        found.append(torch.stack(cache.gather(slot, row // H, heads, torch.arange(count))))
    return found


def pages_of(cache, run):
    """A run's pages as they lie in memory."""
    return cache.storage[cache.own_pages(run).long()].clone()


KEPT = [64, 70, 1, 33]


def test_the_checksum_of_a_run_tells_whether_anybody_wrote_to_it(cache):
    runs, donor = Runs(cache), read(cache, 100, KEPT)
    run = runs.freeze(donor)
    checksum = runs.checksum(run)
    fork = runs.fork(run)
    append(cache, fork, 40)
    assert runs.checksum(run) == checksum
    page = cache.own_pages(run)[-1]
    for element in (0, -1):
        cache.storage[page, element] += 1
        assert runs.checksum(run) != checksum
        cache.storage[page, element] -= 1
    first, second = cache.own_pages(run)[:2].tolist()
    cache.storage[[first, second]] = cache.storage[[second, first]]
    assert runs.checksum(run) != checksum
    with pytest.raises(ValueError, match="there is no run"):
        runs.checksum(fork)


def test_a_fork_has_what_was_kept_and_takes_partial_pages_only(cache):
    runs, donor = Runs(cache), read(cache, 100, KEPT)
    before, held = entries(cache, donor), cache.held(donor)
    run = runs.freeze(donor)
    assert (cache.held(donor), cache.held(run)) == (3, held) == (3, 2 + 3 + 1 + 2)
    fork = runs.fork(run)
    assert cache.held(fork) == 3
    assert runs.borrowers(run) == [donor, fork]
    assert cache.lengths.of(fork).ravel().tolist() == KEPT
    for slot in (donor, run, fork):
        assert all(torch.equal(*pair) for pair in zip(before, entries(cache, slot), strict=True))
    cache.verify()


def test_attention_finds_numbers_wherever_it_reads(cache):
    """It reads pages to their end, also behind the entries."""
    runs, donor = Runs(cache), read(cache, 100, KEPT)
    run = runs.freeze(donor)
    for slot in (donor, run, runs.fork(run)):
        assert not cache.storage[cache.own_pages(slot).long()].isnan().any()


def test_nobody_writes_to_a_run(cache):
    """Neither its borrowers, by single tokens or many, nor who gets the pages that they give back."""
    runs, donor = Runs(cache), read(cache, 100, KEPT)
    run = runs.freeze(donor)
    memory, fork = pages_of(cache, run), runs.fork(run)
    first = entries(cache, run)
    for slot, tokens in ((donor, 1), (fork, 1), (fork, 40), (donor, 75)):
        append(cache, slot, tokens)
        cache.verify()
        assert torch.equal(pages_of(cache, run), memory)
    for slot in (donor, fork):
        assert all(
            torch.equal(new[:, : old.shape[1]], old)
            for old, new in zip(first, entries(cache, slot), strict=True)
        )
    assert not torch.equal(entries(cache, donor)[0][:, 64], entries(cache, fork)[0][:, 64])
    cache.close([donor])
    append(cache, cache.open(), 90)
    assert torch.equal(pages_of(cache, run), memory)


def test_nothing_of_what_was_evicted_is_left_in_a_run(cache):
    runs, donor = Runs(cache), read(cache, 100, KEPT)
    run = runs.freeze(donor)
    for row, count in enumerate(KEPT):
        behind = torch.arange(count, -(-count // PS) * PS)
        keys, values = cache.gather(run, row // H, torch.full_like(behind, row % H), behind)
        assert not keys.any() and not values.any()
    keys, _ = cache.gather(donor, 0, torch.tensor([1]), torch.tensor([70]))
    assert keys.any(), "the donor's own page has old entries behind its last one, so the copy must be cleared"


def test_the_last_borrower_gets_the_pages(cache):
    runs, donor = Runs(cache), read(cache, 100, KEPT)
    run = runs.freeze(donor)
    fork = runs.fork(run)
    with pytest.raises(ValueError, match="borrowed by 2 requests"):
        runs.drop(run)
    append(cache, fork, 5)
    content = entries(cache, fork)
    cache.close([donor])
    runs.drop(run)
    assert runs.pages == runs.entries == 0
    # Five tokens more than 64, 70, 1 and 33.
    assert cache.held(fork) == cache.physical_pages == 3 + 3 + 1 + 2
    assert all(torch.equal(*pair) for pair in zip(content, entries(cache, fork), strict=True))
    cache.verify()
    cache.compact(fork, 0, [torch.arange(3)] * H)
    cache.close([fork])
    assert cache.physical_pages == 0
    cache.verify()


def test_a_run_outlives_its_borrowers(cache):
    runs, donor = Runs(cache), read(cache, 100, KEPT)
    run = runs.freeze(donor)
    cache.close([donor])
    assert cache.physical_pages == runs.pages == 8
    fork = runs.fork(run)
    assert cache.lengths.of(fork).ravel().tolist() == KEPT
    cache.close([fork])
    runs.drop(run)
    assert cache.physical_pages == 0


def test_rows_that_end_with_a_page_are_shared_whole(cache):
    runs, donor = Runs(cache), read(cache, 64, [64, 32, 32, 64])
    free = cache.num_free
    fork = runs.fork(runs.freeze(donor))
    assert cache.num_free == free and cache.held(donor) == cache.held(fork) == 0
    append(cache, fork, 1)
    assert cache.held(fork) == 4
    cache.verify()


def test_what_is_refused_changes_nothing(cache):
    runs, donor = Runs(cache), read(cache, 100, KEPT)
    with pytest.raises(ValueError, match="no rows of its own"):
        runs.freeze(cache.open())
    with pytest.raises(ValueError, match="there is no run 0"):
        runs.fork(donor)
    run = runs.freeze(donor)
    with pytest.raises(ValueError, match="no rows of its own"):
        runs.freeze(donor)
    with pytest.raises(ValueError, match="borrows pages of a run, which cannot be compacted"):
        cache.compact(donor, 0, [torch.arange(1)] * H)
    filler = cache.open()
    append(cache, filler, 32 * (cache.num_free // 4))
    assert cache.num_free < 3
    before = cache.num_free, len(cache._closed)
    with pytest.raises(RuntimeError, match="3 pages needed"):
        runs.fork(run)
    assert (cache.num_free, len(cache._closed)) == before
    cache.verify()


def test_verify_sees_a_borrower_that_points_elsewhere(cache):
    runs, donor = Runs(cache), read(cache, 100, KEPT)
    runs.freeze(donor)
    cache.tables.region(donor)[0, 0] += 1
    with pytest.raises(RuntimeError, match=r"borrows pages that request slot \d does not own"):
        cache.verify()
