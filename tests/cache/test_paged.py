import random

import numpy as np
import pytest
import torch

from vllm_kvevict.cache import PageMemory
from vllm_kvevict.kernels.layout import KVLayout

from .filling import append, entries
from .writers import Payload, WritableCache, writer

L, H, D, PS = 3, 2, 32, 32


def make(pages=400, max_requests=4, write=None, dtype=torch.float32):
    storage = torch.zeros(pages, 2 * PS * D, dtype=dtype)
    return WritableCache(
        storage,
        num_layers=L,
        num_kv_heads=H,
        page_size=PS,
        max_requests=max_requests,
        write=write or writer(PS),
    )


def store(cache, step, payload):
    """Write new payload into all entries of a step. Returns the ids, [L, T * H]."""
    slots = cache.entry_slots(step)
    ids = payload.ids(slots.numel()).view(slots.shape)
    for layer in range(L):
        keys, values = payload.keys(ids[layer]), payload.values(ids[layer])
        cache.write(keys, values, slots[layer])
    return ids


def contents(cache, slot, layer, head):
    """All keys and values of one row."""
    n = int(cache.lengths.of(slot)[layer, head])
    return cache.gather(slot, layer, torch.full((n,), head), torch.arange(n))


def tail(cache, slot, layer, head):
    """What lies behind the entries in the last page of a row, keys and values."""
    n = int(cache.lengths.of(slot)[layer, head])
    page = cache.tables.region(slot)[layer * H + head, (n - 1) // PS]
    unused = torch.arange(n % PS or PS, PS)
    return torch.cat([cache.memory.read(name, page.expand(len(unused)), unused) for name in ("key", "value")])


@pytest.mark.parametrize("tokens", [[1, 1, 1], [5, 1, 40]])
def test_index_tensors_of_one_head_are_contiguous(tokens):
    storage = torch.zeros(100, 2 * PS * D)
    cache = WritableCache(
        storage, num_layers=L, num_kv_heads=1, page_size=PS, max_requests=3, write=writer(PS)
    )
    step = cache.extend([cache.open() for _ in tokens], tokens)
    assert cache.seq_lens(step.request_slots).tolist() == [tokens] * L
    for index in (
        cache.seq_lens(step.request_slots),
        cache.entry_slots(step),
        cache.tables.block_tables(step.request_slots, L, 2),
    ):
        assert index.is_contiguous()


def test_settling_shrinks_the_page_table():
    cache = make(pages=1000)
    slot, other = cache.open(), cache.open()
    cache.extend([slot, other], [3200, 100])
    before = cache.tables.nbytes
    for layer in range(L):
        cache.compact(slot, layer, [torch.arange(0, 3200, 10)] * H)
    cache.settle(slot)
    assert cache.tables.region(slot).shape[1] < 20
    assert cache.tables.nbytes < before / 2
    cache.verify()
    assert cache.extend([slot, other], [500, 1]).max_lens == [820, 101]
    cache.verify()


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_no_tail_holds_what_another_request_left(poison):
    cache, payload = make(pages=200), Payload(D)
    generator = torch.Generator().manual_seed(1)
    for tokens in (1, 31, 32, 33, 64, 95, 100):
        free = torch.nonzero(cache.pool.owners == 0).flatten()
        cache.storage[free] = poison
        slot, other = cache.open(), cache.open()
        store(cache, cache.extend([slot, other], [tokens, 1]), payload)
        store(cache, cache.extend([other, slot], [1, 1]), payload)
        for layer in range(L):
            n = [int(torch.randint(1, tokens + 2, (1,), generator=generator)) for _ in range(H)]
            cache.compact(slot, layer, [torch.arange(tokens + 1)[-m:] for m in n])
        # Ragged rows: decode across page ends, then a chunk.
        for more in (1,) * 33 + (50,):
            store(cache, cache.extend([slot], [more]), payload)
            for layer in range(L):
                for head in range(H):
                    assert tail(cache, slot, layer, head).isfinite().all()
                    assert contents(cache, slot, layer, head)[0].isfinite().all()
        cache.close([slot, other])
    assert cache.num_free == 200


def test_slots_run_out_and_come_back():
    cache = make(max_requests=2)
    slots = [cache.open(), cache.open()]
    with pytest.raises(RuntimeError, match="all 2 request slots are in use"):
        cache.open()
    cache.extend(slots, [5, 6])
    cache.close(slots)
    assert cache.num_free == 400
    again = cache.open()
    assert cache.seq_lens(cache.extend([again], [3]).request_slots).tolist() == [[3, 3]] * L
    cache.verify()


def test_closing_a_request_without_tokens_and_empty_batches():
    cache = make()
    cache.close([cache.open()])
    cache.close([])
    step = cache.extend([], [])
    assert cache.entry_slots(step).shape == (L, 0)
    assert cache.seq_lens(step.request_slots).shape == (L, 0)
    cache.verify()


def test_refuses_wrong_requests():
    cache = make()
    slot = cache.open()
    for slots, tokens in (([slot, slot], [1, 1]), ([slot + 1], [1])):
        with pytest.raises(ValueError, match="open and distinct"):
            cache.extend(slots, tokens)
    for tokens in ([0], [], [1, 2]):
        with pytest.raises(ValueError, match="one positive count per request slot"):
            cache.extend([slot], tokens)
    with pytest.raises(ValueError, match="open and distinct"):
        cache.close([slot + 1])
    cache.extend([slot], [10])
    ten = torch.arange(10)
    for kept in ([ten], [ten, ten[:0]], [ten, torch.arange(11)]):
        with pytest.raises(ValueError, match="cannot keep"):
            cache.compact(slot, 0, kept)
    with pytest.raises(ValueError, match="11 entries were asked of heads of which one holds 10"):
        cache.read("key", slot, 0, 11)
    cache.verify()


@pytest.mark.parametrize(
    "storage, page_size, refused",
    [
        *((torch.zeros(2, 64), size, "page_size must be a multiple of 16") for size in (24, 33, 0)),
        (torch.zeros(2, 65), 32, "storage must be contiguous"),
        (torch.zeros(4, 64)[::2], 32, "storage must be contiguous"),
        (torch.zeros(128), 32, "storage must be contiguous"),
    ],
)
def test_refuses_other_pages_and_storage(storage, page_size, refused):
    layout = KVLayout.of_heads(page_size, 1, 1, 1, "float32")
    with pytest.raises(ValueError, match=refused):
        PageMemory(storage, layout, {}, writer(32))


def test_verify_notices_damage():
    cache = make()
    slot = cache.open()
    cache.extend([slot], [40])
    cache.tables.kv_len[slot, 0] += 1
    with pytest.raises(RuntimeError, match="differs between host and device"):
        cache.verify()
    cache.tables.kv_len[slot, 0] -= 1
    cache.verify()
    table = cache.tables.region(slot)
    table[0, 0] = table[1, 0]
    with pytest.raises(RuntimeError, match="do not hold exactly the pages"):
        cache.verify()


def test_one_layer_at_a_time_needs_the_pages_of_one():
    """Three layers of four pages each, in a pool of six: each keeps one page of the four that it takes."""
    cache, payload = make(pages=H * 6), Payload(D)
    slot = cache.open()
    cache.announce(slot, 100)
    assert cache.held(slot) == 0 and cache.lengths.total_entries == 0
    for layer in range(L):
        cache.storage.index_fill_(0, cache.pool._ids[cache.pool._low : cache.pool._high].long(), float("nan"))
        places, pages = cache.fill(slot, layer, 100)
        ids = payload.ids(100 * H)
        cache.write(payload.keys(ids), payload.values(ids), places)
        assert torch.equal(pages, cache.tables.region(slot)[layer * H : (layer + 1) * H, :4])
        assert not tail(cache, slot, layer, 0).any()
        assert cache.held(slot) == H * (4 + layer) and cache.lengths.shortest(slot, layer) == 100
        cache.compact(slot, layer, [torch.arange(0, 100, 4)] * H)
    assert cache.pool.fewest_free == 0
    cache.settle(slot)
    cache.verify()
    step = cache.extend([slot], [1])
    assert cache.seq_lens(step.request_slots).tolist() == [[26] * H] * L


@pytest.mark.parametrize("tokens", [1, 31, 32, 100])
def test_storing_what_stays_frees_as_much_as_filling_and_compacting(tokens):
    """And needs no more pages meanwhile; that it keeps the same is held by the model in test_paged_random.py."""
    payload, rng = Payload(D), random.Random(tokens)
    ids = payload.ids(tokens * H)
    keys, values = payload.keys(ids).view(tokens, H, D), payload.values(ids).view(tokens, H, D)
    kept = [
        [torch.tensor(sorted(rng.sample(range(tokens), rng.randint(1, tokens)))) for _ in range(H)]
        for _ in range(L)
    ]
    held, fewest = [], []
    for stores in (False, True):
        cache = make(pages=L * H * 4)
        cache.storage.fill_(float("nan"))
        slot = cache.open()
        cache.announce(slot, tokens)
        freed = []
        for layer in range(L):
            if stores:
                cache.expect(slot, layer, tokens)
                assert (
                    cache.lengths.shortest(slot, layer) == tokens and cache.num_free == cache.pool.fewest_free
                )
                freed.append(cache.store(slot, layer, {"key": keys, "value": values}, kept[layer]))
            else:
                places, _ = cache.fill(slot, layer, tokens)
                cache.write(keys.flatten(0, 1), values.flatten(0, 1), places)
                freed.append(cache.compact(slot, layer, kept[layer]))
        settled = cache.settle(slot)
        cache.verify()
        for layer in range(L):
            for head in range(H):
                assert not tail(cache, slot, layer, head).isnan().any()
        held.append((freed, settled.pages, settled.kept.tolist(), settled.residues.tolist()))
        fewest.append(cache.pool.fewest_free)
    assert held[0] == held[1] and fewest[1] >= fewest[0]


def test_only_an_empty_request_takes_pages_layer_by_layer():
    cache = make()
    slot = cache.open()
    cache.extend([slot], [3])
    with pytest.raises(ValueError, match="not empty"):
        cache.announce(slot, 10)


def test_compacting_says_what_it_frees():
    cache = make()
    slot = cache.open()
    cache.extend([slot], [100])
    assert cache.compact(slot, 0, [torch.arange(100)] * H) == 0
    assert cache.compact(slot, 0, [torch.arange(100), torch.arange(33)]) == 2, (
        "also if another row frees none"
    )
    assert cache.compact(slot, 1, [torch.arange(33), torch.arange(32)]) == 2 + 3


def test_what_cannot_be_truncated():
    cache, payload = make(), Payload(D)
    slot = cache.open()
    store(cache, cache.extend([slot], [40]), payload)
    for tokens in (-1, 41):
        with pytest.raises(ValueError, match=f"cannot drop {tokens} tokens: a row has 40 of its own"):
            cache.truncate([slot], [tokens])
    cache.compact(slot, 1, [torch.arange(30), torch.arange(40)])
    with pytest.raises(ValueError, match="a row has 30 of its own"):
        cache.truncate([slot], [31])
    with pytest.raises(ValueError, match="distinct"):
        cache.truncate([slot, slot], [1, 1])
    assert cache.held(slot) == cache.physical_pages


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
def test_what_cannot_be_kept_is_refused(first, counts):
    cache = make()
    slot = cache.open()
    append(cache, slot, 10)
    before = entries(cache, slot)
    with pytest.raises(ValueError, match=rf"cannot keep .* of \[10, 10\] .* behind the first \[{first[0]}"):
        cache.compact(slot, 0, [torch.arange(n) for n in counts], np.array(first))
    cache.verify()
    assert all(map(torch.equal, before, entries(cache, slot)))
