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


def test_what_the_caller_must_provide():
    queries = {
        p: EvictionConfig(p, **({} if p == "full" else {"keep_ratio": 0.2})).needs_queries
        for p in available()
    }
    assert (
        not queries["full"] and not queries["streaming-llm"] and queries["snapkv"] and queries["ada-pyramid"]
    )
    assert EvictionConfig("pyramidkv", keep_ratio=0.2).layer_local


@pytest.mark.parametrize("policy", available())
def test_round_trips(policy):
    cfg = EvictionConfig(policy) if policy == "full" else EvictionConfig(policy, keep_ratio=0.3)
    assert cfg.params == parameters(policy)
    assert EvictionConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg
    assert pickle.loads(pickle.dumps(cfg)) == cfg
    assert eval(repr(cfg)) == cfg
    assert len({cfg, EvictionConfig.from_dict(cfg.to_dict())}) == 1
    with pytest.raises(AttributeError):
        cfg.budget = 3


def test_equal_settings_are_equal_however_written():
    assert EvictionConfig("ada-snapkv", budget=64.0, alpha=0, window=8.0) == EvictionConfig(
        "ada-snapkv", budget=64, alpha=0.0, window=8
    )
    assert EvictionConfig("snapkv", budget=64) != EvictionConfig("snapkv", budget=65)
    assert EvictionConfig("snapkv", budget=64, pooling="avg").params["kernel"] == 7


NAN = float("nan")


@pytest.mark.parametrize(
    ("policy", "settings", "words"),
    [
        ("snap", {"budget": 64}, ["policy", "'snap'", *available()]),
        (None, {"budget": 64}, ["policy", "None"]),
        ("snapkv", {}, ["budget", "keep_ratio", "exactly one"]),
        ("snapkv", {"budget": 64, "keep_ratio": 0.5}, ["budget", "keep_ratio", "exactly one"]),
        ("full", {"budget": 64}, ["full", "budget"]),
        ("full", {"keep_ratio": 0.5}, ["full", "keep_ratio"]),
        (
            "snapkv",
            {"window": 8, "budget": 64, "colour": 1},
            ["colour", "snapkv", "window, kernel, pooling, gqa"],
        ),
        ("snapkv", {"budget": 64, "sinks": 4}, ["sinks does not apply", "snapkv", "window, kernel"]),
        ("streaming-llm", {"budget": 64, "window": 4}, ["window does not apply", "streaming-llm", "sinks"]),
        ("full", {"window": 4}, ["window does not apply", "full", "none"]),
        ("snapkv", {"budget": 32}, ["budget=32", "window=32"]),
        ("snapkv", {"budget": 8, "window": 9}, ["budget=8", "window=9"]),
        ("streaming-llm", {"budget": 4}, ["budget=4", "sinks=4"]),
        *[
            ("snapkv", {"budget": x}, ["budget", repr(x)])
            for x in (0, -1, 2.5, NAN, float("inf"), True, "64", [64])
        ],
        *[("snapkv", {"keep_ratio": x}, ["keep_ratio", repr(x)]) for x in (0, -0.1, 1.1, NAN, True, "0.2")],
        *[("snapkv", {"window": x}, ["window", ">= 1", repr(x)]) for x in (0, -1, 1.5, True, "8", None, NAN)],
        *[("snapkv", {"kernel": x}, ["kernel", "odd", repr(x)]) for x in (0, 4, -3, 2.5, True, "5")],
        *[("snapkv", {"pooling": x}, ["pooling", "max, avg, none", repr(x)]) for x in ("min", "", None, 1)],
        *[("snapkv", {"gqa": x}, ["gqa", "mean, max", repr(x)]) for x in ("sum", True)],
        *[("streaming-llm", {"sinks": x}, ["sinks", ">= 0", repr(x)]) for x in (-1, 0.5, False, "4")],
        *[("pyramidkv", {"beta": x}, ["beta", ">= 1", repr(x)]) for x in (0, 0.5, 1.5, -20, True, NAN)],
        ("pyramidkv", {"pyramid_rounding": "floor"}, ["pyramid_rounding", "exact, official", "'floor'"]),
        *[
            ("ada-snapkv", {"alpha": x}, ["alpha", "[0, 1]", repr(x)])
            for x in (-0.1, 1.01, NAN, True, "0.2", None)
        ],
        ("ada-pyramid", {"ada_safeguard": "on"}, ["ada_safeguard", "interp, paper, guarantee", "'on'"]),
    ],
)
def test_errors_name_the_parameter(policy, settings, words):
    if policy != "full" and words[0] in parameters("ada-pyramid") | parameters("streaming-llm"):
        settings = {"keep_ratio": 0.5, **settings}
    with pytest.raises(ValueError) as caught:
        EvictionConfig(policy, **settings)
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message


def test_from_dict_without_policy():
    with pytest.raises(ValueError, match="policy is missing"):
        EvictionConfig.from_dict({"budget": 64})


def test_parameters_are_those_of_the_policy():
    assert parameters("full") == {}
    assert parameters("streaming-llm") == {"sinks": 4}
    assert parameters("ada-pyramid") == {
        "window": 32,
        "kernel": 7,
        "pooling": "max",
        "gqa": "mean",
        "beta": 20,
        "pyramid_rounding": "exact",
        "alpha": 0.2,
        "ada_safeguard": "interp",
    }
    with pytest.raises(ValueError, match="policy"):
        parameters("nothing")
