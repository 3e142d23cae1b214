"""The total order: score, then position, then head; special values; counts and cuts."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.policies.select import best_positions, count_best, order_keys

from . import reference

SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-149), 2.0**127]


@st.composite
def layers(draw):
    heads, m = draw(st.integers(1, 5)), draw(st.integers(1, 30))
    value = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))
    return [[draw(value) for _ in range(m)] for _ in range(heads)]


@given(layers(), st.data())
def test_keys_order_like_a_sort(scores, data):
    keys = order_keys(torch.tensor(scores))
    heads, m = keys.shape
    assert keys.unique().numel() == keys.numel()
    plain = [[-math.inf if math.isnan(s) else s for s in row] for row in scores]
    order = reference.ranking(plain)
    positions = keys.t().flatten().argsort(descending=True).tolist()
    assert [(x // heads, x % heads) for x in positions] == order

    total = data.draw(st.integers(0, heads * m))
    by_head = [sum(h == x for _, h in order[:total]) for x in range(heads)]
    assert count_best([keys], [total], [0], None).tolist() == [by_head]
    counts = [data.draw(st.integers(0, m)) for _ in range(heads)]
    kept = best_positions(keys, counts)
    assert [x.tolist() for x in kept] == reference.keep(plain, counts, 0, 0)


@given(layers(), st.data())
def test_guarantee_comes_before_the_rest(scores, data):
    scores = [[-math.inf if math.isnan(s) else s for s in row] for row in scores]
    b = data.draw(st.integers(0, len(scores[0])))
    own = data.draw(st.integers(0, b))
    alpha = math.ceil(own * 10**6 / b) / 10**6 if b else 0.0
    counts = count_best([order_keys(torch.tensor(scores))], [len(scores) * b], [own], None)
    assert counts.tolist() == [reference.ada_counts(scores, b, alpha, "guarantee")]


@given(layers(), st.data())
def test_layers_are_counted_apart(scores, data):
    """All layers of a request at once, each with its own total and guarantee."""
    heads, m = len(scores), len(scores[0])
    stack = [order_keys(torch.tensor(scores)[:, torch.randperm(m)]) for _ in range(4)]
    totals = [heads * data.draw(st.integers(0, m)) for _ in stack]
    own = [data.draw(st.integers(0, total // heads)) for total in totals]
    apart = [
        count_best([k], [total], [sure], None) for k, total, sure in zip(stack, totals, own, strict=True)
    ]
    assert torch.equal(count_best(stack, totals, own, None), torch.cat(apart))


def test_equal_scores_fill_heads_evenly():
    keys = order_keys(torch.zeros(4, 100))
    counts = count_best([keys, keys], [40, 42], [0, 0], None).tolist()
    assert counts == [[10, 10, 10, 10], [11, 11, 10, 10]]
