"""Slow second implementation of every policy: float64, plain loops, fractions. Shares no code with the package.

Scores are lists of lists, scores[kv_head][position]; what is kept is kept[kv_head] = ascending positions.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

Scores = list[list[float]]


def budget(n: int, tokens: int | None, ratio: float | None) -> int:
    """B, with the ratio taken as the decimal number that was written."""
    if tokens is not None:
        return min(n, tokens)
    return min(n, max(1, math.floor(Fraction(repr(ratio)) * n)))


def shrunk(fixed: int, b: int, smallest: int) -> int:
    """Window or sinks of a ratio whose budget they would use up."""
    return fixed if b > fixed else max(smallest, b // 2)


def attention_row(query: np.ndarray, keys: np.ndarray, scale: float, cap: float | None) -> list[float]:
    """Softmax of one query over keys [visible, d]."""
    logits = []
    for key in keys:
        z = sum(float(a) * float(b) for a, b in zip(query, key, strict=True)) * scale
        logits.append(cap * math.tanh(z / cap) if cap else z)
    top = max(logits)
    powers = [math.exp(z - top) for z in logits]
    total = math.fsum(powers)
    return [p / total for p in powers]


def pooled(row: list[float], how: str, kernel: int) -> list[float]:
    """Pooling with the window cut off at both ends; an average always divides by the kernel."""
    if how == "none":
        return row
    out = []
    for i in range(len(row)):
        near = [row[j] for j in range(i - kernel // 2, i + kernel // 2 + 1) if 0 <= j < len(row)]
        out.append(max(near) if how == "max" else math.fsum(near) / kernel)
    return out


def snapkv_scores(
    q: np.ndarray, k: np.ndarray, window: int, scale: float | None, cap: float | None, p: dict
) -> Scores:
    """Scores of the tokens before the window. q [Hq, rows, d] ends with the window, k [Hkv, n, d]."""
    kv_heads, n, size = k.shape
    group = q.shape[0] // kv_heads
    scale = 1 / math.sqrt(size) if scale is None else scale
    result = []
    for head in range(kv_heads):
        per_query_head = []
        for hq in range(head * group, head * group + group):
            mean = [0.0] * (n - window)
            for r in range(window):
                row = attention_row(q[hq, q.shape[1] - window + r], k[head, : n - window + r + 1], scale, cap)
                for i in range(n - window):
                    mean[i] += row[i] / window
            per_query_head.append(mean)
        columns = list(zip(*per_query_head, strict=True))
        reduced = [max(c) if p["gqa"] == "max" else math.fsum(c) / group for c in columns]
        result.append(pooled(reduced, p["pooling"], p["kernel"]))
    return result


def ranking(scores: Scores) -> list[tuple[int, int]]:
    """All (position, head) of a layer, best first."""
    entries = [(-s, i, h) for h, row in enumerate(scores) for i, s in enumerate(row)]
    return [(i, h) for _, i, h in sorted(entries)]


def largest_remainder(ideal: list[Fraction], total: int) -> list[int]:
    """Integers near the ideals that add up to total."""
    out = [math.floor(x) for x in ideal]
    rest = [x - math.floor(x) for x in ideal]
    while sum(out) < total:
        i = rest.index(max(rest))
        out[i] += 1
        rest[i] = Fraction(-1)
    return out


def pyramid(b: int, m: int, layers: int, beta: int, rounding: str) -> list[int]:
    """Budgets without the window, layer by layer."""
    if layers == 1:
        return [b]
    top = b // beta
    bottom = 2 * b - top
    if bottom >= m:
        bottom, top = m, 2 * b - m
    if rounding == "official":
        return [bottom - i * ((bottom - top) // (layers - 1)) for i in range(layers)]
    line = [bottom - Fraction((bottom - top) * i, layers - 1) for i in range(layers)]
    return largest_remainder(line, layers * b)


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
    best = [sum(1 for _, h in order[: heads * b] if h == head) for head in range(heads)]
    if rule == "paper":
        a = 1 - a
    return largest_remainder([(1 - a) * f + a * b for f in best], heads * b)


def keep(scores: Scores, counts: list[int], n: int, window: int) -> list[list[int]]:
    """Best counts[h] of each head, then the window."""
    kept = []
    for row, count in zip(scores, counts, strict=True):
        order = sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))
        kept.append(sorted(order[:count]) + list(range(n - window, n)))
    return kept


# Per policy: (scores, layer, num_layers, n, B, window, parameters, KV heads) -> kept of one layer.


def _full(scores, layer, layers, n, b, window, p, heads):
    return [list(range(n))] * heads


def _streaming(scores, layer, layers, n, b, window, p, heads):
    sinks = shrunk(p["sinks"], b, 0)
    return [[i for i in range(n) if i < sinks or i >= n - (b - sinks)]] * heads


def _snapkv(scores, layer, layers, n, b, window, p, heads):
    return keep(scores, [b - window] * heads, n, window)


def _pyramidkv(scores, layer, layers, n, b, window, p, heads):
    past = pyramid(b - window, n - window, layers, p["beta"], p["pyramid_rounding"])[layer]
    return keep(scores, [past] * heads, n, window)


def _ada_snapkv(scores, layer, layers, n, b, window, p, heads):
    return keep(scores, ada_counts(scores, b - window, p["alpha"], p["ada_safeguard"]), n, window)


def _ada_pyramid(scores, layer, layers, n, b, window, p, heads):
    past = pyramid(b - window, n - window, layers, p["beta"], p["pyramid_rounding"])[layer]
    return keep(scores, ada_counts(scores, past, p["alpha"], p["ada_safeguard"]), n, window)


SELECT: dict[str, Callable[..., list[list[int]]]] = {
    "full": _full,
    "streaming-llm": _streaming,
    "snapkv": _snapkv,
    "pyramidkv": _pyramidkv,
    "ada-snapkv": _ada_snapkv,
    "ada-pyramid": _ada_pyramid,
}
SCORE: dict[str, Callable[..., Scores] | None] = {
    "full": None,
    "streaming-llm": None,
    "snapkv": snapkv_scores,
    "pyramidkv": snapkv_scores,
    "ada-snapkv": snapkv_scores,
    "ada-pyramid": snapkv_scores,
}
