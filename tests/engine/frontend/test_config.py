"""What users ask for: the server's options, one request's fields, and the plan that follows from both."""

import json
from pathlib import Path

import pytest
import yaml
from vllm import SamplingParams

from tests.registering import policy_with_both_defaults
from vllm_kvevict.engine import read
from vllm_kvevict.engine.config import DEFAULT_BUDGET, ENGINE_DEFAULTS, KVEvictionError, Options
from vllm_kvevict.engine.request_options import (
    KEEPS_ALL,
    REQUEST_FIELDS,
    ChatFacts,
    RequestOptions,
    check_names,
    plan_for,
)
from vllm_kvevict.policies import available

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
        *yaml.safe_load(Path(__file__).with_name("bad_options.yaml").read_text()),
    ],
)
def test_bad_options(raw, words):
    with pytest.raises(KVEvictionError) as error:
        Options.parse({"policy": "snapkv", **raw})
    one_sentence(error, *words)


def test_whole_numbers_may_be_floats():
    options = Options.parse({"policy": "snapkv", "min_prompt": 0.0, "page_size": 64.0, "window": 16.0})
    assert (options.min_prompt, options.page_size) == (0, 64)
    assert options.config.params["window"] == 16


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
        options = RequestOptions.read(SERVER, fields, 1000)
        assert options == RequestOptions(SERVER.config)
        assert (SERVER.config.policy, SERVER.config.keep_ratio) == ("snapkv", 0.25)


@pytest.mark.parametrize("defaults, kernel", [("measured", 31), ("paper", 7)])
def test_the_server_says_whose_defaults_count(defaults, kernel, monkeypatch):
    """For its own policy, and for one that a request names; the measured ones, unless it is told otherwise."""
    policy = policy_with_both_defaults(monkeypatch)
    assert Options.parse({"policy": policy}).defaults == "measured"
    own = Options.parse({"policy": policy, "defaults": defaults, "window": 16})
    other = Options.parse({"policy": "snapkv", "defaults": defaults, "kernel": 9})
    for options, fields in ((own, None), (own, {"kv_eviction": policy}), (other, {"kv_eviction": policy})):
        config = RequestOptions.read(options, fields, 1000).config
        assert (config.policy, config.params["kernel"]) == (policy, kernel)
        assert config.params["rows"] == {"measured": "max", "paper": "mean"}[defaults]
        assert config.params["window"] == (16 if options is own else 32)
    assert Options.parse(json.loads(json.dumps(own.to_dict()))) == own
    given = Options.parse({"policy": policy, "defaults": defaults, "kernel": 5})
    assert given.config.params["kernel"] == 5


def test_full_needs_no_budget():
    fields = {"kv_eviction": "full", "kv_budget": 0.5}
    assert RequestOptions.read(SERVER, fields, 1000) == KEEPS_ALL


def test_a_server_that_evicts_on_request_only():
    server = Options.parse({"policy": "full", "budget": 0.5, "min_prompt": 0})
    assert plan_for(server, 1000, None).prompt is None
    plan = plan_for(server, 1000, {"kv_eviction": "snapkv"})
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
        plan_for(SERVER, 1000, fields)
    assert one_sentence(error).startswith(named)
    assert error.value.field_name == named


def test_the_front_ends_own_field_is_not_offered_to_clients():
    """One comes with requests that were rendered before; what the scheduler reads, no client can write."""
    check_names({"kv_rendered": {}})
    written = RequestOptions.read(SERVER, None, 1000).to_extra_args({"mine": 1})
    assert written.keys() == {"kv_resolved", "mine"}
    # Who did not pass a front-end keeps all.
    assert (
        RequestOptions.of(None)
        == RequestOptions.of(SamplingParams(extra_args={"kv_eviction": "h2o"}))
        == KEEPS_ALL
    )
    for fields in ({"kv_renders": 1}, written, {"kv_chat": {}}):
        with pytest.raises(KVEvictionError) as error:
            RequestOptions.read(SERVER, fields, 1000)
        (name,) = fields.keys() - {"mine"}
        assert error.value.field_name == name
        assert one_sentence(error) == f"{name} is unknown (valid: {', '.join(REQUEST_FIELDS)})"


def test_the_servers_budget_may_not_fit_the_requests_policy():
    server = Options.parse({"policy": "streaming-llm", "budget": 20})
    with pytest.raises(KVEvictionError) as error:
        RequestOptions.read(server, {"kv_eviction": "snapkv"}, 1000)
    one_sentence(error, "kv_eviction: ", "window=32")
    assert error.value.field_name == "kv_eviction"


