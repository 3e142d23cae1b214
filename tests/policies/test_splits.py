"""Exact splits: sums, bounds, order."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.policies.budgets import (
    dynamic_layer_budgets,
    guaranteed_tokens,
    pyramid_budgets,
    safeguard,
    split_exact,
)

from . import reference

ALPHAS = st.integers(0, 10**6).map(lambda a: a / 10**6)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40), st.integers(1, 10**6))
def test_split_is_exact_and_within_one_of_the_share(numerators, denominator):
    total = sum(numerators) // denominator
    numerators[0] -= sum(numerators) % denominator  # may go below 0; only the sum must be whole
    shares = split_exact(numerators, denominator, total)
    assert sum(shares) == total
    assert all(abs(s - Fraction(x, denominator)) < 1 for s, x in zip(shares, numerators, strict=True))
    assert shares == reference.largest_remainder([Fraction(x, denominator) for x in numerators], total)


@pytest.mark.parametrize("total", [1, 4])
def test_split_refuses_a_total_that_is_not_the_sum(total):
    with pytest.raises(ValueError, match="total"):
        split_exact([2, 2], 2, total)


@st.composite
def pyramids(draw):
    m = draw(st.integers(1, 5000))
    return draw(st.integers(0, m)), m, draw(st.integers(1, 90)), draw(st.integers(1, 40))


@given(pyramids())
def test_pyramid_is_exact_non_increasing_and_within_bounds(shape):
    b, m, num_layers, beta = shape
    budgets = pyramid_budgets(b, m, num_layers, beta)
    assert sum(budgets) == num_layers * b
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[-1] >= 0 and budgets[0] <= m
    assert budgets == reference.pyramid(b, m, num_layers, beta)
    if beta == 1 or num_layers == 1:
        assert set(budgets) == {b}


@st.composite
def adaptive_counts(draw):
    """counts[h] <= m with sum Hkv*b, as the best entries of a layer give them."""
    heads, m = draw(st.integers(1, 16)), draw(st.integers(1, 300))
    b = draw(st.integers(0, m))
    counts, left = [], heads * b
    for after in range(heads - 1, -1, -1):
        counts.append(draw(st.integers(max(0, left - after * m), min(m, left))))
        left -= counts[-1]
    return counts, b, m


@given(adaptive_counts(), ALPHAS)
def test_safeguard(counted, alpha):
    counts, b, m = counted
    budgets = safeguard(counts, b, alpha)
    assert sum(budgets) == sum(counts)
    assert all(guaranteed_tokens(alpha, b) <= x <= m for x in budgets)
    assert all(min(f, b) <= x <= max(f, b) for f, x in zip(counts, budgets, strict=True))
    by_count = [budgets[i] for i in sorted(range(len(counts)), key=lambda i: counts[i])]
    assert all(x <= y + 1 for x, y in itertools.pairwise(by_count))
    assert safeguard(counts, b, 0.0) == counts
    assert safeguard(counts, b, 1.0) == [b] * len(counts)


@given(st.integers(0, 10**6), st.integers(0, 10**5))
def test_guaranteed_tokens_are_exact(millionths, b):
    assert guaranteed_tokens(millionths / 10**6, b) == millionths * b // 10**6


@st.composite
def layer_weights(draw):
    """(weights, b, m), with weights that saturate, vanish, repeat or are no numbers."""
    m = draw(st.integers(1, 3000))
    odd = st.sampled_from([0.0, 1.0, 0.5, 1e-9, 1e9, math.nan, math.inf, -math.inf])
    weights = st.one_of(st.floats(1e-6, 1e6), odd)
    return draw(st.lists(weights, min_size=1, max_size=40)), draw(st.integers(0, m)), m


@given(layer_weights())
def test_dynamic_budgets_are_the_capped_shares_rounded(case):
    weights, b, m = case
    total = len(weights) * b
    budgets = dynamic_layer_budgets(weights, b, m)
    assert sum(budgets) == total and all(type(x) is int and 0 <= x <= m for x in budgets)
    ideal = reference.water_fill(weights, total, m)
    assert all(abs(x - y) < 1 + 1e-9 for x, y in zip(budgets, ideal, strict=True))
    up = [y - math.floor(y) for x, y in zip(budgets, ideal, strict=True) if x > y]
    down = [y - math.floor(y) for x, y in zip(budgets, ideal, strict=True) if x < y]
    # Equal up to the float64 rounding of a share, which may turn a whole number into the one below.
    if up and down:
        assert min(up) >= max(down) - 1e-6 or max(down) > 1 - 1e-6
    plain = [w if math.isfinite(w) else 0.0 for w in weights]
    for (w1, x1), (w2, x2) in itertools.pairwise(sorted(zip(plain, budgets, strict=True))):
        assert x1 <= x2 + (w1 == w2)


@pytest.mark.parametrize(
    ("weights", "b", "m", "budgets"),
    [
        ([1, 2, 3], 4, 100, [2, 4, 6]),
        ([1, 1, 2], 1, 100, [1, 1, 1]),
        ([3, 1, 0], 10, 20, [20, 10, 0]),
        ([8, 1, 0], 10, 12, [12, 12, 6]),
        ([6, 3, 1], 10, 16, [16, 11, 3]),
        ([100, 10, 1], 10, 15, [15, 14, 1]),
        ([1, math.nan, 1, math.inf], 5, 100, [10, 0, 10, 0]),
        ([5], 7, 9, [7]),
        ([2, 0.1], 5, 5, [5, 5]),
        ([2, 0.1], 10, 5, [5, 5]),
        *(([weight] * 7, 123, 1000, [123] * 7) for weight in (0.7, 0.0, math.nan, 1e-30)),
    ],
)
def test_dynamic_budgets_by_hand(weights, b, m, budgets):
    assert dynamic_layer_budgets(weights, b, m) == budgets == reference.dynamic(weights, b, m)
