"""rkv: redundancy against a float64 reference that makes the whole matrix; test_rows.py compares its scores."""

import random

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_kvevict.policies import rkv

from . import reference_rows
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
