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
