"""Evicting layer by layer as the model runs ends at the same entries as one decision after the last layer."""

import math
import random
from fractions import Fraction

import pytest
import torch

from vllm_kvevict.policies import EvictionConfig, LayerScores, select

from . import reference
from .seeds import named

HEADS, NUM_LAYERS, N, B, WINDOW = 3, 5, 60, 20, 8
WEIGHTS = [0.0, 0.01, 0.5, 0.5, 0.9, 1.0, 30.0, math.nan]


def cascade(scores: list, weights: list[float], alpha: float | None) -> list:
    """LAVa's algorithm 2: after each layer, all layers so far drop to their share of the whole budget.

    alpha None: the same number for every head. Shares are rounded up until the last layer is known, and
    whatever was dropped stays dropped.
    """
    b, m = B - WINDOW, N - WINDOW
    order, held = [], []
    for t in range(NUM_LAYERS):
        order.append(reference.ranking(scores[t]))
        held.append([[i for i, h in order[t] if h == head] for head in range(HEADS)])
        total, last = min(NUM_LAYERS * b, (t + 1) * m), t == NUM_LAYERS - 1
        ideal = reference.water_fill(weights[: t + 1], total, m)
        shares = reference.largest_remainder(ideal, total) if last else [math.ceil(x) for x in ideal]
        for j, share in enumerate(shares):
            counts = [share] * HEADS
            if alpha is not None:
                assert len(order[j]) >= HEADS * share
                order[j] = order[j][: HEADS * share]
                a = Fraction(round(alpha * 10**6), 10**6)
                f = [sum(h == head for _, h in order[j]) for head in range(HEADS)]
                exact = [(1 - a) * x + a * share for x in f]
                counts = [math.ceil(x) for x in exact]
                if last:
                    counts = reference.largest_remainder(exact, HEADS * share)
            assert all(len(x) >= count for x, count in zip(held[j], counts, strict=True))
            held[j] = [x[:count] for x, count in zip(held[j], counts, strict=True)]
        # Rounding up costs one token per head and layer, twice where heads are rounded as well.
        slack = 0 if last else (t + 1) * HEADS * (2 if alpha else 1)
        assert sum(len(x) for layer in held for x in layer) <= NUM_LAYERS * HEADS * b + slack
    return [[sorted(x) + list(range(m, N)) for x in layer] for layer in held]


@pytest.mark.parametrize(
    ("policy", "alpha"),
    [
        ("lava", 0.0),
        ("lava", 0.2),
        ("lava", 0.77),
        ("lava", 1.0),
        ("lava-uniform-head", None),
        ("cake", None),
    ],
)
def test_cascade_is_the_one_shot_decision(policy, alpha):
    for seed in range(40):
        with named(seed):
            check(policy, alpha, seed)


def check(policy, alpha, seed):
    rng = random.Random(f"{policy}{seed}")
    weights = [rng.choice([*WEIGHTS, *[rng.random()] * 8]) for _ in range(NUM_LAYERS)]
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(NUM_LAYERS, HEADS, N - WINDOW, generator=g) ** 3
    if seed % 2:  # ties
        scores = (scores * 8).round() / 8
    params = {} if alpha is None else {"alpha": alpha}
    cfg = EvictionConfig(policy, budget=B, window=WINDOW, **params)
    layers = [
        LayerScores(i, NUM_LAYERS, HEADS, x, weight=w)
        for i, (x, w) in enumerate(zip(scores, weights, strict=True))
    ]
    kept = [[head.tolist() for head in layer] for layer in select(cfg, layers, N)]
    assert kept == cascade(scores.tolist(), weights, alpha)
