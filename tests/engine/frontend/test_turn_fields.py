"""`kv_turns`, `min_turn` and `keep_first`: what is accepted, and what malformed ones are answered with."""

import re

import pytest

from tests.engine.frontend.test_config import one_sentence
from vllm_kvevict.engine.config import KVEvictionError, Options
from vllm_kvevict.engine.request_options import plan_for

SERVER = Options.parse(
    {"policy": "kvzip", "budget": 0.25, "min_prompt": 20, "decode_budget": 40, "policies": "all"}
)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_turns": 40}, ["a list of token counts", "40"]),
        ({"kv_turns": []}, ["a list of token counts", "[]"]),
        ({"kv_turns": [0, 40]}, ["at least 1", "0"]),
        ({"kv_turns": [40, 1.5]}, ["1.5"]),
        ({"kv_turns": [True]}, ["True"]),
        ({"kv_turns": [40, 40]}, ["strictly ascending", "[40, 40]"]),
        ({"kv_turns": list(range(1, 8194))}, ["at most 8192 entries", "got 8193"]),
        ({"kv_turns": [40, 101]}, ["length of the prompt", "100", "101"]),
        ({"kv_turns": [40], "kv_prefix_len": 50}, ["together with kv_prefix_len"]),
        ({"kv_turns": [40], "kv_eviction": "take"}, ["take", "choose from", "kvzip"]),
        ({"kv_turns": [40], "kv_budget": 30}, ["a share of the tokens", "30"]),
    ],
    ids=str,
)
def test_bad_fields(fields, words) -> None:
    with pytest.raises(KVEvictionError) as error:
        plan_for(SERVER, 100, fields)
    assert error.value.field_name == "kv_turns" and one_sentence(error, *words).startswith("kv_turns ")


def test_an_answer_begins_behind_the_last_turn() -> None:
    with pytest.raises(KVEvictionError, match="kv_answer_from"):
        plan_for(SERVER, 100, {"kv_turns": [40, 80], "kv_answer_from": 79})
    assert plan_for(SERVER, 100, {"kv_turns": [40, 80], "kv_answer_from": 80}).answer.begins == 80


def test_short_parts_wait_for_the_next() -> None:
    def ends(server: Options, *turns: float) -> list[int]:
        return [part.end for part in plan_for(server, 100, {"kv_turns": list(turns)}).parts]

    assert ends(SERVER, 19.0, 39, 58, 59.0) == [39, 59]
    assert ends(SERVER, 5, 15) == []
    two = Options.parse({"policy": "kvzip", "budget": 0.25, "min_turn": 2})
    assert ends(two, 1, 2, 3, 5, 100) == [2, 5, 100]
    assert ends(Options.parse({"policy": "full"}), 40, 80) == []
    assert ends(Options.parse({"policy": "snapkv", "budget": 1.0, "min_turn": 1}), 40, 80) == []


@pytest.mark.parametrize("whole", [41, 100, -1, 39.5, True, None, "40", [40], 1 << 70])
def test_what_stays_whole_ends_where_a_part_does(whole) -> None:
    with pytest.raises(KVEvictionError) as error:
        plan_for(SERVER, 100, {"kv_turns": [40, 80], "kv_rendered": {"whole": whole}})
    assert (
        re.match("kv_rendered(.whole)? must be ", one_sentence(error))
        and error.value.field_name == "kv_rendered"
    )


def test_what_stays_whole() -> None:
    def parts(server: Options, whole: int) -> list[tuple[int, str]]:
        plan = plan_for(server, 400, {"kv_turns": [20, 32, 40, 300], "kv_rendered": {"whole": whole}})
        return [(part.end, part.config.policy) for part in plan.parts]

    # Nothing that does not fill a page; otherwise also what is too short to be evicted on its own.
    long = Options.parse({"policy": "kvzip", "budget": 0.25, "min_turn": 256})
    assert parts(long, 20) == [(300, "kvzip")]
    assert parts(long, 32) == [(32, "full"), (300, "kvzip")]
    assert parts(Options.parse({"policy": "kvzip", "budget": 0.25, "page_size": 64}), 40) == [(300, "kvzip")]
    # As without it where nothing is evicted.
    assert parts(Options.parse({"policy": "snapkv", "budget": 1.0, "min_turn": 1}), 40) == []
    assert parts(Options.parse({"policy": "full"}), 40) == []
    # Alone it says nothing.
    assert plan_for(SERVER, 100, {"kv_rendered": {"whole": 40}}) == plan_for(SERVER, 100)
    with pytest.raises(KVEvictionError, match="kv_rendered must be"):
        plan_for(SERVER, 100, {"kv_rendered": {"whole": "40"}})


@pytest.mark.parametrize("scope", ["prompt", "prefix"])
def test_other_scopes_have_no_first_part(scope) -> None:
    with pytest.raises(KVEvictionError) as error:
        Options.parse({"policy": "kvzip", "budget": 0.25, "scope": scope, "keep_first": True})
    assert f"keep_first has no effect with scope {scope}" in one_sentence(error)
    assert Options.parse({"policy": "kvzip", "budget": 0.25, "scope": "turns", "keep_first": True}).keep_first
