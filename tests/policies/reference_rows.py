"""Slow second implementation for rows of different lengths: float64, fractions, one row after another.

What a row has besides its pinned entries is a list of its own here; there is no padding, and no alignment.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from . import reference, reference_scores
from .reference import Scores
from .reference_scores import Scored, Tensors

Array = np.ndarray


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


def capped_shares(counts: Sequence[int], caps: Sequence[int], total: int, alpha: float) -> list[int]:
    """Candidates of each head, from how many of the layer's best it has, and how many it has at all."""
    a = Fraction(round(alpha * 10**6), 10**6)
    ideal = [(1 - a) * f + a * Fraction(total, len(counts)) for f in counts]
    return reference.largest_remainder(level(ideal, caps, total), total)


def best_first(rows: Scores) -> list[tuple[int, int]]:
    """(index, head) of all candidates of a layer: by score, then further from the row's end, then head."""
    order = [
        (math.inf if math.isnan(s) else -s, i - len(row), h, i)
        for h, row in enumerate(rows)
        for i, s in enumerate(row)
    ]
    return [(i, h) for _, _, h, i in sorted(order)]


def competing(rows: Scores, total: int, alpha: float, rule: str) -> list[int]:
    """How many candidates each head keeps."""
    order = best_first(rows)
    caps = [len(row) for row in rows]
    if rule != "guarantee":
        best = [sum(head == h for _, head in order[:total]) for h in range(len(rows))]
        return capped_shares(best, caps, total, alpha)
    sure = math.floor(Fraction(round(alpha * 10**6), 10**6) * Fraction(total, len(rows)))
    counts = [min(sure, cap) for cap in caps]
    seen = [0] * len(rows)
    left = total - sum(counts)
    for _, h in order:
        seen[h] += 1
        if seen[h] > sure and left:
            counts[h] += 1
            left -= 1
    return counts


def select(
    policy: str, scores: Scores | None, lengths: list[int], pinned: list[int], budget: int, p: dict[str, Any]
) -> list[list[int]]:
    """What each row of a layer keeps, counted from its first entry. scores: of each row's own candidates."""
    entries = [length - first for length, first in zip(lengths, pinned, strict=True)]
    window = p.get("window", 0)
    everything = [list(range(length)) for length in lengths]
    adaptive = policy == "ada-snapkv"
    if sum(entries) <= budget * len(entries) if adaptive else max(entries) <= budget:
        return everything
    if policy == "streaming-llm":
        kept = [[i for i in range(e) if i < p["sinks"] or i >= e - (budget - p["sinks"])] for e in entries]
    else:
        sizes = [min(window, e) for e in entries]
        if adaptive:
            total = budget * len(entries) - sum(sizes)
            counts = competing(scores, total, p["alpha"], p["ada_safeguard"])
        else:
            counts = [min(budget - size, len(row)) for size, row in zip(sizes, scores, strict=True)]
        ranked = [[i for i, head in best_first(scores) if head == h] for h in range(len(entries))]
        kept = [
            [*sorted(order[:count]), *range(e - size, e)]
            for order, count, e, size in zip(ranked, counts, entries, sizes, strict=True)
        ]
    return [[*range(first), *(first + i for i in own)] for first, own in zip(pinned, kept, strict=True)]


def similarities(keys: Array, threshold: float) -> Array:
    """C of rkv: cosines, without the diagonal and without the newest entry that each row finds alike."""
    n = len(keys)
    unit = [key / (math.sqrt(float(key @ key)) + 1e-8) for key in keys]
    c = np.array([[0.0 if i == j else float(unit[i] @ unit[j]) for j in range(n)] for i in range(n)])
    for i in range(n):
        alike = [j for j in range(n) if c[i, j] > threshold]
        c[i, max(alike, default=0)] = 0.0
    return c


def rkv(t: Tensors, window: int, b: int, p: dict[str, Any]) -> Scored:
    """Attention less redundancy."""
    m = t.n - window
    scale = 1 / math.sqrt(t.k.shape[2]) if t.scale is None else t.scale
    result = []
    for head in range(t.heads):
        rows = []
        for r in range(window):
            z = np.full(m, -np.inf)
            for hq in t.group(head):
                own = t.k[head, :m] @ t.q[hq, t.q.shape[1] - window + r] * scale
                z = np.maximum(z, t.cap * np.tanh(own / t.cap) if t.cap else own)
            rows.append((np.exp(z - z.max()) / np.exp(z - z.max()).sum()).tolist())
        attention = reference_scores.pooled(reference_scores.reduced(rows, "mean"), "max", p["kernel"])
        mean = similarities(t.k[head], p["threshold"]).mean(0)
        shares = np.exp(mean - mean.max()) / np.exp(mean - mean.max()).sum()
        result.append(
            [p["mix"] * a - (1 - p["mix"]) * float(x) for a, x in zip(attention, shares[:m], strict=True)]
        )
    return Scored(result)


SCORE: dict[str, Callable[[Tensors, int, int, dict[str, Any]], Scored] | None] = {
    "streaming-llm": None,
    "snapkv": reference_scores.snapkv,
    "ada-snapkv": reference_scores.snapkv,
    "knorm": reference_scores.knorm,
    "keydiff": reference_scores.keydiff,
    "rkv": rkv,
}
