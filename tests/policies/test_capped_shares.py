"""Shares of heads that have different numbers of candidates: exact totals, caps, proportions."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvevict.policies.budgets import capped_safeguard

from . import reference_rows

ALPHAS = st.one_of(st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.integers(0, 10**6).map(lambda a: a / 10**6))


@st.composite
def layers(draw, most: int = 60):
    """(counts, caps): of heads of which some have few candidates, or none."""
    caps = draw(st.lists(st.one_of(st.integers(0, most), st.integers(0, 3)), min_size=1, max_size=8))
    return [draw(st.integers(0, cap)) for cap in caps], caps


def check(shares: list[int], counts: list[int], caps: list[int], alpha: float) -> None:
    """Whatever the shares are, this is what must hold of them."""
    total = sum(counts)
    assert sum(shares) == total
    assert all(0 <= share <= cap for share, cap in zip(shares, caps, strict=True))
    assert shares == reference_rows.capped_shares(counts, caps, total, alpha)


@given(layers(), ALPHAS)
def test_totals_are_exact_and_caps_kept(layer, alpha):
    counts, caps = layer
    check(capped_safeguard(counts, caps, sum(counts), alpha), counts, caps, alpha)
