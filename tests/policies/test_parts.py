"""A prompt that is evicted part by part: what a part's tokens are worth beside what earlier parts have left."""

import dataclasses
import random

import pytest
import torch

from vllm_kvevict.policies import EvictionConfig, available, score_layer
from vllm_kvevict.policies.registry import lookup, policies_for_parts

from . import reference_select
from .seeds import named
from .test_against_reference import budget_of, check_model, random_config, random_layer

ABLE = [policy for policy in policies_for_parts() if policy != "full"]


def part_of(rng: random.Random, policy: str) -> EvictionConfig:
    """A random configuration for a part of a prompt behind others."""
    while True:
        cfg = random_config(rng, policy)
        if cfg.keep_ratio is not None:
            return cfg


@pytest.mark.parametrize("policy", ABLE)
def test_as_the_reference(policy):
    for seed in range(20):
        rng = random.Random(f"{policy}{seed}")
        n, heads, num_layers = rng.randint(1, 60), rng.choice([1, 2, 3]), rng.randint(1, 2)
        cfg = part_of(rng, policy).for_part(n, 100)
        shape = (
            heads,
            rng.choice([1, 2]),
            rng.choice([4, 6]),
            rng.choice([None, 0.7]),
            rng.choice([None, 2.0]),
        )
        earlier = [tuple(rng.randint(1, 30) for _ in range(heads)) for _ in range(num_layers)]
        with named(seed):
            layers = [random_layer(rng, cfg, n, shape, torch.float32, counts) for counts in earlier]
            check_model(cfg, layers, n, heads)


def test_positions_matter_to_who_undoes_the_rotary_embedding():
    """Of keys; expected-attention, which undoes that of queries, looks at later positions by the same distance."""
    cfg = EvictionConfig("compactor", keep_ratio=0.3).for_part(50, 100)
    inputs, _ = random_layer(random.Random(1), cfg, 50, (2, 2, 64, None, None), torch.float32, (20, 7))
    other = dataclasses.replace(inputs, begins=0)
    assert not torch.allclose(*(score_layer(cfg, x, 0, 1).scores for x in (inputs, other)), rtol=1e-3)


def test_a_part_has_a_smaller_window_and_no_sinks():
    cfg = EvictionConfig("snapkv", keep_ratio=0.25)
    assert [cfg.for_part(n, 0).window_for(n) for n in (3, 16, 256, 512, 4096)] == [1, 1, 16, 32, 32]
    assert [cfg.for_part(n, 0).budget_for(n) for n in (256, 512)] == [64, 128]
    kvzip = EvictionConfig("kvzip", keep_ratio=0.25)
    assert (kvzip.for_part(512, 0).params["sinks"], kvzip.for_part(512, 512).params["sinks"]) == (4, 0)
    assert kvzip.params["sinks"] == 4 and kvzip.for_part(512, 0) == kvzip


def test_who_can():
    assert set(available()) - set(policies_for_parts()) == {"take", "dropkv"}
    assert all(lookup(policy).parts for policy in ABLE)
    assert set(reference_select.RULES) > set(ABLE)
    assert budget_of(EvictionConfig("snapkv", keep_ratio=0.5).for_part(10, 90), 10) == 5
