"""Every policy against the slow reference: random shapes, edge lengths, dtypes, exact selection."""

import random

import numpy as np
import pytest
import torch

from vllm_kvevict.policies import (
    EvictionConfig,
    LayerInputs,
    LayerScores,
    available,
    decide,
    parameters,
    score_layer,
    select,
)

from . import reference

CHOICES = {
    "window": [1, 2, 5, 8],
    "kernel": [1, 3, 5, 7, 9],
    "pooling": ["max", "avg", "none"],
    "gqa": ["mean", "max"],
    "sinks": [0, 1, 4],
    "beta": [1, 2, 5, 20],
    "pyramid_rounding": ["exact", "exact", "official"],
    "alpha": [0.0, 0.1, 0.2, 0.37, 0.5, 1.0],
    "ada_safeguard": ["interp", "interp", "paper", "guarantee"],
}


def test_every_policy_and_parameter_is_covered():
    assert set(reference.SELECT) == set(reference.SCORE) == set(available())
    assert {name for policy in available() for name in parameters(policy)} == set(CHOICES)


def random_config(rng: random.Random, policy: str, **fixed) -> EvictionConfig:
    if policy == "full":
        return EvictionConfig("full")
    params = {name: rng.choice(CHOICES[name]) for name in parameters(policy)} | fixed
    if rng.random() < 0.5:
        return EvictionConfig(
            policy, keep_ratio=rng.choice([0.01, 0.05, 0.1, 0.2, 0.35, 0.5, 0.9, 1.0]), **params
        )
    return EvictionConfig(
        policy, budget=rng.randint(1, 20) + params.get("window", params.get("sinks")), **params
    )


def expected(cfg: EvictionConfig, scores: list, layers: list[int], num_layers: int, n: int, heads: int):
    """What the reference keeps in each of `layers`, given their scores."""
    b = n if cfg.policy == "full" else reference.budget(n, cfg.budget, cfg.keep_ratio)
    if n <= b:
        return [[list(range(n))] * heads for _ in layers]
    return [
        reference.SELECT[cfg.policy](s, layer, num_layers, n, b, window_of(cfg, n), cfg.params, heads)
        for s, layer in zip(scores, layers, strict=True)
    ]


def window_of(cfg: EvictionConfig, n: int) -> int:
    return reference.shrunk(cfg.params.get("window", 0), reference.budget(n, cfg.budget, cfg.keep_ratio), 1)


def as_lists(kept) -> list:
    for layer in kept:
        for head in layer:
            assert head.dtype == torch.int64 and bool((head.diff() > 0).all())
    return [[head.tolist() for head in layer] for layer in kept]


def check_same(kept: list, wanted: list, scores: list) -> None:
    """Equal counts, and sets that differ only by entries within 1e-5 relative of the cut."""
    for layer_kept, layer_wanted, layer_scores in zip(kept, wanted, scores, strict=True):
        assert [len(h) for h in layer_kept] == [len(h) for h in layer_wanted]
        for head, (have, want) in enumerate(zip(layer_kept, layer_wanted, strict=True)):
            if have != want:
                row = layer_scores[head]
                cut = min(row[i] for i in want if i < len(row))
                assert all(abs(row[i] - cut) <= 1e-5 * abs(cut) for i in set(have) ^ set(want))


def check_counts(kept: list, cfg: EvictionConfig, n: int) -> None:
    heads = [head for layer in kept for head in layer]
    if cfg.params.get("pyramid_rounding") != "official":
        assert sum(map(len, heads)) == len(heads) * cfg.budget_for(n)
    window = set(range(n - cfg.window_for(n), n))
    assert all(window <= set(head) and head[0] >= 0 and head[-1] < n for head in heads)


def run_case(rng: random.Random, cfg: EvictionConfig, n: int, dtype: torch.dtype) -> None:
    heads, group, size, num_layers = (
        rng.choice([1, 2, 3]),
        rng.choice([1, 2, 3]),
        rng.choice([4, 6]),
        rng.randint(1, 3),
    )
    scale, cap = rng.choice([None, 0.7]), rng.choice([None, None, 2.0])
    generator = torch.Generator().manual_seed(rng.randrange(2**30))
    inputs, scores = [], []
    for _ in range(num_layers):
        rows = min(n, cfg.params.get("window", 1) + rng.choice([0, 3]))
        q = (torch.randn(heads * group, rows, size, generator=generator) * 2).to(dtype)
        k = (torch.randn(heads, n, size, generator=generator) * 2).to(dtype)
        inputs.append(LayerInputs(q, k, scale=scale, logit_softcap=cap))
        score = reference.SCORE[cfg.policy]
        if score is not None and n > reference.budget(n, cfg.budget, cfg.keep_ratio):
            tensors = (x.double().numpy() for x in (q, k))
            scores.append(score(*tensors, window_of(cfg, n), scale, cap, cfg.params))
        else:
            scores.append([[]] * heads)
    kept = as_lists(decide(cfg, inputs))
    check_counts(kept, cfg, n)
    check_same(kept, expected(cfg, scores, list(range(num_layers)), num_layers, n, heads), scores)

    fast = [score_layer(cfg, x, i, num_layers) for i, x in enumerate(inputs)]
    ours = [x.scores.tolist() if x.scores is not None else None for x in fast]
    for mine, theirs in zip(ours, scores, strict=True):
        if mine is not None:
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-9)
    assert kept == expected(cfg, ours, list(range(num_layers)), num_layers, n, heads)
    for i in range(num_layers):  # a pipeline stage, or one layer inside its forward
        assert as_lists(select(cfg, [fast[i]], n)) == [kept[i]]


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.parametrize("policy", available())
def test_random_shapes(policy, seed):
    rng = random.Random(f"{policy}{seed}")
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    run_case(rng, random_config(rng, policy), rng.randint(1, 60), dtype)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 19, 20, 21, 90])
@pytest.mark.parametrize("policy", [p for p in available() if p != "full"])
def test_lengths_around_window_and_budget(policy, n):
    sizes = {"window": 8} if "window" in parameters(policy) else {}
    run_case(random.Random(n), EvictionConfig(policy, budget=20, **sizes), n, torch.float32)
    run_case(random.Random(n), EvictionConfig(policy, keep_ratio=0.25, **sizes), n, torch.float32)


@pytest.mark.parametrize("policy", [p for p in available() if reference.SCORE[p]])
def test_selection_from_given_scores_with_many_ties(policy):
    """Scores from a handful of values: nearly every cut falls among equals."""
    for seed in range(60):
        rng = random.Random(seed)
        heads, num_layers, n = rng.choice([1, 2, 4]), rng.choice([1, 3, 8]), rng.randint(30, 120)
        cfg = random_config(rng, policy)
        if not cfg.evicts(n):
            continue
        m = n - cfg.window_for(n)
        values = torch.tensor([0.0, -0.0, 0.25, 0.5, 1e-38, -1.0])
        picks = [
            values[torch.tensor(rng.choices(range(6), k=heads * m))].view(heads, m) for _ in range(num_layers)
        ]
        layers = [LayerScores(i, num_layers, heads, x) for i, x in enumerate(picks)]
        order = list(range(num_layers))
        rng.shuffle(order)
        kept = as_lists(select(cfg, [layers[i] for i in order], n))
        assert kept == expected(cfg, [picks[i].tolist() for i in order], order, num_layers, n, heads)
        check_counts(kept, cfg, n)
