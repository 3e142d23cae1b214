"""Index tensors of a step against loops."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cache.writers import WritableCache, writer
from vllm_kvevict.engine.worker.batch import lay_out, lay_out_by_layer, split_by_width
from vllm_kvevict.engine.worker.model_runners import BatchOrder

LAYERS, HEADS, PAGE, DIM = 2, 3, 32, 32


def _cache():
    storage = torch.zeros(2000, 2 * PAGE * DIM)
    return WritableCache(
        storage, num_layers=LAYERS, num_kv_heads=HEADS, page_size=PAGE, max_requests=8, write=writer(PAGE)
    )


@pytest.mark.parametrize("most_new_tokens", [0, 1, 7])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [5], [1, 40, 1, 7], [1, 1, 600], [300, 1], [6, 1, 3]])
@pytest.mark.parametrize("fewest", [None, 2, 16])
def test_calls_cover_the_batch_in_head_order(lengths, most_new_tokens, fewest):
    cache = _cache()
    slots = [cache.open() for _ in lengths]
    history = [10 * (i + 1) for i in range(len(lengths))]
    cache.extend(slots, history)
    batch = lay_out(cache, cache.extend(slots, lengths), most_new_tokens, fewest_prefilled=fewest)
    starts = np.cumsum([0, *lengths])
    assert batch.num_tokens == sum(lengths)
    seen = []
    for call in batch.calls:
        order = call.gather.tolist() if call.gather is not None else list(range(sum(lengths) * HEADS))
        sequences = call.query_start_loc.tolist()
        assert len(sequences) - 1 == call.seq_lens.shape[1] == call.block_tables.shape[1]
        for sequence, (start, stop) in enumerate(itertools.pairwise(sequences)):
            places = order[start:stop]
            request = int(np.searchsorted(starts, places[0] // HEADS, side="right")) - 1
            head = places[0] % HEADS
            assert sequence % HEADS == head
            assert places == [token * HEADS + head for token in range(starts[request], starts[request + 1])]
            for layer in range(LAYERS):
                total = history[request] + lengths[request]
                assert call.seq_lens[layer, sequence] == total
                pages = cache.tables.region(slots[request])[layer * HEADS + head, : -(-total // PAGE)]
                assert torch.equal(call.block_tables[layer, sequence, : len(pages)], pages)
            seen += places
    decoded = [i for i, length in enumerate(lengths) if length <= most_new_tokens]
    if len(decoded) == len(lengths):  # the kernel needs no index tensors
        assert batch.entry_slots is None and batch.calls == []
    prefilled = [
        i for i, length in enumerate(lengths) if length > most_new_tokens and length >= (fewest or 1000)
    ]
    for served, requests in ((batch.decodes, decoded), (batch.prefills, prefilled)):
        if not requests:
            assert served is None
            continue
        tokens = list(range(sum(lengths))) if served.tokens is None else served.tokens.tolist()
        new_tokens = [1] * len(requests) if served.new_tokens is None else served.new_tokens.tolist()
        assert served.request_slots.tolist() == [slots[i] for i in requests]
        assert new_tokens == [lengths[i] for i in requests]
        assert tokens == [token for i in requests for token in range(starts[i], starts[i + 1])]
        seen += [token * HEADS + head for token in tokens for head in range(HEADS)]
    assert sorted(seen) == list(range(sum(lengths) * HEADS))


@pytest.mark.parametrize("most_new_tokens", [0, 1, 7])
@pytest.mark.parametrize("lengths", [[1, 1], [40, 1, 7], [300], [3, 1]])
@pytest.mark.parametrize("fewest", [None, 16])
def test_tokens_that_are_not_in_the_order_of_requests(lengths, most_new_tokens, fewest):
    """A batch in which some rows belong to no request of the step, and those of a request need not be together."""
    cache, plain = _cache(), _cache()
    slots = [cache.open() for _ in lengths]
    assert slots == [plain.open() for _ in lengths]
    total = sum(lengths)
    order = np.random.default_rng(0).permutation(total + 5)[:total]
    batch = lay_out(cache, cache.extend(slots, lengths), most_new_tokens, total + 5, order, fewest)
    usual = lay_out(plain, plain.extend(slots, lengths), most_new_tokens, fewest_prefilled=fewest)
    assert batch.num_tokens == total + 5
    if usual.entry_slots is None:
        assert batch.entry_slots is None
    else:
        written = batch.entry_slots.view(LAYERS, total + 5, HEADS)
        assert torch.equal(written[:, torch.from_numpy(order)].flatten(1), usual.entry_slots)
        assert (np.delete(written.numpy(), order, axis=1) == -1).all()
    for call, other in zip(batch.calls, usual.calls, strict=True):
        places = np.arange(total * HEADS) if other.gather is None else other.gather.numpy()
        assert call.gather.tolist() == [order[place // HEADS] * HEADS + place % HEADS for place in places]
    for served, other in ((batch.decodes, usual.decodes), (batch.prefills, usual.prefills)):
        if other:
            tokens = np.arange(total) if other.tokens is None else other.tokens.numpy()
            assert served.tokens.tolist() == order[tokens].tolist()


@pytest.mark.parametrize("fewest, serves", [(None, False), (30, True), (31, False)])
def test_a_request_that_is_read_layer_by_layer(fewest, serves):
    cache = _cache()
    request = lay_out_by_layer(cache, cache.open(), slice(5, 35), fewest)
    assert request.is_prefilled is serves
    assert request.served.tokens.tolist() == list(range(5, 35))
    assert request.served.new_tokens.tolist() == [30]


@settings(deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_a_second_call_halves_the_tables_or_is_not_made(widths):
    widths = np.array(widths)
    calls = split_by_width(widths)
    assert sorted(np.concatenate(calls).tolist()) == list(range(len(widths)))
    assert all((np.diff(call) > 0).all() for call in calls)
    whole = widths.max() * len(widths)
    best = min(
        widths.max() * k + np.sort(widths)[::-1][k] * (len(widths) - k) if k else whole
        for k in range(len(widths))
    )
    cells = sum(widths[call].max() * len(call) for call in calls)
    assert cells == (best if 2 * best <= whole else whole)


def test_rows_of_both_model_runners():
    v1 = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b", "c"]))
    assert BatchOrder(v1).request_ids(2) == ["a", "b"]
    states = [SimpleNamespace(req_ids=["z", "x", "y"]), None]
    v2 = SimpleNamespace(req_states=None, gather_batch_req_state=lambda message, dummy: (states[dummy], 1))
    order = BatchOrder(v2)
    assert v2.gather_batch_req_state("message", False) == (states[0], 1)
    assert order.request_ids(2) == ["z", "x"]
    assert v2.gather_batch_req_state("message", True) == (None, 1)
    assert not order.request_ids(2)
