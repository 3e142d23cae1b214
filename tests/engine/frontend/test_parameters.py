"""Parameters of policies: the server's for each of them, and a request's in their place. Malformed options:
`test_config.py`."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.frontend.test_config import EVICTING, one_sentence
from vllm_kvevict.engine.config import KVEvictionError, Options
from vllm_kvevict.engine.request_options import RequestOptions
from vllm_kvevict.policies import EvictionConfig, LayerInputs, Rotary, available, decide, parameters
from vllm_kvevict.policies.registry import lookup

SERVER = Options.parse(
    {
        "policy": "snapkv",
        "budget": 0.25,
        "window": 16,
        "kernel": 9,
        "min_prompt": 100,
        "policies": "all",
        "policy_params": {"lava": {"kernel": 21}, "ada-snapkv": {"alpha": 0.5, "pooling": "decay"}},
    }
)
SERVERS_ALONE = {
    "take_chunk", "take_probe", "take_alpha", "take_warmup_layers", "take_warmup_budget", "take_guide", "kvzip_chunk",
    "kvzip_sees", "skip_layers", "leverage_chunk",
}  # fmt: skip


def config_of(options: Options = SERVER, **fields) -> EvictionConfig:
    """What a request with these fields is evicted by."""
    return RequestOptions.read(options, {f"kv_{name}": value for name, value in fields.items()}, 1).config


def refused(options: Options, *words: str, named: str = "kv_params", **fields) -> str:
    """The sentence by which the fields are refused."""
    with pytest.raises(KVEvictionError) as error:
        config_of(options, **fields)
    assert error.value.field_name == named and str(error.value).startswith(f"{named}: ")
    return one_sentence(error, *words)


# One request.


@pytest.mark.parametrize(
    "fields, policy, changed",
    [
        ({}, "snapkv", {"window": 16, "kernel": 9, "pooling": "max"}),
        ({"params": "kernel=21"}, "snapkv", {"window": 16, "kernel": 21, "pooling": "max"}),
        ({"params": "rows=max,pooling=avg"}, "snapkv", {"window": 16, "kernel": 9, "rows": "max", "pooling": "avg"}),
        ({"params": "pooling=decay"}, "snapkv", {"window": 16}),
        ({"eviction": "lava"}, "lava", {"kernel": 21, "pooling": "max"}),
        ({"eviction": "lava", "params": "alpha=0.2"}, "lava", {"kernel": 21, "pooling": "max", "alpha": 0.2}),
        ({"eviction": "lava", "params": "kernel=5.0"}, "lava", {"kernel": 5, "pooling": "max"}),
        ({"eviction": "cake", "params": "tau1=2,gamma=10"}, "cake", {"tau1": 2.0, "gamma": 10.0}),
        ({"eviction": "h2o", "params": "h2o_norm=mean"}, "h2o", {"h2o_norm": "mean"}),
    ],
)  # fmt: skip
def test_requests_override_the_server_and_the_server_the_policy(fields, policy, changed):
    config, wanted = config_of(**fields), parameters(policy) | changed
    if wanted.get("pooling") == "decay":
        del wanted["kernel"]  # which has no use there
    assert (config.policy, config.keep_ratio, config.params) == (policy, 0.25, wanted)


@pytest.mark.parametrize("policy", EVICTING)
def test_every_parameter_can_be_set_or_is_the_servers_alone(policy):
    budget = {"eviction": policy, "budget": 0.5}
    for name, value in parameters(policy).items():
        if name in SERVERS_ALONE:
            refused(SERVER, f"{name} can be set for the server only", params=f"{name}={value}", **budget)
        elif name in config_of(**budget).params:
            assert config_of(**budget, params=f"{name}={value}").params[name] == value


def test_only_the_server_gives_kvzip_many_sinks():
    """Each repeat may copy them."""
    assert config_of(eviction="kvzip", params="sinks=64").params["sinks"] == 64
    refused(SERVER, "sinks must be at most 64 in a request, not 65", eviction="kvzip", params="sinks=65")
    server = Options.parse({"policy": "full", "policies": "all", "policy_params": {"kvzip": {"sinks": 65}}})
    assert config_of(server, eviction="kvzip").params["sinks"] == 65


def test_what_is_the_servers_alone():
    marked = {p.name for name in available() for p in lookup(name).parameters if not p.by_request}
    assert marked == SERVERS_ALONE


@pytest.mark.parametrize(
    "policy, one, other",
    [
        ("ada-snapkv", "alpha=0.20,pooling=max,kernel=15", "kernel=15,pooling=max,alpha=0.2"),
        ("lava", "kernel=21.0", "kernel=21"),
        ("lava", "kernel=21", None),  # the server says so
        ("cake", "tau1=1", "tau1=1.0"),
    ],
)
def test_equal_parameters_are_equal_however_they_are_written(policy, one, other):
    first, second = (config_of(eviction=policy, **({"params": x} if x else {})) for x in (one, other))
    assert first == second and hash(first) == hash(second)
    assert first != config_of(eviction=policy, params="window=8")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"params": "kernel"}, ["'kernel' is not NAME=VALUE", "window, kernel, pooling, gqa, rows"]),
        ({"params": ""}, ["'' is not NAME=VALUE"]),
        ({"params": "kernel=3, rows=max"}, ["' rows=max' is not NAME=VALUE"]),
        ({"params": "kernel=3,rows=max,kernel=3"}, ["names kernel twice"]),
        ({"params": None}, ["NAME=VALUE[,NAME=VALUE]", "None"]),
        ({"params": "alpha=0.2"}, ["alpha is not a parameter of policy snapkv", "requests may set for policy snapkv"]),
        ({"params": "page_size=64"}, ["page_size is not a parameter"]),
        ({"params": "kernel=NaN"}, ["kernel must be"]),
        ({"params": f"kernel=1{'0' * 5000}1"}, ["kernel must be"]),
        ({"params": f"window=1{'0' * 400}"}, ["window must be at most"]),
        ({"params": "kernel=257"}, ["kernel must be at most 255"]),
        ({"params": "window=33"}, ["window must be at most 32", "max_window"]),
        ({"eviction": "expected-attention", "params": "n_future=4097"}, ["n_future must be at most 4096"]),
        ({"eviction": "expected-attention", "params": f"epsilon=1{'0' * 400}"}, ["epsilon must be a number >= 0"]),
        ({"eviction": "streaming-llm", "params": "sinks=1000001"}, ["sinks must be at most 1000000"]),
        ({"eviction": "kvzip", "params": "sinks=0"}, ["sinks and window must not both be 0"]),
        ({"eviction": "full", "params": "window=8"}, ["requests may set for policy full: none"]),
        ({"params": "pooling=decay,kernel=9"}, ["kernel is not used with pooling=decay"]),
        ({"params": "pooling=decay,kernel=9", "budget": 0.5}, ["kernel is not used with pooling=decay"]),
        ({"eviction": "ada-snapkv", "params": "kernel=9"}, ["kernel is not used with pooling=decay"]),
    ],
)  # fmt: skip
def test_bad_parameters(fields, words):
    server = Options.parse(SERVER.to_dict() | {"max_window": 32})
    refused(server, *words, **fields)


def test_a_budget_that_does_not_exceed_the_window_names_what_the_request_gave():
    server = Options.parse({"policy": "snapkv", "budget": 24, "window": 16})
    assert config_of(server).budget == 24
    refused(server, "window=32", params="window=32")
    refused(server, "window=32", params="window=32", budget=30, named="kv_budget")
    assert config_of(server, params="window=32", budget=33).params["window"] == 32


def test_a_servers_kernel_is_no_error_where_the_request_leaves_it_without_use():
    for policy in ("snapkv", "lava"):
        config = config_of(eviction=policy, params="pooling=decay")
        assert config.params["pooling"] == "decay" and "kernel" not in config.params
    server = Options.parse(
        {"policy": "full", "policies": "all", "policy_params": {"kvzip": {"window": 16, "kernel": 9}}}
    )
    assert config_of(server, eviction="kvzip", params="sinks=8").params["kernel"] == 9
    assert "kernel" not in config_of(server, eviction="kvzip", params="window=0").params
    # And back: the server says decay, the request says max, and the policy's own width counts.
    config = config_of(eviction="ada-snapkv", params="pooling=max")
    assert (config.params["pooling"], config.params["kernel"], config.params["alpha"]) == ("max", 7, 0.5)
    assert config_of(eviction="ada-snapkv", params="pooling=max,kernel=31").params["kernel"] == 31


@given(st.text() | st.text("kernlwidop=,0123456789.max-").map("kernel={}".format), st.sampled_from(EVICTING))
def test_any_text_is_taken_or_refused_in_a_sentence(text, policy):
    try:
        config = config_of(eviction=policy, params=text)
    except KVEvictionError as error:
        assert str(error).startswith("kv_params: ") and "\n" not in str(error)
    else:
        assert config.policy == policy


# The largest and smallest values that a request can give.

EXTREMES = {
    "window": (1, 32),
    "kernel": (1, 255),
    "pooling": ("max", "avg", "none", "decay"),
    "sinks": (1, 1_000_000),
    "beta": (1, 1_000_000),
    "gamma": (0, 1_000_000, 1e-320),
    "tau1": (1e-320, 1e308),
    "tau2": (1e-320, 1e308),
    "n_future": (1, 4096),
    "epsilon": (0, 1_000_000, 1e-320),
    "blend": (0, 1_000_000, 1e-320),
    "alpha": (0, 1, 1e-320),
    "mass": (0, 1, 1e-320),
    "first": (0, 1, 1e-320),
}


@pytest.mark.parametrize("policy", [name for name in EVICTING if name != "take"])  # has none but a kernel
def test_no_value_that_a_request_can_give_keeps_a_policy_from_deciding(policy):
    """As an error would end the whole server, not the request."""
    server = Options.parse({"policy": "full", "policies": "all", "policy_params": {"kvzip": {"window": 16}}})
    n, layers, heads, group, size = 60, 2, 2, 2, 8
    torch.manual_seed(0)
    keys, values, queries = (torch.randn(layers, h, n, size) for h in (heads, heads, heads * group))
    angles = torch.outer(torch.arange(n).float(), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    most = {p.name: p.most_by_request for p in lookup(policy).parameters}
    for name, extremes in EXTREMES.items():
        for extreme in extremes if name in most else ():
            value = extreme if most[name] is None else min(extreme, most[name])
            config = config_of(server, eviction=policy, budget=0.3, params=f"{name}={value}")
            inputs = [
                LayerInputs(
                    queries[i][:, -32:],
                    keys[i],
                    values[i],
                    q_all=queries[i],
                    w_o=torch.randn(heads * group, size, 16),
                    rotary=Rotary(angles.cos(), angles.sin(), False),
                    repeated=torch.rand(heads, n),
                )
                for i in range(layers)
            ]
            kept = decide(config, inputs)
            assert sum(len(head) for layer in kept for head in layer) == layers * heads * config.budget_for(n)


# The server.


def test_a_server_that_evicts_on_request_only_has_parameters_for_each_policy():
    server = Options.parse({"policy": "full", "policy_params": {"lava": {"kernel": 21, "alpha": 0.1}}})
    assert config_of(server, eviction="lava") == EvictionConfig("lava", keep_ratio=0.2, kernel=21, alpha=0.1)
    assert config_of(server, eviction="snapkv") == EvictionConfig("snapkv", keep_ratio=0.2)
    refused(server, "is not a parameter of policy full", params="kernel=9")
    assert Options.parse(json.loads(json.dumps(server.to_dict()))) == server


@pytest.mark.parametrize(
    "raw, most",
    [
        ({}, 32),
        ({"window": 48}, 48),
        ({"policies": "all"}, 64),  # compactor's
        ({"policy_params": {"lava": {"window": 40}}}, 40),
        ({"policies": [], "window": 8}, 8),
        ({"policies": "all", "max_window": 20}, 20),
        ({"max_window": 500}, 500),
    ],
)
def test_the_largest_window_of_a_request(raw, most):
    server = Options.parse({"policy": "snapkv", **raw})
    assert config_of(server, params=f"window={most}").params["window"] == most
    refused(server, f"window must be at most {most}", params=f"window={most + 1}")


@pytest.mark.parametrize(
    "raw, windows",
    [
        ({}, [1, 32]),  # tova's, and all others'
        ({"window": 48, "policies": ["h2o", "compactor", "kvzip"]}, [48]),  # the others do not score by it
        ({"policies": ["kvzip"], "policy_params": {"kvzip": {"window": 24}}}, [24, 32]),
        ({"policy": "streaming-llm", "policies": []}, []),
    ],
)
def test_windows_that_a_gpus_kernel_is_compiled_for(raw, windows):
    assert Options.parse({"policy": "snapkv", **raw}).kernel_windows == windows
