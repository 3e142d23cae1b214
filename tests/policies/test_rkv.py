"""rkv: redundancy against a float64 reference that makes the whole matrix, and what the policy is for."""

import json
import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_kvevict.policies import (
    EvictionConfig,
    LayerInputs,
    available,
    decide,
    needs,
    parameters,
    rkv,
    score_layer,
)
from vllm_kvevict.policies.registry import lookup

from . import reference_rows
from .reference_scores import Tensors
from .seeds import named


def keys_with_copies(rng: random.Random, n: int, size: int = 8) -> torch.Tensor:
    """Keys [n, size] of which many say what another one says, and some of them exactly."""
    g = torch.Generator().manual_seed(rng.randrange(2**30))
    kinds = torch.randn(rng.choice([1, 3, n]), size, generator=g)
    noise = torch.randn(n, size, generator=g) * rng.choice([0.0, 0.3, 1.0])
    return (
        kinds[torch.randint(0, len(kinds), (n,), generator=g)] * (1 + torch.rand(n, 1, generator=g)) + noise
    )


def far_from(threshold: float, keys: torch.Tensor) -> bool:
    """Whether no cosine is so near the threshold that rounding decides."""
    unit = torch.nn.functional.normalize(keys.double(), dim=1)
    return bool(((unit @ unit.T - threshold).abs() > 1e-5).all())


def check_redundancy(keys: torch.Tensor, threshold: float) -> None:
    mean = reference_rows.similarities(keys.double().numpy(), threshold).mean(0)
    wanted = np.exp(mean - mean.max()) / np.exp(mean - mean.max()).sum()
    np.testing.assert_allclose(rkv.redundancy(keys, threshold).numpy(), wanted, rtol=2e-6)


CASES = [(n, threshold) for n in (1, 2, 9, 60, 127, 128, 129, 200) for threshold in (0.0, 0.5, 0.9)]


def run_all() -> None:
    for seed, (n, threshold) in enumerate(CASES):
        with named(seed):
            keys = keys_with_copies(random.Random(seed), n)
            if far_from(threshold, keys):
                check_redundancy(keys, threshold)
    check_redundancy(
        torch.eye(100)[[*range(100), *range(100)]].contiguous(), 0.5
    )  # copies that are far apart


def test_redundancy_is_that_of_the_whole_matrix():
    run_all()


def test_a_key_like_no_other_and_exact_copies():
    """Of three copies among keys at right angles only the newest looks redundant to nobody."""
    keys = torch.eye(8)[[0, 1, 0, 2, 0, 3]].contiguous()
    assert rkv.newest_alike(keys, 0.5).tolist() == [4, 0, 4, 0, 2, 0]
    check_redundancy(keys, 0.5)
    found = rkv.redundancy(keys, 0.5)
    # Columns of C: the oldest copy has what both others say, the middle one what the oldest says, the newest nothing.
    assert found[0] > found[2] > found[4] == found[1] == found[5]
    alone = torch.eye(8)[:5].contiguous()
    assert rkv.newest_alike(alone, 0.5).tolist() == [0] * 5
    assert torch.allclose(rkv.redundancy(alone, 0.5), torch.full((5,), 0.2))


def oldest_alike(unit: torch.Tensor, threshold: float) -> torch.Tensor:
    cosines = (unit @ unit.T).fill_diagonal_(-1) > threshold
    return cosines.int().argmax(1)


def one_block(unit: torch.Tensor, threshold: float) -> torch.Tensor:
    """What is alike among the newest 128 only."""
    found = NEWEST(unit, threshold)
    return torch.where(found >= len(unit) - 128, found, 0)


def itself(unit: torch.Tensor, threshold: float) -> torch.Tensor:
    """Nothing is zeroed but the diagonal."""
    return torch.arange(len(unit))


def newest_where_none_is_alike(unit: torch.Tensor, threshold: float) -> torch.Tensor:
    found = NEWEST(unit, threshold)
    return found.where(found > 0, len(unit) - 1)


NEWEST = rkv.newest_alike


@pytest.mark.parametrize("wrong", [oldest_alike, one_block, itself, newest_where_none_is_alike])
def test_wrong_neighbours_are_seen(wrong, monkeypatch):
    monkeypatch.setattr(rkv, "newest_alike", wrong)
    with pytest.raises(AssertionError):
        run_all()


def layer(n: int, seed: int = 0, heads: int = 2) -> LayerInputs:
    rng = random.Random(seed)
    keys = torch.stack([keys_with_copies(rng, n) for _ in range(heads)])
    return LayerInputs(torch.randn(2 * heads, 8, 8, generator=torch.Generator().manual_seed(seed)), keys)


