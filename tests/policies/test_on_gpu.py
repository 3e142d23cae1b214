"""What decisions do differently on a GPU: scores from means that a kernel computed, and the kernels of selection."""

import dataclasses
import importlib

import pytest
import torch

from tests.interpreting import interpreted
from vllm_kvevict.policies import EvictionConfig, LayerInputs, available, decide, score_layer
from vllm_kvevict.policies.attention import window_rows

SELECT = importlib.import_module("vllm_kvevict.policies.select")  # the package has a function of this name
LAYERS, HEADS, GROUP, TOKENS, DIM = 3, 2, 2, 90, 16
ANGLES = torch.arange(TOKENS)[:, None] * 0.5 ** torch.arange(DIM // 2)
BY_MEAN = [
    policy
    for policy in available()
    if EvictionConfig(policy, **{} if policy == "full" else {"keep_ratio": 0.5}).scores_by_mean
]


def _inputs(seed: int) -> list[LayerInputs]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random)

    return [
        LayerInputs(
            normal(HEADS * GROUP, 32, DIM),
            normal(HEADS, TOKENS, DIM),
            normal(HEADS, TOKENS, DIM),
            w_o=normal(HEADS * GROUP, DIM, 24),
            col_sums=normal(HEADS * GROUP, TOKENS).abs(),
            repeated=normal(HEADS, TOKENS).abs(),
            q_all=normal(HEADS * GROUP, TOKENS, DIM),
            rotary=(ANGLES.cos(), ANGLES.sin()),
        )
        for _ in range(LAYERS)
    ]


def _with_mean(config: EvictionConfig, inputs: LayerInputs) -> LayerInputs:
    window = config.window_for(TOKENS)
    mean = torch.cat([rows[:, :, : TOKENS - window].mean(1) for rows in window_rows(inputs, window)])
    return dataclasses.replace(inputs, q_window=None, keys=inputs.keys.to("meta"), window_mean=mean)


def test_which_policies_score_by_the_mean():
    assert {"snapkv", "ada-snapkv", "pyramidkv", "lava", "tova", "criticalkv"} <= set(BY_MEAN)
    assert not {"full", "streaming-llm", "cake", "h2o", "knorm", "take", "defensivekv", "compactor"} & set(
        BY_MEAN
    )


@pytest.mark.parametrize("policy", BY_MEAN)
def test_the_mean_stands_in_for_queries_and_keys(policy):
    config = EvictionConfig(policy, budget=40)
    inputs = _inputs(1)
    expected = decide(config, inputs)
    found = decide(config, [_with_mean(config, x) for x in inputs])
    for layer, other in zip(expected, found, strict=True):
        for kept, also in zip(layer, other, strict=True):
            assert torch.equal(kept, also)


@pytest.mark.parametrize(
    "mean",
    [torch.zeros(4, 57), torch.zeros(3, 58), torch.zeros(4, 58, dtype=torch.float64), torch.zeros(0, 58)],
    ids=["tokens", "heads", "dtype", "none"],
)
def test_a_mean_of_another_shape(mean):
    inputs = dataclasses.replace(_inputs(0)[0], window_mean=mean)
    with pytest.raises(ValueError, match="window_mean must be fp32"):
        score_layer(EvictionConfig("snapkv", budget=40), inputs, 0, LAYERS)


@pytest.mark.parametrize("policy", [name for name in available() if name != "full"])
def test_kernels_select_the_same(policy, monkeypatch):
    sizes = {"sinks": 4, "window": 32} if policy == "compactor" else {}
    config = EvictionConfig(policy, budget=40, **sizes)
    inputs = _inputs(2)
    expected = decide(config, inputs)
    monkeypatch.setattr(SELECT, "on_gpu", lambda tensor: True)
    with interpreted():
        found = decide(config, inputs)
    for layer, other in zip(expected, found, strict=True):
        for kept, also in zip(layer, other, strict=True):
            assert torch.equal(kept, also)
