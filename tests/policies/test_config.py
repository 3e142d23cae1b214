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
        (99, 0.2, 19),
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


def test_window_and_sinks_of_small_ratios():
    for policy in ("h2o", "knorm", "keydiff", "kvzip"):
        cfg = EvictionConfig(policy, keep_ratio=0.2, window=0)
        assert [cfg.window_for(n) for n in (1, 5, 500)] == [0, 0, 0]
    for cfg in (EvictionConfig("tova", keep_ratio=0.2), EvictionConfig("tova", budget=2)):
        assert [cfg.window_for(n) for n in (1, 4, 9, 500)] == [1, 1, 1, 1]
    for n in (1, 5, 500):
        assert EvictionConfig("expected-attention", keep_ratio=0.2).window_for(n) == 0
    cfg = EvictionConfig("compactor", keep_ratio=0.2)
    assert [cfg.window_for(n) for n in (5, 50, 320, 325)] == [1, 5, 32, 64]
    cfg = EvictionConfig("vatp-snapkv", keep_ratio=0.2, sinks=4)
    assert [cfg.window_for(n) for n in (5, 50, 160, 165)] == [1, 5, 16, 32]


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


def test_a_parameter_without_use_is_none_of_the_configurations():
    decay, paper = (EvictionConfig("ada-snapkv", budget=64, defaults=x) for x in ("measured", "paper"))
    assert "kernel" not in decay.params and "kernel" not in decay.to_dict()
    assert EvictionConfig.from_dict(decay.to_dict()) == decay == eval(repr(decay))
    assert decay == EvictionConfig("ada-snapkv", budget=64, pooling="decay") != paper
    without, small = (EvictionConfig("kvzip", budget=64, window=window) for window in (0, 8))
    assert without.params == {"kvzip_chunk": 512, "kvzip_sees": "all", "sinks": 4, "window": 0}
    assert small.params["pooling"] == "decay" and "kernel" not in small.params
    assert EvictionConfig.from_dict(without.to_dict()) == without != small


NAN = float("nan")
WITHOUT_ROWS = (
    "cake",
    "take",
    "tova",
    "lava",
    "lava-uniform",
    "lava-pyramid",
    "lava-uniform-head",
    "defensivekv",
)


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
        *[
            ("snapkv", {"pooling": x}, ["pooling", "max, avg, none, decay", repr(x)])
            for x in ("min", "", None, 1)
        ],
        *[
            (x, {"budget": 99, "pooling": "decay", "kernel": 7}, ["kernel is not used with pooling=decay"])
            for x in ("snapkv", "lava", "cake", "ada-criticalkv")
        ],
        *[("snapkv", {"gqa": x}, ["gqa", "mean, max", repr(x)]) for x in ("sum", True)],
        ("kvzip", {"budget": 64, "kernel": 5}, ["kernel is not used with window=0"]),
        ("kvzip", {"budget": 64, "pooling": "avg"}, ["pooling is not used with window=0"]),
        (
            "kvzip",
            {"budget": 64, "window": 8, "pooling": "decay", "kernel": 5},
            ["kernel is not used with pooling=decay"],
        ),
        *[("snapkv", {"rows": x}, ["rows", "mean, max, recent", repr(x)]) for x in ("sum", "", None)],
        *[(x, {"budget": 99, "rows": "max"}, ["rows does not apply", x]) for x in WITHOUT_ROWS],
        *[("streaming-llm", {"sinks": x}, ["sinks", ">= 0", repr(x)]) for x in (-1, 0.5, False, "4")],
        *[("pyramidkv", {"beta": x}, ["beta", ">= 1", repr(x)]) for x in (0, 0.5, 1.5, -20, True, NAN)],
        ("pyramidkv", {"pyramid_rounding": "floor"}, ["pyramid_rounding", "exact, official", "'floor'"]),
        *[
            ("ada-snapkv", {"alpha": x}, ["alpha", "[0, 1]", repr(x)])
            for x in (-0.1, 1.01, NAN, True, "0.2", None)
        ],
        ("ada-pyramid", {"ada_safeguard": "on"}, ["ada_safeguard", "interp, paper, guarantee", "'on'"]),
        ("vatp-snapkv", {"budget": 36, "sinks": 4}, ["budget=36", "window=32", "sinks=4"]),
        ("tova", {"budget": 1}, ["budget", "1"]),
        ("tova", {"budget": 9, "window": 1}, ["window does not apply", "tova"]),
        ("h2o", {"budget": 32}, ["budget=32", "window=32"]),
        ("h2o", {"window": -1}, ["window", ">= 0", "-1"]),
        ("h2o", {"budget": 64, "kernel": 5}, ["kernel does not apply", "h2o", "h2o_norm"]),
        ("h2o", {"budget": 64, "h2o_norm": "max"}, ["h2o_norm", "sum, mean", "'max'"]),
        ("lava-uniform-head", {"budget": 64, "alpha": 0.1}, ["alpha does not apply", "lava-uniform-head"]),
        ("take", {"budget": 32}, ["budget=32", "take_probe=32"]),
        ("take", {"budget": 64, "take_chunk": 16}, ["take_probe", "take_chunk", "32", "16"]),
        *[
            ("take", {"budget": 64, "take_warmup_layers": x}, ["auto or an integer >= 0", repr(x)])
            for x in (-1, "a")
        ],
        *[("lava", {"tp_local": x}, ["tp_local", "0 or 1", repr(x)]) for x in (2, -1, "1", 0.5)],
        *[("cake", {"budget": 64, "gamma": x}, ["gamma", repr(x)]) for x in (-1, NAN, "1", None)],
        *[("cake", {"budget": 64, "tau1": x}, ["tau1", repr(x)]) for x in (0, -1, NAN, "1")],
        *[("cake", {"budget": 64, "tau2": x}, ["tau2", repr(x)]) for x in (0, float("inf"))],
        *[("knorm", {"budget": 64, "skip_layers": x}, ["skip_layers", ">= 0", repr(x)]) for x in (-1, 0.5)],
        *[("criticalkv", {"budget": 64, "first": x}, ["first", "[0, 1]", repr(x)]) for x in (-0.1, 2, NAN)],
        *[("defensivekv", {"budget": 64, "mass": x}, ["mass", "[0, 1]", repr(x)]) for x in (-0.1, 1.5)],
        ("layer-defensivekv", {"budget": 64, "tp_local": 1}, ["tp_local does not apply"]),
        ("compactor", {"budget": 80}, ["budget=80", "window=64", "sinks=16"]),
        (
            "compactor",
            {"budget": 80, "sinks": 0, "window": 0},
            ["sinks and window", "every KV head must keep a token"],
        ),
        ("compactor", {"budget": 99, "leverage_chunk": 0}, ["leverage_chunk", ">= 1", "0"]),
        *[("compactor", {"budget": 99, "blend": x}, ["blend", ">= 0", repr(x)]) for x in (-0.5, NAN, "1")],
        ("expected-attention", {"budget": 4}, ["budget=4", "sinks=4"]),
        ("expected-attention", {"budget": 64, "window": 8}, ["window does not apply", "n_future"]),
        ("expected-attention", {"budget": 64, "n_future": 0}, ["n_future", ">= 1", "0"]),
        ("expected-attention", {"budget": 64, "epsilon": -1}, ["epsilon", ">= 0", "-1"]),
    ],
)
def test_errors_name_the_parameter(policy, settings, words):
    if policy != "full" and words[0] in parameters("ada-pyramid") | parameters("streaming-llm"):
        settings = {"keep_ratio": 0.5, **settings}
    with pytest.raises(ValueError) as caught:
        EvictionConfig(policy, **settings)
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message


