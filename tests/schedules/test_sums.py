"""What a prompt adds up to does not depend, in a single bit, on the steps in which it is read."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from vllm_kvevict.policies import EvictionConfig, LayerInputs, Rotary
from vllm_kvevict.policies.inputs import COL_SUMS, Q_WINDOW, QUERY_MOMENTS, REPEATED, TILE_SUMS, VALUES, Input
from vllm_kvevict.policies.sinks import num_sinks
from vllm_kvevict.policies.tiles import TILE, query_moments, tile_sums
from vllm_kvevict.schedules.inputs import (
    UNFINISHED,
    HeadDims,
    LayerStep,
    LayerTokens,
    Sources,
    add_up,
    lay_out,
    shapes,
    size,
)

LAYERS, HEADS, KV_HEADS, DIM = 2, 6, 3, 10
DIMS = HeadDims(DIM, HEADS // KV_HEADS)
NEEDS = (TILE_SUMS, QUERY_MOMENTS)


def prompt(n: int) -> tuple[Tensor, Tensor, Rotary]:
    """Queries [n, Hq, d] of the layers, keys [layers, Hkv, n, d]."""
    g = torch.Generator().manual_seed(n)
    angles = torch.arange(n)[:, None] * 0.7 ** torch.arange(DIM // 2)
    queries = torch.randn(LAYERS, n, HEADS, DIM, generator=g)
    return queries, torch.randn(LAYERS, KV_HEADS, n, DIM, generator=g), Rotary(angles.cos(), angles.sin())


class Keys:
    """What is read of a cache: the keys of its layers."""

    def __init__(self, keys: Tensor):
        self.keys = keys

    def read(self, name: str, slot: int, layer: int, stop: int, first: int = 0) -> Tensor:
        return self.keys[layer, :, first:stop]


def read(n: int, cuts: list[int], sinks: int) -> dict[Input, Tensor]:
    """The sums of a prompt that is read up to each of the cuts in turn, in memory that others have used."""
    queries, keys, rotary = prompt(n)
    place = torch.full((size(NEEDS, n, DIMS) + 5, LAYERS * HEADS), torch.nan)
    sums = lay_out(NEEDS, n, place, LAYERS, HEADS, KV_HEADS, DIM)
    sources = Sources(Keys(keys), lambda layer: keys, lambda: rotary)
    config = EvictionConfig("expected-attention", budget=250, sinks=sinks)
    for start, stop in itertools.pairwise([0, *cuts, n]):
        for layer in range(LAYERS):
            step = LayerStep(layer, queries[layer, start:stop], 1.0, 0.0)
            tokens = LayerTokens(config, n, 0, None, step, start, step.query.transpose(0, 1))
            add_up(sources, tokens, of(layer, sums))
    assert bool(place[-5:].isnan().all()), "written behind its place"
    return sums


def of(layer: int, sums: dict[Input, Tensor]) -> dict[Input, Tensor]:
    return {what: x[layer] for what, x in sums.items()}


@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 256, 300, 700])
def test_steps_do_not_matter(n: int) -> None:
    queries, keys, rotary = prompt(n)
    for seed in range(8):
        chooser = random.Random(f"{n} {seed}")
        cuts = sorted(chooser.sample(range(1, n), min(n - 1, chooser.choice([0, 1, 3, 20, 200]))))
        sinks = chooser.choice([0, 4, 127, 128, 200]) if n > 200 else 0
        sums = read(n, cuts, sinks)
        for layer in range(LAYERS):
            every = queries[layer].transpose(0, 1).contiguous()
            inputs = LayerInputs(None, keys[layer], q_all=every, rotary=rotary)
            found = of(layer, sums)
            assert torch.equal(found[TILE_SUMS], tile_sums(inputs)), cuts
            assert torch.equal(found[QUERY_MOMENTS], query_moments(inputs, sinks)), cuts
            assert (found[QUERY_MOMENTS][:, 0, 0] == n - sinks).all()


def test_what_is_held() -> None:
    assert shapes((Q_WINDOW, VALUES), 500, DIM) == {}
    assert shapes((COL_SUMS,), 500, DIM) == {COL_SUMS: (500,)}
    assert shapes(NEEDS, 500, DIM) == {
        TILE_SUMS: (500,),
        QUERY_MOMENTS: (DIM + 1, DIM + 1),
        UNFINISHED: (TILE, DIM),
    }
    assert size(NEEDS, 500, DIMS) == 500 + (DIM + 1) ** 2 + TILE * DIM


@pytest.mark.parametrize("n", [1, 2, 501])
def test_what_repeats_say_has_a_number_for_each_kv_head(n: int) -> None:
    """They fill the place that the query heads of a KV head have together, rounded up."""
    numbers = size((REPEATED,), n, DIMS)
    assert numbers == -(-n // 2)
    place = torch.full((numbers + 5, LAYERS * HEADS), torch.nan)
    sums = lay_out((REPEATED,), n, place, LAYERS, HEADS, KV_HEADS, DIM)
    assert sums[REPEATED].shape == (LAYERS, KV_HEADS, n)
    assert not sums[REPEATED].any() and bool(place[-5:].isnan().all())


def test_sinks_that_a_ratio_has_no_room_for() -> None:
    config = EvictionConfig("expected-attention", keep_ratio=0.01)
    assert [num_sinks(config, n) for n in (2, 100, 300, 500)] == [1, 1, 3, 4]
