"""Policies that must coincide, and Ada-KV's optimality."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.policies import EvictionConfig, LayerInputs, LayerScores, decide, select

N, WINDOW = 100, 8


def inputs(seed: int, num_layers: int = 4) -> list[LayerInputs]:
    g = torch.Generator().manual_seed(seed)
    return [
        LayerInputs(torch.randn(6, WINDOW, 8, generator=g) * 2, torch.randn(3, N, 8, generator=g) * 2)
        for _ in range(num_layers)
    ]


def kept(policy: str, seed: int, **params) -> list:
    cfg = EvictionConfig(policy, budget=30, window=WINDOW, **params)
    return [[head.tolist() for head in layer] for layer in decide(cfg, inputs(seed))]


@pytest.mark.parametrize("seed", range(5))
def test_limits_of_the_parameters(seed):
    snapkv = kept("snapkv", seed)
    assert kept("ada-snapkv", seed, alpha=1) == snapkv
    assert kept("ada-snapkv", seed, alpha=1, ada_safeguard="guarantee") == snapkv
    assert kept("ada-snapkv", seed, alpha=0, ada_safeguard="paper") == snapkv
    assert kept("pyramidkv", seed, beta=1) == snapkv
    assert kept("ada-pyramid", seed, alpha=1) == kept("pyramidkv", seed)
    assert kept("ada-pyramid", seed, beta=1) == kept("ada-snapkv", seed)
    assert kept("ada-snapkv", seed, alpha=0, ada_safeguard="guarantee") == kept("ada-snapkv", seed, alpha=0)
    assert kept("snapkv", seed, pooling="max", kernel=1) == kept("snapkv", seed, pooling="none")


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("policy", ["ada-snapkv", "ada-pyramid"])
def test_paper_safeguard_is_interp_with_the_weights_swapped(policy, alpha):
    assert kept(policy, 1, alpha=alpha, ada_safeguard="paper") == kept(policy, 1, alpha=1 - alpha)


def test_policies_and_settings_differ():
    """Guards against parameters that are accepted and ignored."""
    variants = [
        kept("snapkv", 2),
        kept("snapkv", 2, pooling="avg"),
        kept("snapkv", 2, pooling="none"),
        kept("snapkv", 2, kernel=3),
        kept("snapkv", 2, gqa="max"),
        kept("pyramidkv", 2),
        kept("pyramidkv", 2, beta=2),
        kept("pyramidkv", 2, beta=9, pyramid_rounding="official"),
        kept("ada-snapkv", 2),
        kept("ada-snapkv", 2, alpha=0.9),
        kept("ada-snapkv", 2, ada_safeguard="paper"),
        kept("ada-snapkv", 2, ada_safeguard="guarantee"),
        kept("ada-pyramid", 2),
    ]
    assert len({str(v) for v in variants}) == len(variants)


def test_equal_scores_give_uniform_heads():
    cfg = EvictionConfig("ada-snapkv", budget=30, window=WINDOW, alpha=0)
    (layer,) = select(cfg, [LayerScores(0, 1, 4, torch.full((4, N - WINDOW), 0.5))], N)
    assert all(head.tolist() == [*range(22), *range(N - WINDOW, N)] for head in layer)


def test_a_head_may_keep_only_its_window():
    scores = torch.zeros(2, N - WINDOW)
    scores[1] = 1
    cfg = EvictionConfig("ada-snapkv", budget=30, window=WINDOW, alpha=0)
    (layer,) = select(cfg, [LayerScores(0, 1, 2, scores)], N)
    assert layer[0].tolist() == list(range(N - WINDOW, N))
    assert len(layer[1]) == 2 * 22 + WINDOW


@settings(max_examples=60)
@given(st.integers(0, 2**30), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
def test_retained_score(seed, alpha):
    """Ada-KV theorem 3.3: adaptive heads retain the most any allocation can, and never less than uniform ones."""
    m, b = N - WINDOW, 22
    scores = torch.rand(4, m, generator=torch.Generator().manual_seed(seed)) ** 4
    layer = [LayerScores(0, 1, 4, scores)]

    def retained(policy: str, **params) -> float:
        (heads,) = select(EvictionConfig(policy, budget=30, window=WINDOW, **params), layer, N)
        return sum(scores[h, x[x < m]].double().sum().item() for h, x in enumerate(heads))

    best = scores.flatten().double().sort(descending=True).values[: 4 * b].sum().item()
    uniform = retained("snapkv")
    assert retained("ada-snapkv", alpha=0) == pytest.approx(best, rel=1e-12)
    for rule in ("interp", "paper", "guarantee"):
        assert retained("ada-snapkv", alpha=alpha, ada_safeguard=rule) >= uniform * (1 - 1e-12)


@pytest.mark.parametrize("policy", ["snapkv", "ada-snapkv", "pyramidkv", "ada-pyramid"])
def test_nan_scores_are_the_lowest(policy):
    scores = torch.rand(2, N - WINDOW)
    scores[:, :20] = torch.nan
    cfg = EvictionConfig(policy, budget=30, window=WINDOW)
    (layer,) = select(cfg, [LayerScores(0, 1, 2, scores)], N)
    assert sum(map(len, layer)) == 60
    assert all(int(head[0]) >= 20 for head in layer)
    (layer,) = decide(cfg, [LayerInputs(torch.randn(4, WINDOW, 8), torch.full((2, N, 8), torch.nan))])
    assert [len(head) for head in layer] == [30, 30]
