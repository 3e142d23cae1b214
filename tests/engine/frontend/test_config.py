"""What users ask for: the server's options, one request's fields, and the plan that follows from both."""

import copy
import json

import pytest

from tests.registering import policy_with_both_defaults
from vllm_kvevict.engine import read
from vllm_kvevict.engine.config import (
    DEFAULT_BUDGET,
    ENGINE_DEFAULTS,
    REQUEST_FIELDS,
    KVEvictionError,
    Options,
    check_names,
)
from vllm_kvevict.policies import available
from vllm_kvevict.schedules.plan import Plan


def evicted(plan: Plan) -> int | None:
    """Tokens after which a prompt is evicted, None if it is kept whole."""
    return None if plan.prompt is None else plan.prompt.end


EVICTING = [policy for policy in available() if policy != "full"]


def one_sentence(error: pytest.ExceptionInfo, *words: str) -> str:
    """The message, checked to be one line that holds the words."""
    message = str(error.value)
    assert "\n" not in message and ". " not in message
    for word in words:
        assert word in message
    return message


@pytest.mark.parametrize(
    "value",
    [
        0, 0.0, -1, -0.5, 2.5, 1.0001, float("nan"), float("inf"), -float("inf"), 10**400, True, False, None,
        "abc", "", "nan", "inf", "0", "2.5", "1e999", [], [0.2], {}, 0.2j, b"0.2",
    ],
)  # fmt: skip
def test_bad_budgets(value):
    with pytest.raises(KVEvictionError) as error:
        read.budget(value, "kv_budget")
    one_sentence(
        error, "kv_budget must be a ratio in (0, 1] or a whole number of tokens above 1", repr(value)
    )
    assert error.value.field_name == "kv_budget"


def test_defaults():
    options = Options.parse({"policy": "snapkv"})
    assert (options.policy, options.budget, dict(options.params)) == ("snapkv", DEFAULT_BUDGET, {})
    assert {name: getattr(options, name) for name in ENGINE_DEFAULTS} == ENGINE_DEFAULTS


@pytest.mark.parametrize(
    "raw, words",
    [
        ({"policy": "nope"}, ["--kv-eviction", "'nope'", *available()]),
        ({"sinks": 4}, ["sinks", "snapkv", "window", "kernel", "min_prompt"]),
        ({"budget": 32, "window": 32}, ["--kv-eviction", "window=32"]),
        ({"check": "no"}, ["--kv-eviction-config.check", "'no'"]),
        ({"scope": "turns", "budget": 300}, ["scope turns needs a budget", "a share of the tokens", "300"]),
        ({"policy": "full", "scope": "turns", "budget": 300}, ["scope turns needs a budget", "300"]),
        ({"policy": "take", "scope": "turns"}, ["scope turns cannot be used with policy take", "kvzip"]),
        ({"policy": "dropkv", "scope": "turns"}, ["--kv-eviction-config.scope turns", "policy dropkv", "kvzip"]),
        ({"policies": ["h2o", "no"]}, ["--kv-eviction-config.policies", "lava", "['h2o', 'no']"]),
        ({"eviction_log": ""}, ["--kv-eviction-config.eviction_log", "path of a file", "''"]),
        # Answers.
        ({"decode_budget": -1}, ["--kv-decode-budget", "at least 0", "-1"]),
        ({"decode_budget": "much"}, ["--kv-decode-budget", "'much'"]),
        ({"decode_budget": 3}, ["--kv-decode-budget", "at least 4", "3"]),
        ({"decode_budget": 16}, ["--kv-decode-budget", "window", "16"]),
        ({"decode_budget": 1e19}, ["--kv-decode-budget", "at most 1099511627776", "1e+19"]),
        ({"decode_budget": 40, "decode_interval": 2**63}, ["decode_interval", "at most", str(2**63)]),
        ({"decode_budget": 40, "decode_window": 40}, ["--kv-decode-budget", "window=40"]),
        ({"decode_budget": 40, "decode_policy": "h2o"}, ["decode_policy", "one of", "ada-snapkv", "'h2o'"]),
        ({"kv_decode_budget": 1}, ["--kv-eviction-config.kv_decode_budget"]),
        # Parameters of other policies.
        ({"policy_params": {"snapkv": {"kernel": 9}}}, ["policies other than the server's own", "snapkv"]),
        ({"policy_params": {"nope": {}}}, ["unknown policy 'nope'", "lava"]),
        ({"policy_params": {"lava": {"rows": "max"}}}, ["policy_params.lava.rows", "does not apply", "gqa"]),
        ({"policy_params": {"lava": {"kernel": 4}}}, ["policy_params.lava", "kernel must be an odd integer"]),
        ({"policy_params": {"lava": {"pooling": "decay", "kernel": 9}}}, ["lava: kernel is not used with"]),
        ({"policy_params": {"full": {"window": 9}}}, ["policy_params.full.window", "valid: none"]),
        ({"policy_params": {"h2o": {"window": 9}}}, ["policy_params.h2o", "has no effect", "policies"]),
        ({"policy": "full", "kernel": 9}, ["--kv-eviction-config.kernel does not apply to policy full"]),
    ],
)  # fmt: skip
def test_bad_options(raw, words):
    with pytest.raises(KVEvictionError) as error:
        Options.parse({"policy": "snapkv", **raw})
    one_sentence(error, *words)


