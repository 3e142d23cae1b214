"""What decisions do differently on a GPU: scores from what a kernel computed, and the kernels of selection."""

import dataclasses
import importlib

import pytest
import torch

from tests.interpreting import interpreted
from tests.policies.layers import model_inputs
from vllm_kvevict.policies import EvictionConfig, LayerInputs, available, decide, parameters
from vllm_kvevict.policies.attention import combine_rows, window_rows
from vllm_kvevict.policies.params import COMBINED_ROWS

SELECT = importlib.import_module("vllm_kvevict.policies.select")  # the package has a function of this name
LAYERS, HEADS, GROUP, TOKENS, DIM = 3, 2, 2, 90, 16
BY_MEAN = [
    policy
    for policy in available()
    if EvictionConfig(
        policy, defaults="paper", **{} if policy == "full" else {"keep_ratio": 0.5}
    ).combines_rows_by
    == "mean"
]


def _inputs(seed: int) -> list[LayerInputs]:
    return model_inputs(seed, LAYERS, HEADS, GROUP, TOKENS, DIM, window=32)


def _received(config: EvictionConfig, inputs: LayerInputs) -> dict[str, torch.Tensor]:
    """All ways to combine the window's rows, by field."""
    window = config.window_for(TOKENS)
    past = torch.cat([rows[:, :, : TOKENS - window].clone() for rows in window_rows(inputs, window)])
    return {f"window_{how}": combine_rows(past.clone(), how) for how in COMBINED_ROWS}


def _with(inputs: LayerInputs, **received: torch.Tensor) -> LayerInputs:
    """Without queries, and with keys that have a shape alone."""
    return dataclasses.replace(inputs, q_window=None, keys=inputs.keys.to("meta"), **received)


def _equal(expected, found) -> bool:
    pairs = [pair for layers in zip(expected, found, strict=True) for pair in zip(*layers, strict=True)]
    return all(torch.equal(kept, also) for kept, also in pairs)


@pytest.mark.parametrize("policy", BY_MEAN)
def test_the_mean_stands_in_for_queries_and_keys(policy):
    config = EvictionConfig(policy, budget=40, defaults="paper")
    inputs = _inputs(1)
    expected = decide(config, inputs)
    means = [_received(config, x)["window_mean"] for x in inputs]
    assert _equal(
        expected, decide(config, [_with(x, window_mean=y) for x, y in zip(inputs, means, strict=True)])
    )


@pytest.mark.parametrize("policy", [policy for policy in BY_MEAN if "rows" in parameters(policy)])
@pytest.mark.parametrize("how", ["max", "recent"])
def test_the_mean_does_not_stand_in_for_a_maximum(policy, how):
    config, other = (EvictionConfig(policy, budget=40, rows=rows) for rows in (how, "mean"))
    assert (config.combines_rows_by, other.combines_rows_by) == (how, "mean")
    inputs = _inputs(1)
    expected = decide(config, inputs)
    given = [_received(config, x) for x in inputs]
    # All are there: each configuration takes its own.
    assert _equal(expected, decide(config, [_with(x, **y) for x, y in zip(inputs, given, strict=True)]))
    assert not _equal(expected, decide(other, [_with(x, **y) for x, y in zip(inputs, given, strict=True)]))
    # The mean alone: queries are read, or asked for.
    means = [y["window_mean"] for y in given]
    both = [dataclasses.replace(x, window_mean=y) for x, y in zip(inputs, means, strict=True)]
    assert _equal(expected, decide(config, both))
    with pytest.raises(ValueError, match="q_window is required"):
        decide(config, [_with(x, window_mean=y) for x, y in zip(inputs, means, strict=True)])


@pytest.mark.long
@pytest.mark.parametrize("policy", [name for name in available() if name != "full"])
def test_kernels_select_the_same(policy, monkeypatch):
    sizes = {"sinks": 4, "window": 32} if policy == "compactor" else {}
    config = EvictionConfig(policy, budget=40, **sizes)
    inputs = _inputs(2)
    expected = decide(config, inputs)
    monkeypatch.setattr(SELECT, "on_gpu", lambda tensor: True)
    with interpreted():
        found = decide(config, inputs)
    assert _equal(expected, found)
