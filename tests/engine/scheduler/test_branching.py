"""Conversations that branch: what they have in common is read once, evicted once, and dropped from its end."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest

from tests.engine.scheduler.test_loads import check_asked, tens, watched
from tests.engine.scheduler.test_prefixes import check_end, document, finish, server, steps
from tests.engine.scheduler.test_shared_prefixes import served
from tests.engine.support.chains import Watched, without_tails
from tests.engine.support.loads import Load, repeated
from tests.engine.support.loads_in_turns import CONVERSATIONS
from tests.engine.support.servers import Setup, flights, make_request

SAID = [document(number, 60 + 17 * number) for number in range(6)]
"""By both sides of a conversation in turn."""

OTHER = document(6, 90)


def chatting(**changes: Any) -> Setup:
    options = {"min_turn": 1, "policies": "all", **changes.pop("options", {})}
    return server(**changes, options=options)


def turn(
    name: str,
    said: Sequence[list[int]],
    output: int = 3,
    salt: str | None = None,
    adapter: int = 0,
    **fields: Any,
) -> Any:
    """A request that goes on from what was said: each of that but the last is evicted on its own."""
    tokens = [token for text in said for token in text]
    arguments = {"kv_turns": ends(said[:-1]), **fields}
    return make_request(f"c:{name}", tokens, output, arguments, salt=salt, adapter=adapter)


def ends(said: Sequence[list[int]]) -> list[int]:
    return list(accumulate(map(len, said)))


def length(said: Sequence[list[int]]) -> int:
    return sum(map(len, said))


# Who reads what.


@flights
@pytest.mark.parametrize("policy", ["ada-snapkv", "kvzip"])
def test_each_turn_reads_what_is_new(policy: str, flight: dict[str, Any]) -> None:
    """That is what the last answer and question have added; and it evicts that once."""
    simulation = without_tails(chatting(options={"policy": policy}, **flight))
    for turns in range(2, 7):
        new = SAID[:2] if turns == 2 else SAID[turns - 2 : turns]
        assert served(simulation, turn(str(turns), SAID[:turns])) == length(new)
    assert [position for _, _, position in simulation.workers.evictions] == ends(SAID[:-1])
    assert simulation.longest == 4
    check_end(simulation)


def test_a_part_that_ends_with_the_prompt_is_evicted_and_not_cached() -> None:
    """Nothing would be left to compute for who begins with it; those before it are found."""
    simulation = without_tails(chatting())
    prompt = [*SAID[:3], []]
    assert served(simulation, turn("0", prompt)) == length(prompt)
    assert [position for _, _, position in simulation.workers.evictions] == ends(SAID[:3])
    for name, said in (("1", prompt), ("2", [*SAID[:3], OTHER])):
        assert served(simulation, turn(name, said)) == length(said) - length(SAID[:2])
    check_end(simulation)


BRANCHES = {
    "the same again": (SAID, 5),
    "another question": ([*SAID[:5], OTHER], 5),
    "an edit in the middle": ([*SAID[:2], OTHER, *SAID[3:]], 2),
    "an edit of the beginning": ([OTHER, *SAID[1:]], 0),
    "a beginning of it": (SAID[:4], 3),
    "how it goes on": ([*SAID, OTHER], 5),
}
"""What is asked beside the conversation, and how many of its texts that begins with."""


@pytest.mark.parametrize("what", BRANCHES)
def test_a_branch_reads_what_comes_behind_it(what: str) -> None:
    """And the conversation goes on as if it had not been asked."""
    simulation, (said, shared) = without_tails(chatting()), BRANCHES[what]
    served(simulation, turn("0", SAID))
    assert served(simulation, turn("1", said)) == length(said[shared:])
    assert served(simulation, turn("2", said)) == len(said[-1])
    assert served(simulation, turn("3", SAID)) == len(SAID[-1])
    check_end(simulation)


@flights
@pytest.mark.parametrize("what", BRANCHES)
def test_of_two_at_once_one_reads_what_both_need(what: str, flight: dict[str, Any]) -> None:
    simulation, (said, shared) = without_tails(chatting(**flight)), BRANCHES[what]
    assert served(simulation, turn("0", SAID), turn("1", said)) == length(SAID) + length(said[shared:])
    assert simulation.waited == ({"c:1"} if shared else set())
    check_end(simulation)


def at_other_places(*moved: int) -> dict[str, Any]:
    """The turns end elsewhere, all but these."""
    return {"kv_turns": [end - 10 * (index in moved) for index, end in enumerate(ends(SAID[:-1]))]}


ASKED_OTHERWISE = {
    "salt": ({"salt": "other"}, 0),
    "adapter": ({"adapter": 1}, 0),
    "budget": ({"kv_budget": 0.5}, 0),
    "policy": ({"kv_eviction": "snapkv"}, 0),
    "parameter": ({"kv_params": "alpha=0.5"}, 0),
    "first turn": (at_other_places(0), 0),
    "fourth turn": (at_other_places(3), 3),
    "no second turn": ({"kv_turns": ends(SAID[:1]) + ends(SAID[:-1])[2:]}, 1),
    "nothing": ({}, 5),
}


@pytest.mark.parametrize("what", ASKED_OTHERWISE)
def test_who_asks_otherwise_shares_what_is_the_same(what: str) -> None:
    simulation, (otherwise, shared) = without_tails(chatting(adapters=2)), ASKED_OTHERWISE[what]
    served(simulation, turn("0", SAID))
    assert served(simulation, turn("1", SAID, **otherwise)) == length(SAID[shared:])
    assert served(simulation, turn("2", SAID, **otherwise)) == len(SAID[-1])
    check_end(simulation)


# What comes between.


STAGES = {"shapes": [(2, 2), (1, 2)], "pages": [2000, 1000], "pipeline": True}


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@flights
@pytest.mark.parametrize("policy", ["ada-snapkv", "lava", "kvzip"])
def test_a_reset_at_any_step(policy: str, flight: dict[str, Any], hard: bool) -> None:
    """What was read before it is never stored or begun with, as the simulated workers say."""
    setup = chatting(options={"policy": policy}, **STAGES, **flight)
    for step in range(1, 26, 2):
        simulation = without_tails(setup)
        simulation.add(turn("0", SAID, 8))
        simulation.add(turn("1", [*SAID[:3], OTHER, OTHER], 8))
        steps(simulation, step)
        simulation.reset(hard)
        simulation.add(turn("2", SAID, 8))
        finish(simulation)
        assert set(simulation.outputs.values()) == {8}
        assert served(simulation, turn("3", SAID)) == len(SAID[-1])
        check_end(simulation)


@flights
@pytest.mark.parametrize("policy", ["ada-snapkv", "lava"])
def test_the_reader_is_aborted_at_any_step(policy: str, flight: dict[str, Any]) -> None:
    """Who waits goes on from what is stored, or reads what is missing once."""
    setup = chatting(options={"policy": policy}, **STAGES, **flight)
    for step in range(1, 26, 2):
        simulation = without_tails(setup)
        for index in range(3):
            simulation.add(turn(str(index), SAID))
        steps(simulation, step)
        simulation.abort("c:0")
        finish(simulation)
        assert [simulation.outputs[f"c:{index}"] for index in (1, 2)] == [3, 3]
        # At most two parts are in flight, which somebody reads again.
        assert simulation.prefilled <= length(SAID) + length(SAID[3:5]) + 3 * len(SAID[-1])
        check_end(simulation)


def test_who_is_preempted_begins_again_with_what_is_stored() -> None:
    preempted = 0
    for pages in range(110, 180, 10):
        simulation = without_tails(chatting(pages=[pages], max_model_len=900, options={"decode_reserve": 8}))
        for index in range(3):
            simulation.add(turn(str(index), [*SAID[:5], document(10 + index, 20)], 300))
        finish(simulation)
        assert set(simulation.outputs.values()) == {300}
        preempted += (often := sum(simulation.preemptions.values()))
        assert simulation.workers.hits == 2 + often
        check_end(simulation)
    assert preempted > 3


# What goes.


def test_the_end_of_a_conversation_goes_before_its_beginning() -> None:
    """Less and less of it is left, the more pages another prompt needs."""
    read = []
    for tokens in range(100, 900, 50):
        simulation = without_tails(chatting(pages=[110], max_model_len=1000, options={"budget": 0.5}))
        served(simulation, turn("0", SAID))
        stored = [prefix.number for prefix in simulation.ledger.shared.compressed]
        served(simulation, make_request("long", document(9, tokens), 3, {"kv_eviction": "full"}))
        dropped = [prefix.number for prefix in simulation.dropped]
        assert dropped == sorted(stored, reverse=True)[: len(dropped)]
        read.append(served(simulation, turn("1", SAID)))
        assert read[-1] == length(SAID[5 - len(dropped) :])
        check_end(simulation)
    assert read == sorted(read) and len(set(read)) > 3


def test_what_the_next_question_changes_goes_first() -> None:
    """Although it was used last: the last turns of a conversation in a round of tools."""
    simulation = without_tails(chatting(pages=[140], max_model_len=1000, options={"budget": 0.5}))
    served(simulation, turn("0", [document(10, 70), document(11, 90), document(12, 9)]))
    served(simulation, turn("1", SAID, kv_rendered={"lasting": ends(SAID)[1]}))
    stored = sorted(simulation.ledger.shared.compressed, key=lambda prefix: prefix.number)
    assert [prefix.evict_first for prefix in stored] == [False] * 4 + [True] * 3
    for tokens in range(100, 950, 50):
        served(simulation, make_request(f"l{tokens}", document(9, tokens), 3, {"kv_eviction": "full"}))
    dropped = [prefix.tokens for prefix in simulation.dropped]
    assert dropped[:4] == [*ends(SAID)[4:1:-1], 160]
    check_end(simulation)


# Anything at once.


LOADS = {**CONVERSATIONS, "repeated": lambda seed: repeated(CONVERSATIONS["tight"](seed), seed)}


def play_checked(load: Load, seed: int) -> Watched:
    simulation = watched(load, seed)
    check_asked(load, simulation)
    check_end(simulation)
    return simulation


def check_much_happened(simulations: Sequence[Watched]) -> None:
    """In ten loads of conversations."""
    happened = {
        "began with three entries or more": sum(simulation.begun for simulation in simulations),
        "branches": sum(len(simulation.branches) for simulation in simulations),
        "waited": sum(len(simulation.waited) for simulation in simulations),
        "dropped": sum(len(simulation.dropped) for simulation in simulations),
        "dropped after their children": sum(simulation.with_children for simulation in simulations),
        "became a request's own": sum(simulation.became_own for simulation in simulations),
        "completed what is before": sum(simulation.workers.filled for simulation in simulations),
    }
    assert min(happened.values()) > 5, happened
    assert sum(simulation.workers.taken for simulation in simulations) > 1
    assert any(simulation.filled for simulation in simulations)


@pytest.mark.parametrize("first", tens(60))
@pytest.mark.parametrize("name", LOADS)
def test_loads(name: str, first: int) -> None:
    seeds = range(first, first + 10)
    check_much_happened([play_checked(LOADS[name](seed), seed) for seed in seeds])
