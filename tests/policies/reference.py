"""Slow second implementation of every policy: float64, plain loops, fractions. Shares no code with the package.

This file holds budgets, orders and splits; reference_scores.py scores, reference_select.py selects.
Scores are lists of lists, scores[kv_head][position]; what is kept is kept[kv_head] = ascending positions.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

Scores = list[list[float]]


def budget(n: int, tokens: int | None, ratio: float | None) -> int:
    """B, with the ratio taken as the decimal number that was written."""
    if tokens is not None:
        return min(n, tokens)
    return min(n, max(1, math.floor(Fraction(repr(ratio)) * n)))


def shrunk(fixed: int, b: int, smallest: int) -> int:
    """Window or sinks of a ratio whose budget they would use up."""
    return fixed if b > fixed else max(smallest, b // 2)


def always_kept(policy: str, b: int, p: dict[str, Any]) -> tuple[int, int]:
    """(window, sinks) of a prompt that is evicted down to b tokens per head."""
    if policy == "full":
        return 0, 0
    if policy == "streaming-llm":
        return 0, shrunk(p["sinks"], b, 0)
    last = p.get("take_probe" if policy == "take" else "window", int(policy == "tova"))
    window = shrunk(last, b, 1)
    sinks = p.get("sinks", 0)
    if last and b <= last:
        return window, min(sinks, b // 2)
    return window, min(sinks, b - window)


def ranking(scores: Scores) -> list[tuple[int, int]]:
    """All (position, head) of a layer, best first."""
    entries = [(-s, i, h) for h, row in enumerate(scores) for i, s in enumerate(row)]
    return [(i, h) for _, i, h in sorted(entries)]


def best(row: Sequence[float], count: int, among: Sequence[int] | None = None) -> list[int]:
    """The `count` best positions of one head, ascending."""
    candidates = range(len(row)) if among is None else among
    return sorted(sorted(candidates, key=lambda i: (-row[i], i))[:count])


def largest_remainder(ideal: list[Fraction], total: int) -> list[int]:
    """Integers near the ideals that add up to total."""
    out = [math.floor(x) for x in ideal]
    rest = [x - math.floor(x) for x in ideal]
    while sum(out) < total:
        i = rest.index(max(rest))
        out[i] += 1
        rest[i] = Fraction(-1)
    return out


def pyramid(b: int, m: int, layers: int, beta: int) -> list[int]:
    """Budgets without the window, layer by layer."""
    if layers == 1:
        return [b]
    top = b // beta
    bottom = 2 * b - top
    if bottom >= m:
        bottom, top = m, 2 * b - m
    line = [bottom - Fraction((bottom - top) * i, layers - 1) for i in range(layers)]
    return largest_remainder(line, layers * b)


def water_fill(weights: Sequence[float], total: int, m: int) -> list[Fraction]:
    """total in proportion to the weights, at most m each; exact."""
    plain = [Fraction(w) if math.isfinite(w) else Fraction(0) for w in weights]
    shares = [Fraction(m)] * len(plain)
    open_ = list(range(len(plain)))
    while open_:
        left = total - m * (len(plain) - len(open_))
        mass = sum(plain[i] for i in open_)
        ideal = {i: left * plain[i] / mass if mass else Fraction(left, len(open_)) for i in open_}
        full = [i for i in open_ if ideal[i] >= m]
        if not full:
            for i in open_:
                shares[i] = ideal[i]
            break
        open_ = [i for i in open_ if i not in full]
    return shares


def dynamic(weights: Sequence[float], b: int, m: int) -> list[int]:
    """Budgets without the window from the weights of all layers."""
    total = len(weights) * min(b, m)
    return largest_remainder(water_fill(weights, total, m), total)


def ada_counts(scores: Scores, b: int, alpha: float, rule: str) -> list[int]:
    """Tokens besides the window of each head of a layer."""
    heads = len(scores)
    a = Fraction(round(alpha * 10**6), 10**6)
    order = ranking(scores)
    if rule == "guarantee":
        own = math.floor(a * b)
        counts = [own] * heads
        seen = [0] * heads
        rest = []
        for i, h in order:
            seen[h] += 1
            if seen[h] > own:
                rest.append((i, h))
        for _, h in rest[: heads * b - heads * own]:
            counts[h] += 1
        return counts
    top = [sum(1 for _, h in order[: heads * b] if h == head) for head in range(heads)]
    return largest_remainder([(1 - a) * f + a * b for f in top], heads * b)


def keep(scores: Scores, counts: list[int], n: int, window: int, sinks: int = 0) -> list[list[int]]:
    """The sinks, the best counts[h] candidates of each head behind them, then the window."""
    return [
        [*range(sinks), *best(row, count, range(sinks, len(row))), *range(n - window, n)]
        for row, count in zip(scores, counts, strict=True)
    ]
