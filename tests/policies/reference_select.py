"""What every policy keeps, given the scores of its layers."""

import math
from fractions import Fraction
from typing import Any

from . import reference
from .reference import Scores
from .reference_scores import Scored

Kept = list[list[list[int]]]

# How a policy shares its budget between layers, and between the heads of a layer.
RULES = {
    "full": ("all", "all"),
    "streaming-llm": ("uniform", "recent"),
    "h2o": ("uniform", "uniform"),
    "snapkv": ("uniform", "uniform"),
    "pyramidkv": ("pyramid", "uniform"),
    "ada-snapkv": ("uniform", "adaptive"),
    "ada-pyramid": ("pyramid", "adaptive"),
    "lava": ("dynamic", "adaptive"),
    "lava-uniform": ("uniform", "adaptive"),
    "lava-pyramid": ("pyramid", "adaptive"),
    "lava-uniform-head": ("dynamic", "uniform"),
    "cake": ("dynamic", "uniform"),
    "vatp-snapkv": ("uniform", "uniform"),
    "tova": ("uniform", "uniform"),
    "knorm": ("uniform", "uniform"),
    "keydiff": ("uniform", "uniform"),
    "criticalkv": ("uniform", "uniform"),
    "ada-criticalkv": ("uniform", "adaptive"),
    "defensivekv": ("uniform", "adaptive"),
    "layer-defensivekv": ("global", "global"),
    "take": ("leader", "uniform"),
    "kvzip": ("global", "global"),
    "compactor": ("uniform", "adaptive"),
    "expected-attention": ("uniform", "uniform"),
    "dropkv": ("global", "global"),
}
DYNAMIC = [policy for policy, (layers, _) in RULES.items() if layers == "dynamic"]
WHOLE_MODEL = [policy for policy, (layers, _) in RULES.items() if layers in ("dynamic", "global", "leader")]


def past_budgets(
    policy: str, weights: list[float] | None, num_layers: int, b: int, m: int, p: dict[str, Any]
) -> list[int]:
    """Tokens per head besides the window of every layer, averaged over its heads."""
    rule = RULES[policy][0]
    if rule == "pyramid":
        return reference.pyramid(b, m, num_layers, p["beta"])
    if rule == "dynamic":
        return reference.dynamic(weights, b, m)
    return [b] * num_layers


def two_stages(
    first: Scores, second: Scores, counts: list[int], share: float, n: int, window: int
) -> list[list[int]]:
    """Part of each head's tokens by the first scores, the others by the second."""
    kept = []
    for s, s2, count in zip(first, second, counts, strict=True):
        sure = set(reference.best(s, math.floor(Fraction(round(share * 10**6), 10**6) * count)))
        rest = [i for i in range(len(s)) if i not in sure]
        more = reference.best(s2, count - len(sure), rest)
        kept.append(sorted([*sure, *more]) + list(range(n - window, n)))
    return kept


def best_of_model(layers: list[Scored], b: int, n: int, window: int, sinks: int) -> Kept:
    """One choice among all layers: sinks, then score, then position, then layer, then head."""
    heads = len(layers[0].scores)
    order = sorted(
        (i >= sinks, -s, i, layer, h)
        for layer, x in enumerate(layers)
        for h, row in enumerate(x.scores)
        for i, s in enumerate(row)
    )[: len(layers) * heads * b]
    kept = [[list(range(n - window, n)) for _ in range(heads)] for _ in layers]
    for _, _, i, layer, h in order:
        kept[layer][h].append(i)
    return [[sorted(head) for head in layer] for layer in kept]


def select_layer(
    policy: str, x: Scored, past: int, layer: int, n: int, b: int, p: dict[str, Any], heads: int
) -> list[list[int]]:
    """One layer that may keep `past` tokens per head besides the window, of a model with budget b."""
    window, sinks = reference.always_kept(policy, b, p)
    if policy == "full" or layer < p.get("skip_layers", 0):
        return [list(range(n))] * heads
    if policy == "streaming-llm":
        return [[i for i in range(n) if i < sinks or i >= n - (b - sinks)]] * heads
    counts = [past - sinks] * heads
    if RULES[policy][1] == "adaptive":
        # Sinks are out of the competition.
        others = [row[sinks:] for row in x.scores]
        counts = reference.ada_counts(
            others, past - sinks, p.get("alpha", 0.0), p.get("ada_safeguard", "interp")
        )
    if "first" in p:
        return two_stages(x.scores, x.second, counts, p["first"], n, window)
    return reference.keep(x.scores, counts, n, window, sinks)


def select(policy: str, layers: list[Scored], n: int, b: int, p: dict[str, Any], heads: int) -> Kept:
    """All layers of a model, in order, of a prompt of n tokens with budget b."""
    if n <= b:
        return [[list(range(n))] * heads for _ in layers]
    window, sinks = reference.always_kept(policy, b, p)
    if RULES[policy][1] == "global":
        return best_of_model(layers, b - window, n, window, sinks)
    if policy == "take":
        warmup = p["take_warmup_layers"]
        leader = (len(layers) // 2 if warmup == "auto" else warmup) - 1
        layers = [layers[max(layer, leader)] for layer in range(len(layers))]
    weights = [x.weight for x in layers]
    past = past_budgets(policy, weights, len(layers), b - window, n - window, p)
    return [select_layer(policy, x, past[layer], layer, n, b, p, heads) for layer, x in enumerate(layers)]
