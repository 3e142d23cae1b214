"""No request stops the others: the loads that once did, one by one."""

import dataclasses
from typing import Any

import pytest

from tests.engine.support.hostile_loads import Outcome, play, starts
from tests.engine.support.loads import Ask, Load
from tests.engine.support.servers import PAGE, Setup, Shape, make_request
from tests.engine.support.simulation import Simulation

ONE_RANK = [(4, 2)]
TWO_RANKS = [(4, 2), (4, 2)]


def server(
    shapes: list[Shape], per_row: int, longest: int, policy: str, budget: float, **changes: Any
) -> Setup:
    """Memory for ``per_row`` pages of each row, less than the longest request needs whole."""
    params = changes.pop("params", {})
    options = {"policy": policy, "budget": budget, "min_prompt": 0, "check": True, **params}
    pages = [per_row * layers * heads for layers, heads in shapes]
    setup = Setup(shapes, pages, longest, options=options, **changes)
    assert per_row * PAGE < longest and starts(setup)
    return setup


def play_beside_small_ones(
    setup: Setup, prompt: int, greed: str, answer: int = 10_000, **extra: Any
) -> Outcome:
    """One long request, and every 40 steps a small one."""
    small = [Ask(step, f"small{step}", 20, 5, {}, 0) for step in range(20, 1000, 40)]
    return play(Load(setup, [Ask(0, "long", prompt, answer, extra, 0), *small]), greeds=(greed,))


# An answer ends where the fullest rank's memory does.

UNEVEN: dict[str, Any] = {
    "knorm, a layer kept whole": (ONE_RANK, 25, 1390, "knorm", 0.1, {"params": {"skip_layers": 1}}),
    "pyramidkv, stage 0 keeps more": (TWO_RANKS, 32, 1600, "pyramidkv", 0.2, {"pipeline": True}),
    "ada-snapkv, heads of one rank win": (TWO_RANKS, 32, 1600, "ada-snapkv", 0.2, {}),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_an_answer_that_fills_one_rank_first_ends(case: str) -> None:
    *numbers, changes = UNEVEN[case]
    setup = server(*numbers, **changes)
    assert_all_end(play_beside_small_ones(setup, setup.max_model_len // 2, "rank"))


def assert_all_end(outcome: Outcome) -> None:
    """Each request got an answer, and none was computed again and again for it."""
    assert not outcome.failure, outcome.failure
    assert outcome.reasons == {"length": 26}
    assert max(outcome.preemptions) <= 3


# What workers cannot read.


def test_a_request_that_is_kept_whole_and_never_fits_ends_with_an_error() -> None:
    """The front-end counts on an eviction, but the workers cannot read what the policy needs."""
    setup = server(ONE_RANK, 32, 1600, "snapkv", 0.1, has_w_o=False)
    outcome = play_beside_small_ones(setup, 1500, "random", answer=20, kv_eviction="criticalkv")
    assert not outcome.failure, outcome.failure
    assert outcome.reasons == {"error": 1, "length": 25}


@pytest.mark.parametrize(
    "flight", [{}, {"depth": 2, "asynchronous": True}, {"depth": 3, "asynchronous": True}]
)
def test_an_answer_that_ends_with_the_memory_is_delivered_to_its_last_token(flight: dict[str, Any]) -> None:
    """Steps that are scheduled before the outputs of earlier ones are known must not look for memory beyond the end."""
    options = {"policy": "snapkv", "budget": 96, "min_prompt": 256, "check": True}
    simulation = Simulation(Setup([(3, 4)], [12 * 6], 300, options=options, **flight))
    simulation.add(make_request("r", 6 * PAGE - 1, 5))
    simulation.run(40)
    assert simulation.reasons == {"r": "length"} and simulation.outputs == {"r": 2}
    assert simulation.preemptions == {"r": 0}


# Head-of-line blocking.


def first_steps(setup: Setup, prompts: list[int]) -> dict[str, int]:
    """Steps in which prompts are begun that arrive when one of 50,000 tokens is being read."""
    simulation = Simulation(setup)
    simulation.add(make_request("long", 50_000, 1))
    simulation.step()
    for index, prompt in enumerate(prompts):
        simulation.add(make_request(f"short{index}", prompt, 4))
    begun: dict[str, int] = {}
    for step in range(1, 60):
        for name in simulation.step().num_scheduled_tokens:
            begun.setdefault(name, step)
    del begun["long"]
    return begun


@pytest.mark.parametrize("flight", [{}, {"depth": 2, "asynchronous": True}], ids=["depth 1", "async"])
@pytest.mark.parametrize("policy", ["snapkv", "lava", "full"])
def test_short_prompts_begin_beside_a_long_one_that_vllm_holds_back(
    policy: str, flight: dict[str, Any]
) -> None:
    """The long prompt gets 1500 tokens of each step, so that others have 548."""
    pages = [4 * 4 * (50_000 // PAGE)]
    setup = Setup([(2, 2)], pages, 1 << 16, 2048, long_prefill=1500, options=None, **flight)
    prompts = [600, 500, 600, 1400, 40]
    theirs = first_steps(setup, prompts)
    ours = first_steps(dataclasses.replace(setup, options={"policy": policy, "min_prompt": 0}), prompts)
    assert len(theirs) == len(prompts) and max(theirs.values()) < 10
    late = {name: (ours.get(name), step) for name, step in theirs.items() if ours.get(name, 99) > step + 1}
    assert not late, f"begun in step (ours, vLLM's): {late}"
