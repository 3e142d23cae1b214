"""Slow second implementation for rows of different lengths, in fractions."""

from collections.abc import Sequence
from fractions import Fraction

from . import reference


def level(weights: Sequence[Fraction], caps: Sequence[int], total: int) -> list[Fraction]:
    """min(cap, t * weight) of each, with the t at which they add up to the total, which is between two fillings."""
    if total == 0:
        return [Fraction(0)] * len(caps)
    filled_at = sorted({Fraction(cap) / w for w, cap in zip(weights, caps, strict=True) if w})
    for t in filled_at:
        if sum(min(Fraction(cap), t * w) for w, cap in zip(weights, caps, strict=True)) >= total:
            full = [
                Fraction(cap) if w and Fraction(cap) / w < t else None
                for w, cap in zip(weights, caps, strict=True)
            ]
            rest = total - sum(x for x in full if x is not None)
            mass = sum(w for w, x in zip(weights, full, strict=True) if x is None)
            return [rest * w / mass if x is None else x for w, x in zip(weights, full, strict=True)]
    raise AssertionError("there are fewer candidates than the total")


def capped_shares(
    counts: Sequence[int], caps: Sequence[int], total: int, alpha: float, rule: str
) -> list[int]:
    """Candidates of each head, from how many of the layer's best it has, and how many it has at all."""
    a = Fraction(round(alpha * 10**6), 10**6)
    if rule == "paper":
        a = 1 - a
    ideal = [(1 - a) * f + a * Fraction(total, len(counts)) for f in counts]
    return reference.largest_remainder(level(ideal, caps, total), total)