def test_zero_is_a_window_where_scores_need_no_queries():
    for policy in available():
        if "window" in parameters(policy):
            if policy in ("h2o", "knorm", "keydiff", "compactor", "kvzip"):
                assert EvictionConfig(policy, budget=17, window=0).params["window"] == 0
            else:
                with pytest.raises(ValueError, match="window"):
                    EvictionConfig(policy, budget=8, window=0)


def test_from_dict_without_policy():
    with pytest.raises(ValueError, match="policy is missing"):
        EvictionConfig.from_dict({"budget": 64})


def test_parameters_are_those_of_the_policy():
    assert parameters("full") == {}
    assert parameters("streaming-llm") == {"sinks": 4}
    assert parameters("ada-pyramid") == {
        "window": 32,
        "kernel": 7,
        "pooling": "decay",
        "gqa": "max",
        "rows": "recent",
        "beta": 20,
        "pyramid_rounding": "exact",
        "alpha": 0.2,
        "ada_safeguard": "interp",
        "tp_local": 0,
    }
    lava_head = {"window": 32, "kernel": 7, "pooling": "decay", "gqa": "max"}
    cake = {
        "window": 32,
        "kernel": 5,
        "pooling": "decay",
        "gqa": "mean",
        "gamma": 200.0,
        "tau1": 1.0,
        "tau2": 1.0,
    }
    snapkv = {"window": 32, "kernel": 7, "pooling": "decay", "gqa": "max", "rows": "recent"}
    critical = {**snapkv, "first": 0.5}
    ada = {"alpha": 0.2, "ada_safeguard": "interp", "tp_local": 0}
    lava = {**lava_head, "alpha": 0.0, "tp_local": 0}
    defensive = {"window": 32, "kernel": 31, "mass": 0.9}
    wanted = {
        "snapkv": snapkv,
        "ada-snapkv": snapkv | ada,
        "h2o": {"window": 32, "h2o_norm": "sum"},
        "lava": lava,
        "lava-uniform": lava,
        "lava-pyramid": {**lava, "beta": 20, "pyramid_rounding": "exact"},
        "lava-uniform-head": lava_head,
        "cake": cake,
        "vatp-snapkv": {**snapkv, "sinks": 0},
        "tova": {},
        "knorm": {"window": 32, "skip_layers": 0},
        "keydiff": {"window": 32},
        "criticalkv": critical,
        "ada-criticalkv": critical | ada,
        "defensivekv": {**defensive, "tp_local": 0},
        "layer-defensivekv": defensive,
        "kvzip": {
            "kvzip_chunk": 512,
            "kvzip_sees": "all",
            "sinks": 4,
            "window": 0,
            "kernel": 7,
            "pooling": "decay",
        },
        "take": {
            "take_chunk": 4096,
            "take_probe": 32,
            "take_alpha": 0.2,
            "take_warmup_layers": "auto",
            "take_warmup_budget": "auto",
            "take_guide": "prompt",
            "kernel": 5,
            "gqa": "mean",
        },
        "dropkv": {"window": 32, "kernel": 31, "pooling": "decay"},
        "compactor": {"sinks": 16, "window": 64, "leverage_chunk": 512, "blend": 0.5},
        "expected-attention": {"sinks": 4, "n_future": 512, "epsilon": 0.0},
    }
    assert {policy: parameters(policy) for policy in wanted} == wanted
    with pytest.raises(ValueError, match="policy"):
        parameters("nothing")
