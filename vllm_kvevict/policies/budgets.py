"""Exact integer splits of a budget between layers and between KV heads. No tensors, no rounding drift."""

import math
from collections.abc import Sequence

MILLION = 1_000_000


def split_exact(numerators: Sequence[int], denominator: int, total: int) -> list[int]:
    """Round the shares numerators[i]/denominator to integers that add up to `total`.

    Floors first, then +1 to the largest remainders, ties to the lower index. Raises ValueError unless the
    floors leave between 0 and len(numerators) - 1 units, which holds whenever the shares add up to `total`.
    """
    shares = [numerator // denominator for numerator in numerators]
    left = total - sum(shares)
    if not 0 <= left < max(1, len(shares)):
        raise ValueError(f"total must be the sum of the shares, but the floors leave {left} of {total}")
    by_remainder = sorted(range(len(shares)), key=lambda i: (-(numerators[i] % denominator), i))
    for i in by_remainder[:left]:
        shares[i] += 1
    return shares


def pyramid_budgets(b: int, m: int, num_layers: int, beta: int) -> list[int]:
    """Tokens per KV head that each layer keeps besides the window, falling from bottom to top.

    b: average over layers; m: number of candidates, b <= m. PyramidKV eq. 1-2: the top layer gets b//beta,
    the bottom one 2b - b//beta, those between lie on a line; where the bottom layer would exceed m, the
    line is turned about its middle. beta=1 is uniform, as is a single layer. The sum is num_layers*b, the
    budgets do not increase, and each is in 0..m. (The authors' code rounds the step between layers down, so
    its sum exceeds num_layers*b.)
    """
    if num_layers == 1:
        return [b]
    low = b // beta
    high = 2 * b - low
    if high >= m:
        low, high = 2 * b - m, m
    steps = num_layers - 1
    numerators = [high * steps - (high - low) * layer for layer in range(num_layers)]
    return split_exact(numerators, steps, num_layers * b)


def water_fill(weights: Sequence[float], total: int, m: int) -> tuple[list[float], list[int]]:
    """Shares of `total` in proportion to weights, none above m, and the indices of those below m.

    Whoever would get more than m gets m, and the others share the rest in the same way. Negative and non-finite
    weights count as 0; weights that sum to 0 share evenly. float64, in order: every caller gets the same shares.
    """
    claims = [w if math.isfinite(w) and w > 0 else 0.0 for w in map(float, weights)]
    # A power of two changes no share, and keeps the sum finite.
    exponent = math.frexp(max(claims, default=0.0))[1]
    claims = [math.ldexp(w, -exponent) for w in claims]
    shares = [float(m)] * len(claims)
    left = total
    sharing = list(range(len(claims)))
    while sharing:
        claimed = sum(claims[i] for i in sharing)
        for i in sharing:
            shares[i] = left * claims[i] / claimed if claimed else left / len(sharing)
        full = [i for i in sharing if shares[i] >= m]
        if not full:
            break
        for i in full:
            shares[i] = float(m)
        left -= m * len(full)
        sharing = [i for i in sharing if i not in full]
    return shares, sharing


def dynamic_layer_budgets(weights: Sequence[float], b: int, m: int) -> list[int]:
    """Candidates per KV head for each layer, in proportion to the layers' weights, none above m.

    The total is len(weights)*min(b, m), shared by `water_fill`; then largest remainder, ties to the lower layer.
    """
    total = len(weights) * min(b, m)
    shares, sharing = water_fill(weights, total, m)
    budgets = [math.floor(share) for share in shares]
    by_remainder = sorted(sharing, key=lambda i: (budgets[i] - shares[i], i))
    for i in by_remainder[: total - sum(budgets)]:
        budgets[i] += 1
    return budgets


def provisional_layer_budgets(weights: Sequence[float], b: int, m: int, num_layers: int) -> list[int]:
    """Candidates per KV head that the first layers of a model may still need when the weights of all are known.

    The first len(weights) of num_layers layers share the whole total for now. With every further layer their shares
    shrink, so what `dynamic_layer_budgets` gives them in the end is never more (LAVa Alg. 2).
    """
    shares, _ = water_fill(weights, min(num_layers * b, len(weights) * m), m)
    return [min(m, math.floor(share) + 1) for share in shares]


def guaranteed_tokens(alpha: float, b: int) -> int:
    """floor(alpha*b) with alpha taken in integer millionths, so that 0.29*100 is 29."""
    return round(alpha * MILLION) * b // MILLION


def safeguard(counts: Sequence[int], b: int, alpha: float) -> list[int]:
    """Head budgets from adaptive counts: Ada-KV's safeguard against starved heads (Alg. 2 line 8).

    counts[h]: how many of the layer's len(counts)*b best entries belong to head h. Head h gets
    (1-alpha)*counts[h] + alpha*b, as in the authors' code: alpha=1 is uniform, alpha=0 fully adaptive. (The
    algorithm as printed swaps the two weights: its alpha is 1-alpha here.) Shares are rounded by largest
    remainder to the exact total.
    """
    uniform = round(alpha * MILLION)
    numerators = [(MILLION - uniform) * count + uniform * b for count in counts]
    return split_exact(numerators, MILLION, len(counts) * b)


def capped_safeguard(counts: Sequence[int], caps: Sequence[int], total: int, alpha: float) -> list[int]:
    """`safeguard` of heads that have different numbers of candidates, none of which gets more than it has.

    counts[h]: how many of the layer's `total` best candidates belong to head h; caps[h]: how many it has. The shares
    are those of `safeguard` with b = total/len(counts). Whoever would get more than its cap gets its cap, and the
    others share the rest in the same proportions, until nobody would; then largest remainder, ties to the lower head.
    Where no cap is reached it is what `safeguard` gives. total must be sum(counts), and so at most sum(caps).
    """
    uniform = round(alpha * MILLION)
    weights = [(MILLION - uniform) * count * len(counts) + uniform * total for count in counts]
    shares, left, sharing = [0] * len(caps), total, list(range(len(caps)))
    while left:
        whole = sum(weights[h] for h in sharing)
        full = [h for h in sharing if left * weights[h] >= caps[h] * whole]
        if not full:
            break
        for h in full:
            shares[h] = caps[h]
            left -= caps[h]
        sharing = [h for h in sharing if h not in full]
    if left:
        rounded = split_exact([left * weights[h] for h in sharing], whole, left)
        for h, share in zip(sharing, rounded, strict=True):
            shares[h] = share
    return shares
