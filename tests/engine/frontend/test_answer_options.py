"""`--kv-decode-budget`, `lookahead` and what goes with them, of a server and of a request. Malformed options:
`test_config.py`."""

from typing import Any

import pytest

from vllm_kvevict.engine.config import KVEvictionError, Options
from vllm_kvevict.engine.request_options import KEEPS_ALL, RequestOptions, plan_for

ON = {"policy": "snapkv", "decode_budget": 40}


def test_defaults() -> None:
    """The policy is the server's own if it can evict answers; the interval follows the budget, in whole pages."""
    answers = Options.parse(ON).decoding
    assert (answers.policy, answers.window_for(), answers.interval_for(40)) == ("snapkv", 16, 128)
    assert [answers.interval_for(budget) for budget in (1024, 1032, 2048, 2056)] == [128, 160, 256, 288]
    assert Options.parse({"policy": "h2o", "decode_budget": 40}).decoding.policy == "ada-snapkv"
    assert Options.parse({**ON, "decode_interval": 7}).decoding.interval_for(4096) == 7
    assert plan_for(Options.parse({"policy": "snapkv"}), 100).answer is None
    whole = plan_for(Options.parse({"policy": "snapkv", "decode_budget": 40, "min_prompt": 200}), 100)
    assert whole.prompt is None and whole.answer is not None and whole.answer.positions[0] == 100 + 40 + 128


def test_a_request_needs_a_server_that_evicts_answers() -> None:
    off, on = Options.parse({"policy": "snapkv"}), Options.parse(ON)
    for fields in (
        {"kv_decode_budget": 40},
        {"kv_answer_from": 10},
        {"kv_answer_from": 10, "kv_decode_budget": 0},
    ):
        with pytest.raises(KVEvictionError) as error:
            plan_for(off, 100, fields)
        assert error.value.field_name == next(iter(fields)), fields
    assert plan_for(off, 100, {"kv_decode_budget": 0}).answer is None
    assert plan_for(on, 100, {"kv_decode_budget": 0}).answer is None
    answer = plan_for(on, 100, {"kv_decode_budget": 2048, "kv_answer_from": 60}).answer
    assert answer is not None and (answer.begins, answer.positions[0]) == (60, 60 + 2048 + 256)
    assert plan_for(on, 100, {"kv_answer_from": 60}).prompt == plan_for(on, 60).prompt


def test_a_policy_that_compares_all_entries_has_no_larger_budget_than_the_servers() -> None:
    """Its work grows with the square: one request could keep everybody waiting for minutes."""
    quadratic = Options.parse({**ON, "decode_policy": "rkv"})
    with pytest.raises(
        KVEvictionError, match=r"at most 40, the server's --kv-decode-budget.* got 41"
    ) as error:
        plan_for(quadratic, 100, {"kv_decode_budget": 41})
    assert error.value.field_name == "kv_decode_budget"
    assert plan_for(quadratic, 100, {"kv_decode_budget": 30}).answer is not None
    assert plan_for(Options.parse(ON), 100, {"kv_decode_budget": 41}).answer is not None


@pytest.mark.parametrize("budget", [2**40 + 1, 9 * 10**18, 2**63 - 200, 2**64 - 1, 1e19, 1e300])
def test_a_budget_that_no_answer_needs_is_refused(budget: float) -> None:
    """Its first eviction would come after more tokens than anything counts."""
    on = Options.parse(ON)
    with pytest.raises(KVEvictionError, match="kv_decode_budget must be at most 1099511627776") as error:
        plan_for(on, 100, {"kv_decode_budget": budget})
    assert error.value.field_name == "kv_decode_budget"
    largest = plan_for(on, 100, {"kv_decode_budget": 2**40}).answer
    assert largest is not None and largest.end > largest.positions[0] > 2**40 and largest.interval > 0


AHEAD = Options.parse({"policy": "snapkv", "policies": "all", "min_prompt": 50, "lookahead": 32})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_lookahead": 33}, "must be at most 32, the server's --kv-eviction-config.lookahead, .* got 33"),
        ({"kv_lookahead": 65}, "must be at most 64, got 65"),
        ({"kv_lookahead": -1}, "must be a whole number of at least 0, got -1"),
        ({"kv_lookahead": True}, "must be a whole number of at least 0, got True"),
        ({"kv_lookahead": 8, "kv_prefix_len": 60}, "cannot be given together with kv_prefix_len or kv_turns"),
        ({"kv_lookahead": 8, "kv_turns": [60]}, "cannot be given together with kv_prefix_len or kv_turns"),
        ({"kv_lookahead": 8, "kv_eviction": "h2o"}, "cannot be used with policy h2o .choose from .*snapkv"),
        ({"kv_lookahead": 8, "kv_eviction": "full"}, "cannot be used with policy full .choose from"),
    ],
)  # fmt: skip
def test_a_lookahead_that_cannot_be(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(KVEvictionError, match=f"^kv_lookahead {words}") as error:
        plan_for(AHEAD, 100, fields)
    assert error.value.field_name == "kv_lookahead" and ". " not in str(error.value)
    # 0 asks for nothing, on any server.
    assert plan_for(AHEAD, 100, fields | {"kv_lookahead": 0}).evicted_at <= 100


def test_a_request_needs_a_server_with_a_lookahead() -> None:
    off = Options.parse({"policy": "snapkv", "min_prompt": 50})
    assert plan_for(off, 100, {"kv_lookahead": 0}) == plan_for(off, 100)
    with pytest.raises(KVEvictionError, match=r"^kv_lookahead needs a server that was started with") as error:
        plan_for(off, 100, {"kv_lookahead": 1})
    assert error.value.field_name == "kv_lookahead"


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ({}, 132),
        ({"kv_lookahead": 8.0}, 108),
        ({"kv_lookahead": 0}, 100),
        ({"kv_eviction": "h2o"}, 100),
        ({"kv_prefix_len": 60}, 60),
        ({"kv_turns": [60]}, 60),
        ({"kv_answer_from": 60}, 92),
        ({"kv_eviction": "full"}, 0),
    ],
)
def test_when_a_prompt_is_evicted(fields: dict[str, Any], at: int) -> None:
    """Who cannot wait, or does not want to, is evicted as on a server without; an answer that ends by then, never."""
    assert plan_for(AHEAD, 100, fields).evicted_at == at
    for most in (1, at - 99, at - 98):
        options = RequestOptions.read(AHEAD, fields, 100, most_output=most)
        is_short = at > 100 and most < at - 98
        assert (options == KEEPS_ALL) == (is_short or not at)