def check_layer(x: LayerInputs, **params) -> None:
    cfg = EvictionConfig("rkv", budget=params.pop("budget", 9), **params)
    slow = reference_rows.rkv(
        Tensors(x.keys.double().numpy(), x.q_window.double().numpy()), cfg.params["window"], 0, cfg.params
    )
    np.testing.assert_allclose(score_layer(cfg, x, 0, 1).scores.numpy(), slow.scores, rtol=2e-5, atol=2e-7)


MIXES = [{"mix": mix, "window": window} for mix in (0.0, 0.1, 1.0) for window in (1, 8)]


@pytest.mark.parametrize("n", [10, 11, 16, 70])
def test_scores_also_just_above_the_window(n):
    for params in MIXES:
        check_layer(layer(n, n), **params)


def test_mix_goes_from_redundancy_to_attention():
    x = layer(60)
    one, none = (score_layer(EvictionConfig("rkv", budget=20, mix=mix), x, 0, 1).scores for mix in (1.0, 0.0))
    assert float(one.min()) >= 0 and float(none.max()) < 0
    assert torch.equal(none[0], -rkv.redundancy(x.keys[0], 0.5)[:52])
    doubled = LayerInputs(x.q_window * 2, x.keys)
    again = [
        score_layer(EvictionConfig("rkv", budget=20, mix=mix), doubled, 0, 1).scores for mix in (1.0, 0.0)
    ]
    assert not torch.equal(again[0], one) and torch.equal(again[1], none)


@pytest.mark.parametrize("wrong", ["sign", "short softmax", "no pooling"])
def test_wrong_scores_are_seen(wrong, monkeypatch):
    right = rkv.redundancy
    if wrong == "sign":
        monkeypatch.setattr(rkv, "redundancy", lambda keys, threshold: -right(keys, threshold))
    elif wrong == "short softmax":  # over the candidates alone
        short = lambda keys, threshold: right(keys, threshold) / right(keys, threshold)[:-8].sum()  # noqa: E731
        monkeypatch.setattr(rkv, "redundancy", short)
    else:
        monkeypatch.setattr(rkv, "pool", lambda scores, how, kernel: scores)
    with pytest.raises(AssertionError):
        check_layer(layer(40), mix=0.1)


def test_keys_of_any_size_and_none():
    """Zero keys are like nothing; lengths of keys play no part."""
    keys = torch.zeros(1, 30, 8)
    assert torch.allclose(rkv.redundancy(keys[0], 0.5), torch.full((30,), 1 / 30))
    x = layer(50)
    scaled = rkv.redundancy(x.keys[0] * 2.0**40, 0.5)
    assert torch.allclose(scaled, rkv.redundancy(x.keys[0], 0.5), rtol=1e-5)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, function, types, arguments=(), others=None):
        made = function(*arguments, **(others or {}))
        for x in made if isinstance(made, (list, tuple)) else [made]:
            self.size = max(self.size, x.numel() if isinstance(x, torch.Tensor) else 0)
        return made


def test_memory_is_a_block_of_the_matrix():
    n = 2000
    keys = torch.randn(n, 8, generator=torch.Generator().manual_seed(0))
    for threshold in (0.5, 1.0):
        with Largest() as seen:
            rkv.redundancy(keys, threshold)
        assert n * 128 <= seen.size < n * 160
    with Largest() as seen:
        keys @ keys.T
    assert seen.size == n * n


def test_it_is_for_answers_only():
    assert "rkv" not in available() and not lookup("rkv").prompts and lookup("rkv").decodes
    assert all(lookup(name).prompts for name in available())
    assert (
        parameters("rkv")
        == {"window": 8, "kernel": 7, "mix": 0.1, "threshold": 0.5}
        == parameters("rkv", "paper")
    )
    assert needs("rkv") == {"q_window"}
    cfg = EvictionConfig("rkv", budget=20, mix=0.3)
    assert EvictionConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg
    kept = decide(cfg, [layer(60), layer(60, 1)])
    assert [[len(head) for head in one] for one in kept] == [[20, 20]] * 2


@pytest.mark.parametrize(
    ("policy", "params", "words"),
    [
        ("rkv", {"mix": 1.5}, "mix must be a number in [0, 1], not 1.5"),
        ("rkv", {"kernel": 4}, "kernel must be an odd integer >= 1, not 4"),
        ("rkv", {"alpha": 0.2}, "alpha does not apply to policy rkv"),
        ("snapkv", {"mix": 0.1}, "mix does not apply to policy snapkv"),
        ("rkv", {"window": 20}, "budget must exceed window"),
    ],
)
def test_wrong_parameters_are_named(policy, params, words):
    with pytest.raises(ValueError) as caught:
        EvictionConfig(policy, budget=20, **params)
    assert words in str(caught.value)
