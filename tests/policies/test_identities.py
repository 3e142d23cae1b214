"""Policies that must coincide, Ada-KV's optimality, NaN."""

import dataclasses

import pytest
import torch

from vllm_kvevict.policies import (
    EvictionConfig,
    LayerInputs,
    LayerScores,
    available,
    decide,
    parameters,
    select,
)
from vllm_kvevict.schedules.registry import lookahead_policies

from . import reference_select
from .layers import model_inputs, those_of
from .reference_scores import SCORE

N, WINDOW, LAYERS = 100, 8, 4
SCORED = [policy for policy in available() if SCORE[policy]]


def inputs(seed: int) -> list[LayerInputs]:
    """Three KV heads; the largest values of the first one lie in the window."""
    layers = model_inputs(seed, LAYERS, 3, 2, N, 8, WINDOW)
    for x in layers:
        x.values[0, -WINDOW:] *= 3
    return layers


def config(policy: str, **params) -> EvictionConfig:
    """The paper's parameters, a budget of 30 with a window of 8, and no sinks beside it."""
    sizes = those_of(policy, window=WINDOW, take_probe=WINDOW, sinks=0)
    return EvictionConfig(policy, budget=30, defaults="paper", **(sizes | params))


def as_lists(kept) -> list:
    return [[head.tolist() for head in layer] for layer in kept]


def kept(policy: str, seed: int, **params) -> list:
    return as_lists(decide(config(policy, **params), inputs(seed)))


@pytest.mark.parametrize("seed", range(5))
def test_limits_of_the_parameters(seed):
    snapkv = kept("snapkv", seed)
    assert kept("ada-snapkv", seed, alpha=1) == snapkv
    assert kept("ada-snapkv", seed, alpha=1, ada_safeguard="guarantee") == snapkv
    assert kept("pyramidkv", seed, beta=1) == snapkv
    assert kept("ada-pyramid", seed, alpha=1) == kept("pyramidkv", seed)
    assert kept("ada-pyramid", seed, beta=1) == kept("ada-snapkv", seed)
    assert kept("ada-snapkv", seed, alpha=0, ada_safeguard="guarantee") == kept("ada-snapkv", seed, alpha=0)
    assert kept("snapkv", seed, pooling="max", kernel=1) == kept("snapkv", seed, pooling="none")
    assert kept("lava", seed, alpha=1) == kept("lava-uniform-head", seed)
    assert kept("lava-uniform", seed, alpha=1) == kept("snapkv", seed, gqa="max")
    assert kept("lava-pyramid", seed, beta=1) == kept("lava-uniform", seed)
    assert kept("lava-pyramid", seed, alpha=1) == kept("pyramidkv", seed, gqa="max")
    assert kept("criticalkv", seed, first=1) == snapkv
    assert kept("ada-criticalkv", seed, first=1) == kept("ada-snapkv", seed)
    assert kept("ada-criticalkv", seed, alpha=1) == kept("criticalkv", seed)
    assert kept("snapkv", seed, window=1, rows="max") == kept("snapkv", seed, window=1)
    assert all(head == layer[0] for layer in kept("tova", seed) for head in layer)
    assert kept("knorm", seed, skip_layers=LAYERS) == [[list(range(N))] * 3] * LAYERS
    assert kept("knorm", seed, skip_layers=2)[2:] == kept("knorm", seed)[2:]


@pytest.mark.parametrize("ahead", [3, WINDOW, 20])
@pytest.mark.parametrize("policy", sorted(set(lookahead_policies()) - {"tova"}))
def test_after_a_lookahead(policy, ahead):
    """As if the answer's first tokens were the prompt's last: they stay, they are in the window, and B is of n."""
    n, layers = N - ahead, model_inputs(0, LAYERS, 3, 2, N, 8, max(WINDOW, ahead))
    windows = {"window": max(WINDOW, ahead)} if "window" in parameters(policy) else {}
    sizes = those_of(policy, window=WINDOW, sinks=0)
    asked = EvictionConfig(policy, keep_ratio=0.3, defaults="paper", **sizes)
    b = int(0.3 * n)
    wanted = EvictionConfig(policy, budget=b + ahead, defaults="paper", **(sizes | windows))
    after = as_lists(decide(asked.for_lookahead(n, ahead), layers))
    assert after == as_lists(decide(wanted, layers))
    assert after != as_lists(decide(asked, layers))


@pytest.mark.parametrize("ahead", [1, 3, 20])
def test_tova_after_a_lookahead(ahead):
    """All queries of the answer score, in the mean."""
    n, layers = N - ahead, model_inputs(0, LAYERS, 3, 2, N, 8, ahead)
    kept = as_lists(decide(EvictionConfig("tova", budget=30).for_lookahead(n, ahead), layers))
    for x, heads in zip(layers, kept, strict=True):
        logits = x.q_window.double() @ x.keys.double().repeat_interleave(2, 0).transpose(1, 2) / 8**0.5
        later = torch.ones(ahead, N, dtype=torch.bool).triu(1 + n)
        paid = logits.masked_fill(later, -torch.inf).softmax(-1)[:, :, :n].mean((0, 1))
        best = sorted(paid.topk(30).indices.tolist())
        assert heads == [[*best, *range(n, N)]] * 3


@pytest.mark.parametrize("policy", SCORED)
def test_nan_scores_are_the_lowest(policy):
    m = N - config(policy).window_for(N)
    scores = torch.rand(LAYERS, 2, m)
    scores[:, :, :20] = torch.nan
    layers = [LayerScores(i, LAYERS, 2, x, weight=1.0, second=x) for i, x in enumerate(scores)]
    kept = select(config(policy, **({"sinks": 0} if "sinks" in parameters(policy) else {})), layers, N)
    assert sum(len(head) for layer in kept for head in layer) == LAYERS * 60
    assert all(int(head[0]) >= 20 for layer in kept for head in layer)


@pytest.mark.parametrize("policy", SCORED)
def test_nan_inputs_leave_the_budgets_alone(policy):
    nan = [
        dataclasses.replace(
            x, keys=torch.full_like(x.keys, torch.nan), repeated=torch.full((3, N), torch.nan)
        )
        for x in inputs(0)
    ]
    kept = decide(config(policy, **({"beta": 1} if "beta" in parameters(policy) else {})), nan)
    assert [[len(head) for head in layer] for layer in kept] == [[30] * 3] * LAYERS


def test_one_layer_of_nan_gets_nothing_beyond_its_window():
    layers = inputs(0)
    layers[1] = LayerInputs(layers[1].q_window, layers[1].keys * torch.nan, layers[1].values)
    for policy in reference_select.DYNAMIC:
        kept = decide(config(policy), layers)
        assert [len(head) for head in kept[1]] == [WINDOW] * 3
        assert sum(len(head) for layer in kept for head in layer) == LAYERS * 3 * 30
