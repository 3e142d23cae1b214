"""What decisions do differently on a GPU: scores from what a kernel computed, and the kernels of selection."""

import dataclasses
import importlib

import pytest
import torch

from tests.interpreting import interpreted
from vllm_kvevict.policies import EvictionConfig, LayerInputs, available, decide, parameters, score_layer
from vllm_kvevict.policies.attention import combine_rows, window_rows
from vllm_kvevict.policies.params import COMBINED_ROWS

SELECT = importlib.import_module("vllm_kvevict.policies.select")  # the package has a function of this name
LAYERS, HEADS, GROUP, TOKENS, DIM = 3, 2, 2, 90, 16
ANGLES = torch.arange(TOKENS)[:, None] * 0.5 ** torch.arange(DIM // 2)
BY_MEAN = [
    policy
    for policy in available()
    if EvictionConfig(
        policy, defaults="paper", **{} if policy == "full" else {"keep_ratio": 0.5}
    ).combines_rows_by
    == "mean"
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


def test_which_policies_score_by_the_mean_with_the_papers_parameters():
    assert {"snapkv", "ada-snapkv", "pyramidkv", "lava", "tova", "criticalkv"} <= set(BY_MEAN)
    assert not {"full", "streaming-llm", "cake", "h2o", "knorm", "take", "defensivekv", "compactor"} & set(
        BY_MEAN
    )


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


def test_the_maximum_stands_in_for_queries_and_keys_of_kvzip():
    without, config = (EvictionConfig("kvzip", budget=40, window=window) for window in (0, 32))
    assert without.combines_rows_by is None and config.combines_rows_by == "max"
    inputs = [dataclasses.replace(x, repeated=x.repeated / 100) for x in _inputs(1)]
    expected = decide(config, inputs)
    given = [_received(config, x) for x in inputs]
    most = [_with(x, window_max=y["window_max"]) for x, y in zip(inputs, given, strict=True)]
    assert _equal(expected, decide(config, most))
    assert not _equal(
        expected, decide(config, [dataclasses.replace(x, window_max=x.window_max.flip(1)) for x in most])
    )


@pytest.mark.parametrize("name", ["window_mean", "window_max", "window_recent"])
@pytest.mark.parametrize(
    "received",
    [torch.zeros(4, 57), torch.zeros(3, 58), torch.zeros(4, 58, dtype=torch.float64), torch.zeros(0, 58)],
    ids=["tokens", "heads", "dtype", "none"],
)
def test_what_is_received_in_another_shape(received, name):
    inputs = dataclasses.replace(_inputs(0)[0], **{name: received})
    with pytest.raises(ValueError, match=f"{name} must be fp32"):
        score_layer(EvictionConfig("snapkv", budget=40, rows=name.removeprefix("window_")), inputs, 0, LAYERS)


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
    for layer, other in zip(expected, found, strict=True):
        for kept, also in zip(layer, other, strict=True):
            assert torch.equal(kept, also)