def test_whole_numbers_may_be_floats():
    options = Options.parse({"policy": "snapkv", "min_prompt": 0.0, "page_size": 64.0, "window": 16.0})
    assert (options.min_prompt, options.page_size) == (0, 64)
    assert options.request_config(None)[0].params["window"] == 16


def test_checking_is_switched_by_the_environment(monkeypatch):
    for value, on in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("VLLM_KVEVICT_CHECK", value)
        assert Options.parse({"policy": "full"}).check is on
        # What was decided in the front-end holds in the workers, whatever their environment says.
        assert Options.parse({"policy": "full", "check": not on}).check is not on


# One request.

SERVER = Options.parse({"policy": "snapkv", "budget": 0.25, "window": 16, "min_prompt": 100})


def test_a_request_without_fields_takes_the_servers_options():
    for fields in (None, {}, {"somebody_elses": 1, "kv_transfer_params": {}}):
        config, prefix_len = SERVER.request_config(fields)
        assert (config.policy, config.keep_ratio, config.params["window"]) == ("snapkv", 0.25, 16)
        assert prefix_len is None


@pytest.mark.parametrize("defaults, kernel", [("measured", 31), ("paper", 7)])
def test_the_server_says_whose_defaults_count(defaults, kernel, monkeypatch):
    """For its own policy, and for one that a request names; the measured ones, unless it is told otherwise."""
    policy = policy_with_both_defaults(monkeypatch)
    assert Options.parse({"policy": policy}).defaults == "measured"
    own = Options.parse({"policy": policy, "defaults": defaults, "window": 16})
    other = Options.parse({"policy": "snapkv", "defaults": defaults, "kernel": 9})
    for options, fields in ((own, None), (own, {"kv_eviction": policy}), (other, {"kv_eviction": policy})):
        config, _ = options.request_config(fields)
        assert (config.policy, config.params["kernel"]) == (policy, kernel)
        assert config.params["rows"] == {"measured": "max", "paper": "mean"}[defaults]
        assert config.params["window"] == (16 if options is own else 32)
    assert Options.parse(json.loads(json.dumps(own.to_dict()))) == own
    given = Options.parse({"policy": policy, "defaults": defaults, "kernel": 5})
    assert given.request_config(None)[0].params["kernel"] == 5


def test_full_needs_no_budget():
    config, _ = SERVER.request_config({"kv_eviction": "full", "kv_budget": 0.5})
    assert not config.evicts(10_000)


def test_a_server_that_evicts_on_request_only():
    server = Options.parse({"policy": "full", "budget": 0.5, "min_prompt": 0})
    assert server.plan(1000, None).prompt is None
    plan = server.plan(1000, {"kv_eviction": "snapkv"})
    assert (plan.prompt.end, plan.config.budget_for(1000)) == (1000, 500)


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"kv_budget": 16}, "kv_budget"),  # no more than the server's window
        ({"kv_eviction": "snapkv", "kv_budget": 10}, "kv_budget"),
        ({"kv_prefix_len": 10**400}, "kv_prefix_len"),
    ],
)
def test_bad_fields(fields, named):
    with pytest.raises(KVEvictionError) as error:
        SERVER.plan(1000, fields)
    assert one_sentence(error).startswith(named)
    assert error.value.field_name == named


def test_the_front_ends_own_field_is_not_offered_to_clients():
    """It comes with requests that were rendered before."""
    fields = {"kv_repeat_rows": [[1], [2], [3]]}
    assert SERVER.request_config(fields) == SERVER.request_config(None)
    check_names(fields)
    with pytest.raises(KVEvictionError) as error:
        check_names({"kv_repeats": 1})
    assert error.value.field_name == "kv_repeats"
    sentence = one_sentence(error)
    fields = ", ".join(REQUEST_FIELDS)
    assert sentence == f"kv_repeats is unknown (valid: {fields})"