@pytest.mark.parametrize("length, end", [(99, None), (100, 100), (500.0, 500), (1000, 1000)])
def test_prompts_and_prefixes_are_evicted_at_their_end_and_short_ones_kept_whole(length, end):
    for plan in (plan_for(SERVER, int(length), None), plan_for(SERVER, 1000, {"kv_prefix_len": length})):
        assert (None if plan.prompt is None else plan.prompt.end) == end
        assert plan.prompt is None or isinstance(plan.prompt.end, int)


@pytest.mark.parametrize("policy", EVICTING)
def test_a_prompt_within_the_budget_is_not_evicted(policy):
    server = Options.parse({"policy": policy, "budget": 200, "min_prompt": 0})
    assert plan_for(server, 200, None).prompt is None
    assert plan_for(server, 201, None).prompt.end == 201


# The scope of the server.

PREFIXES = Options.parse({"policy": "snapkv", "budget": 0.25, "min_prompt": 100, "scope": "prefix"})


def in_scope(
    server: Options, ends: list[int] | None, fields: dict | None, length: int = 1000, **more
) -> RequestOptions:
    """What a request asks for in whose chat these ends were found; and it says the same once it was rendered."""
    found = RequestOptions.read(server, fields, length, ChatFacts(ends=ends), **more)
    assert RequestOptions.read(server, found.to_fields(fields), length) == found
    return found


def ends_of(server: Options, options: RequestOptions) -> list[int]:
    return [part.end for part in options.plan(server, 1000).parts]


def test_the_whole_prompt_is_the_scope_of_others():
    for fields in (None, {}, {"kv_budget": 0.5}, {"kv_prefix_len": 300}):
        for ends in (None, [], [200]):
            assert in_scope(SERVER, ends, fields) == RequestOptions.read(SERVER, fields, 1000)


@pytest.mark.parametrize("prefix_len, end", [(0, []), (1, []), (99, []), (100, [100]), (999, [999])])
def test_a_chat_is_evicted_before_its_question(prefix_len, end):
    for fields in (None, {}, {"kv_budget": 0.5, "somebody_elses": 1}):
        found = in_scope(PREFIXES, [prefix_len] if prefix_len else [], fields)
        assert ends_of(PREFIXES, found) == end and found.by_scope


def test_a_prompt_that_does_not_say_where_its_prefix_ends():
    for fields in (None, {"kv_budget": 0.5}, {"kv_eviction": "pyramidkv"}, {"kv_prefix_len": None}):
        with pytest.raises(KVEvictionError) as error:
            in_scope(PREFIXES, None, fields)
        assert one_sentence(error, "--kv-eviction-config.scope prefix").startswith("kv_prefix_len")
        assert error.value.field_name == "kv_prefix_len"


@pytest.mark.parametrize(
    "length, fields", [(99, None), (1000, {"kv_eviction": "full"}), (1000, {"kv_budget": 1000})]
)
def test_a_prompt_that_is_kept_whole_needs_no_prefix(length, fields):
    for ends in (None, [], [50]):
        found = in_scope(PREFIXES, ends, fields, length)
        assert found == RequestOptions.read(PREFIXES, fields, length) and not found.by_scope


TURN_BY_TURN = Options.parse({"policy": "snapkv", "budget": 0.25, "min_prompt": 100, "scope": "turns"})


@pytest.mark.parametrize("turns, ends", [([40, 150, 300], [150, 300]), ([99], []), ([], [])])
def test_a_chat_is_evicted_where_its_turns_end(turns, ends):
    for fields in (None, {"kv_budget": 0.5, "somebody_elses": 1}):
        assert ends_of(TURN_BY_TURN, in_scope(TURN_BY_TURN, turns, fields)) == ends


def test_a_request_says_where_its_own_turns_end():
    for turns in (None, [], [200]):
        for fields in ({"kv_turns": [300]}, {"kv_prefix_len": 300}, {"kv_eviction": "full"}):
            for server in (PREFIXES, TURN_BY_TURN):
                found = in_scope(server, turns, fields)
                assert found == RequestOptions.read(server, fields, 1000) and not found.by_scope
    for fields in (None, {"kv_prefix_len": None}):
        with pytest.raises(KVEvictionError, match=r"^kv_turns is required with .*scope turns") as error:
            in_scope(TURN_BY_TURN, None, fields)
        assert error.value.field_name == "kv_turns"
    one_token = in_scope(TURN_BY_TURN, None, {"kv_params": "window=8"}, most_output=1)
    assert one_token == KEEPS_ALL and one_token.by_scope
    assert one_token.to_fields({"kv_params": "window=8"}) == {"kv_eviction": "full"}
    assert in_scope(Options.parse({"policy": "full"}), None, {}).to_fields({}) == {}
