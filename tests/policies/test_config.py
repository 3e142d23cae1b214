"""EvictionConfig: budgets, rounding, round trips and errors that name the parameter."""

import json
import pickle

import pytest

from vllm_kvevict.policies import EvictionConfig, available, parameters


@pytest.mark.parametrize(
    ("n", "ratio", "budget"),
    [
        (150, 0.2, 30),
        (150, 1 - 0.8, 30),
        (100, 0.29, 29),
        (1, 0.2, 1),
        (4, 0.2, 1),
        (9, 0.1, 1),
        (99, 0.2, 19),
        (10, 1.0, 10),
        (10, 1, 10),
    ],
)
def test_ratio_rounding(n, ratio, budget):
    assert EvictionConfig("snapkv", keep_ratio=ratio).budget_for(n) == budget


def test_budget_window_and_no_op():
    cfg = EvictionConfig("snapkv", budget=100)
    assert [cfg.budget_for(n) for n in (1, 99, 100, 101)] == [1, 99, 100, 100]
    assert [cfg.evicts(n) for n in (1, 99, 100, 101)] == [False, False, False, True]
    assert [cfg.window_for(n) for n in (1, 31, 32, 500)] == [1, 31, 32, 32]
    ratio = EvictionConfig("snapkv", keep_ratio=0.2)
    assert [ratio.window_for(n) for n in (5, 50, 160, 165, 500)] == [1, 5, 16, 32, 32]
    assert not EvictionConfig("full").evicts(10**6)
    assert not EvictionConfig("snapkv", keep_ratio=1.0).evicts(777)
    assert EvictionConfig("streaming-llm", budget=100).window_for(500) == 0


def unused_by_default(policy: str) -> set[str]:
    """Without a window nothing is pooled, and fading has no width."""
    if policy == "kvzip":
        return {"kernel", "pooling"}
    return {"kernel"} if parameters(policy).get("pooling") == "decay" else set()


@pytest.mark.parametrize("policy", available())
def test_round_trips(policy):
    cfg = EvictionConfig(policy) if policy == "full" else EvictionConfig(policy, keep_ratio=0.3)
    assert parameters(policy).keys() - cfg.params.keys() == unused_by_default(policy)
    assert parameters(policy) | cfg.params == parameters(policy)
    assert EvictionConfig(**json.loads(json.dumps(cfg.to_dict()))) == cfg
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    assert eval(repr(cfg)) == cfg
    assert len({cfg, EvictionConfig(**cfg.to_dict())}) == 1
    with pytest.raises(AttributeError):
        cfg.budget = 3


def test_equal_settings_are_equal_however_written():
    assert EvictionConfig("ada-snapkv", budget=64.0, alpha=0, window=8.0) == EvictionConfig(
        "ada-snapkv", budget=64, alpha=0.0, window=8
    )
    assert EvictionConfig("snapkv", budget=64) != EvictionConfig("snapkv", budget=65)
    assert EvictionConfig("snapkv", budget=64, pooling="avg").params["kernel"] == 7


def test_a_parameter_without_use_is_none_of_the_configurations():
    decay, paper = (EvictionConfig("ada-snapkv", budget=64, defaults=x) for x in ("measured", "paper"))
    assert "kernel" not in decay.params and "kernel" not in decay.to_dict()
    assert EvictionConfig(**decay.to_dict()) == decay == eval(repr(decay))
    assert decay == EvictionConfig("ada-snapkv", budget=64, pooling="decay") != paper
    without, small = (EvictionConfig("kvzip", budget=64, window=window) for window in (0, 8))
    assert without.params == {"kvzip_chunk": 512, "kvzip_sees": "all", "sinks": 4, "window": 0}
    assert small.params["pooling"] == "decay" and "kernel" not in small.params
    assert EvictionConfig(**without.to_dict()) == without != small


NAN = float("nan")
WRONG_VALUES = {
    "budget": ("snapkv", "budget", (0, -1, 2.5, NAN, float("inf"), True, "64", [64])),
    "keep_ratio": ("snapkv", "keep_ratio", (0, -0.1, 1.1, NAN, True, "0.2")),
    "window": ("snapkv", ">= 1", (0, -1, 1.5, True, "8", None, NAN)),
    "kernel": ("snapkv", "odd", (0, 4, -3, 2.5, True, "5")),
    "pooling": ("snapkv", "max, avg, none, decay", ("min", "", None, 1)),
    "sinks": ("streaming-llm", ">= 0", (-1, 0.5, False, "4")),
    "alpha": ("ada-snapkv", "[0, 1]", (-0.1, 1.01, NAN, True, "0.2", None)),
    "gamma": ("cake", "gamma", (-1, NAN, "1", None)),
    "tau1": ("cake", "tau1", (0, -1, NAN, float("inf"), "1")),
    "take_warmup_layers": ("take", "auto or an integer >= 0", (-1, "a")),
}
"""By parameter, one of each kind: a policy that has it, what its error says, and values that it does not take."""
BUDGETS = ("budget", "keep_ratio")


@pytest.mark.parametrize(
    ("policy", "settings", "words"),
    [
        ("snap", {"budget": 64}, ["policy", "'snap'", *available()]),
        (None, {"budget": 64}, ["policy", "None"]),
        ("snapkv", {}, ["budget", "keep_ratio", "exactly one"]),
        ("snapkv", {"budget": 64, "keep_ratio": 0.5}, ["budget", "keep_ratio", "exactly one"]),
        ("full", {"budget": 64}, ["full", "budget"]),
        ("full", {"window": 4}, ["window does not apply", "full", "none"]),
        ("snapkv", {"budget": 64, "colour": 1}, ["colour", "snapkv", "window, kernel, pooling, gqa"]),
        ("lava", {"budget": 99, "rows": "max"}, ["rows does not apply", "lava"]),
        ("snapkv", {"budget": 32}, ["budget=32", "window=32"]),
        ("streaming-llm", {"budget": 4}, ["budget=4", "sinks=4"]),
        ("vatp-snapkv", {"budget": 36, "sinks": 4}, ["budget=36", "window=32", "sinks=4"]),
        ("tova", {"budget": 1}, ["budget", "1"]),
        ("take", {"budget": 32}, ["budget=32", "take_probe=32"]),
        ("take", {"budget": 64, "take_chunk": 16}, ["take_probe", "take_chunk", "32", "16"]),
        ("lava", {"budget": 99, "pooling": "decay", "kernel": 7}, ["kernel is not used with pooling=decay"]),
        ("kvzip", {"budget": 64, "kernel": 5}, ["kernel is not used with window=0"]),
        ("kvzip", {"budget": 64, "pooling": "avg"}, ["pooling is not used with window=0"]),
        ("kvzip", {"keep_ratio": 0.2, "sinks": 0, "window": 0}, ["sinks and window"]),
        ("compactor", {"budget": 80, "sinks": 0, "window": 0}, ["every KV head must keep a token"]),
        *[
            (
                policy,
                {name: value, **({} if name in BUDGETS else {"keep_ratio": 0.5})},
                [name, word, repr(value)],
            )
            for name, (policy, word, values) in WRONG_VALUES.items()
            for value in values
        ],
    ],
)
def test_errors_name_the_parameter(policy, settings, words):
    with pytest.raises(ValueError) as caught:
        EvictionConfig(policy, **settings)
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message