def test_the_servers_budget_may_not_fit_the_requests_policy():
    server = Options.parse({"policy": "streaming-llm", "budget": 20})
    with pytest.raises(KVEvictionError) as error:
        server.request_config({"kv_eviction": "snapkv"})
    one_sentence(error, "kv_eviction: ", "window=32")
    assert error.value.field_name == "kv_eviction"


@pytest.mark.parametrize("length, end", [(99, None), (100, 100), (1000, 1000)])
def test_short_prompts_are_kept_whole(length, end):
    assert evicted(SERVER.plan(length, None)) == end


@pytest.mark.parametrize("prefix_len, end", [(99, None), (100, 100), (500.0, 500), (1000, 1000)])
def test_a_prefix_is_evicted_at_its_end(prefix_len, end):
    plan = SERVER.plan(1000, {"kv_prefix_len": prefix_len})
    assert evicted(plan) == end
    assert plan.prompt is None or isinstance(plan.prompt.end, int)


@pytest.mark.parametrize("policy", EVICTING)
def test_a_prompt_within_the_budget_is_not_evicted(policy):
    server = Options.parse({"policy": policy, "budget": 200, "min_prompt": 0})
    assert server.plan(200, None).prompt is None
    assert server.plan(201, None).prompt.end == 201


# The scope of the server.

PREFIXES = Options.parse({"policy": "snapkv", "budget": 0.25, "min_prompt": 100, "scope": "prefix"})


def test_the_whole_prompt_is_the_scope_of_others():
    for fields in (None, {}, {"kv_budget": 0.5}, {"kv_prefix_len": 300}):
        for prefix_len in (None, 0, 200):
            assert SERVER.fields_in_scope(1000, prefix_len, fields) == fields


@pytest.mark.parametrize("prefix_len, end", [(0, None), (1, None), (99, None), (100, 100), (999, 999)])
def test_a_chat_is_evicted_before_its_question(prefix_len, end):
    for fields in (None, {}, {"kv_budget": 0.5, "somebody_elses": 1}):
        before = copy.deepcopy(fields)
        in_scope = PREFIXES.fields_in_scope(1000, prefix_len, fields)
        assert evicted(PREFIXES.plan(1000, in_scope)) == end
        assert fields == before and (fields or {}).items() <= in_scope.items()


def test_the_requests_own_prefix_wins():
    for prefix_len in (None, 0, 200):
        fields = PREFIXES.fields_in_scope(1000, prefix_len, {"kv_prefix_len": 300})
        assert PREFIXES.plan(1000, fields).prompt.end == 300


def test_a_prompt_that_does_not_say_where_its_prefix_ends():
    for fields in (None, {"kv_budget": 0.5}, {"kv_eviction": "pyramidkv"}, {"kv_prefix_len": None}):
        with pytest.raises(KVEvictionError) as error:
            PREFIXES.fields_in_scope(1000, None, fields)
        assert one_sentence(error, "--kv-eviction-config.scope prefix").startswith("kv_prefix_len")
        assert error.value.field_name == "kv_prefix_len"


@pytest.mark.parametrize(
    "length, fields", [(99, None), (1000, {"kv_eviction": "full"}), (1000, {"kv_budget": 1000})]
)
def test_a_prompt_that_is_kept_whole_needs_no_prefix(length, fields):
    for prefix_len in (None, 0, 50):
        assert PREFIXES.fields_in_scope(length, prefix_len, fields) == fields


TURN_BY_TURN = Options.parse({"policy": "snapkv", "budget": 0.25, "min_prompt": 100, "scope": "turns"})


@pytest.mark.parametrize("turns, ends", [([40, 150, 300], [150, 300]), ([99], []), ([], [])])
def test_a_chat_is_evicted_where_its_turns_end(turns, ends):
    for fields in (None, {"kv_budget": 0.5, "somebody_elses": 1}):
        in_scope = TURN_BY_TURN.fields_in_scope(1000, turns, fields)
        assert [part.end for part in TURN_BY_TURN.plan(1000, in_scope).parts] == ends
        assert (fields or {}).items() <= in_scope.items()


def test_a_request_says_where_its_own_turns_end():
    for turns in (None, [], [200]):
        for fields in ({"kv_turns": [300]}, {"kv_prefix_len": 300}, {"kv_eviction": "full"}):
            assert TURN_BY_TURN.fields_in_scope(1000, turns, fields) is fields
    for fields in (None, {"kv_prefix_len": None}):
        with pytest.raises(KVEvictionError, match=r"^kv_turns is required with .*scope turns") as error:
            TURN_BY_TURN.fields_in_scope(1000, None, fields)
        assert error.value.field_name == "kv_turns"
    one_token = TURN_BY_TURN.fields_in_scope(1000, None, {"kv_params": "window=8"}, most_output=1)
    assert one_token == {"kv_eviction": "full"}
