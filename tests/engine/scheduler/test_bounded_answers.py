"""The account of answers that are evicted: exact, or a bound, whatever is in flight and whoever is preempted."""

import dataclasses
import random
from typing import Any

import pytest

from tests.engine.scheduler.test_prefixes import document
from tests.engine.support.servers import PAGE, TOKEN, Setup, make_request
from tests.engine.support.simulation import Simulation
from vllm_kvevict.engine.decoding import LEAST_BUDGET

WAYS: dict[str, dict[str, Any]] = {
    "in step": {},
    "ahead": {"depth": 2, "asynchronous": True},
    "three ahead": {"depth": 3, "asynchronous": True},
    "stages ahead": {"shapes": [(2, 2), (2, 2)], "pipeline": True, "depth": 3, "asynchronous": True},
    "tensor ranks": {"shapes": [(4, 1), (4, 1)], "depth": 2, "asynchronous": True},
    "tensor stages": {
        "shapes": [(1, 1)] * 4,
        "pipeline": True,
        "tensor": 2,
        "depth": 3,
        "asynchronous": True,
    },
}

CHUNKED = {"policy": "take", "budget": 64, "take_chunk": 64, "take_probe": 16, "take_warmup_layers": 0}
"""Prompts may be of any length, since they are evicted chunk by chunk."""


def server(pages: int, way: str = "in step", **options: Any) -> Setup:
    """A server with answers of 8 entries that are evicted with every token, unless options say more.

    Args:
        pages: of each row, as if a single request had all of them.
    """
    options = {
        "policy": "full",
        "min_prompt": 0,
        "policies": "all",
        "check": True,
        "decode_budget": 8,
        "decode_interval": 1,
        "decode_window": 4,
        **options,
    }
    settings = {"shapes": [(4, 2)], "max_num_batched_tokens": 64, **WAYS[way]}
    rows = [layers * heads for layers, heads in settings["shapes"]]
    return Setup(
        pages=[pages * count for count in rows], max_model_len=32 * PAGE, options=options, **settings
    )


def run(simulation: Simulation) -> None:
    """To the end, where nothing is held or known any more."""
    simulation.run(20000)
    ledger = simulation.ledger
    assert not any(ledger.books.used) and not any(ledger.books.promised) and ledger.requests.is_empty


FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"kv_eviction": "snapkv", "kv_budget": 40},
    {"kv_eviction": "ada-snapkv", "kv_budget": 50},
    {"kv_eviction": "lava", "kv_budget": 50},
    {"kv_eviction": "take", "kv_budget": 40},
    {"kv_decode_budget": 0},
    {"kv_decode_budget": 33},
)


@pytest.mark.parametrize("policy", ["snapkv", "ada-snapkv"])
@pytest.mark.parametrize("way", WAYS)
def test_replays_with_steps_in_flight(way: str, policy: str) -> None:
    """All are preempted again and again, so that steps in flight evict prompt and answer at once; counts of workers
    and ledger are compared after each step, and nobody holds more than the ledger allows."""
    for interval in (1, 7):
        choose = random.Random(f"{way} {policy} {interval}")
        options = {"decode_policy": policy, "decode_interval": interval}
        simulation = Simulation(server(40, way, **options))
        for index, fields in enumerate(FIELDS):
            simulation.add(make_request(f"r{index}", choose.randrange(50, 120), 60, fields))
        for _ in range(20):
            for _ in range(choose.randrange(1, 12)):
                if simulation.scheduler.has_requests():
                    simulation.step()
            simulation.reset(hard=True)
        run(simulation)
        assert simulation.outputs == {f"r{index}": 60 for index in range(len(FIELDS))}
        assert sum(simulation.preemptions.values()) > 50


def check_exact(prompt: int, interval: int, way: str) -> None:
    """Whatever is in flight, the ledger knows what an answer of a uniform policy holds, to the page."""
    budget, rows = 8, 8
    simulation = Simulation(server(40, way, decode_policy="snapkv", decode_interval=interval))
    simulation.add(make_request("r", prompt, 60))
    while simulation.scheduler.has_requests():
        simulation.step()
        account = simulation.ledger.accounts.get("r")
        if account is None or account.is_reading:
            continue
        answer = account.tokens - prompt
        since = (answer - budget) % interval if answer >= budget + interval else answer - budget
        # Until an eviction is reported its step still holds all.
        may = {budget + since} | ({budget + interval} if answer >= budget + interval and not since else set())
        assert account.held[0] in {rows * -(-(prompt + entries) // PAGE) for entries in may}
    run(simulation)


@pytest.mark.parametrize("way", ["in step", "ahead", "three ahead"])
def test_counts_of_uniform_policies_are_exact_after_a_dispatch(way: str) -> None:
    for prompt in range(81, 93, 2):
        for interval in (1, 5):
            check_exact(prompt, interval, way)


@pytest.mark.parametrize("fields", [{}, {"kv_eviction": "snapkv", "kv_budget": 40}], ids=["whole", "evicted"])
@pytest.mark.parametrize("policy", ["snapkv", "ada-snapkv"])
@pytest.mark.parametrize("size", [(8, 1), (33, 31)])
def test_admission_promises_enough_on_one_rank(policy: str, size: tuple[int, int], fields: dict) -> None:
    """Answers of any length begin only where they fit, so nobody is preempted, in pools of any size."""
    budget, interval = size
    most = 0
    for seed in range(3):
        choose = random.Random(f"{policy} {size} {seed}")
        options = {"decode_policy": policy, "decode_budget": budget, "decode_interval": interval}
        simulation = Simulation(server(32 + choose.randrange(16), **options), seed)
        for index in range(8):
            prompt, answer = choose.randrange(45, 200), choose.choice((5, 50, 200))
            simulation.add(make_request(f"r{index}", prompt, answer, fields))
        run(simulation)
        assert not any(simulation.preemptions.values()), (seed, simulation.preemptions)
        most = max(most, simulation.most_running)
    assert most > 3


def test_answers_end_where_memory_does_only_if_they_are_kept() -> None:
    """The pool holds a prompt and little more: an answer that is evicted is as long as may be."""
    for budget, length in ((8, 400), (0, 6 * PAGE - 100 + 1)):
        setup = server(6, policy="snapkv", budget=0.1)
        changes = {"max_model_len": 16 * PAGE, "max_num_batched_tokens": 16 * PAGE}
        simulation = Simulation(dataclasses.replace(setup, **changes))
        fields = {"kv_eviction": "full", "kv_decode_budget": budget}
        simulation.add(make_request("r", 100, 400, fields))
        run(simulation)
        assert simulation.outputs == {"r": length} and simulation.preemptions == {"r": 0}


def test_who_waits_for_the_ring_blocks_nobody_who_needs_none() -> None:
    """Nobody overtakes it in what it waits for or needs besides: the reserve, for a prompt that is read in parts."""
    options = {"policy": "h2o", "budget": 40, "decode_policy": "ada-snapkv", "decode_interval": 20}
    simulation = Simulation(dataclasses.replace(server(200, **options), ring_parts=1))
    whole, kept = {"kv_eviction": "full"}, {"kv_decode_budget": 0}
    simulation.add(make_request("has it", 40, 60, whole))
    simulation.add(make_request("needs both", 300, 60))
    simulation.add(make_request("needs the reserve", 300, 60, kept))
    simulation.add(make_request("needs it", 40, 60, whole))
    simulation.add(make_request("needs none", 40, 5, {**whole, **kept}))
    for index in range(40):  # a stream of such requests
        simulation.add(make_request(f"later {index}", 300, 5, kept))
        simulation.add(make_request(f"last {index}", 40, 60, whole))
    names: list[str] = []
    while simulation.scheduler.has_requests():
        admissions = simulation.step().kv_connector_metadata.admissions
        names += [admission.request_id for admission in admissions]
    run(simulation)
    assert names[:5] == ["has it", "needs none", "needs both", "needs the reserve", "later 0"]
    order = [name for name in names if name.startswith(("needs it", "last"))]
    assert order == ["needs it", *(f"last {index}" for index in range(40))]


def alone(way: str, prompt: int, answer: int, budget: int, interval: int, **changes: Any) -> Simulation:
    """A server with one request, whose answer is evicted by heads that compete for all of its budget.

    Args:
        changes: of the server's setup.
    """
    params = {"policy_params": {"ada-snapkv": {"alpha": 0}}, "decode_policy": "ada-snapkv", **CHUNKED}
    setup = server(32, way, decode_budget=budget, decode_interval=interval, **params)
    setup = dataclasses.replace(setup, max_model_len=64 * PAGE, max_num_batched_tokens=2048, **changes)
    simulation = Simulation(setup)
    simulation.add(make_request("r", prompt, answer, {"kv_eviction": "full"}))
    return simulation


RANKS_AHEAD = [("tensor ranks", 1), ("tensor ranks", 5), ("tensor stages", 2), ("tensor stages", 5)]
"""With intervals that are shorter than a report's way back, and longer."""


@pytest.mark.parametrize("way, interval", RANKS_AHEAD)
def test_ranks_that_share_an_answer_have_room_for_it_in_pools_of_its_bound(way: str, interval: int) -> None:
    """Though the ledger hears only steps later what each has dropped, when it may be evicted again already."""
    for prompt, answer in [(64, 1900), *((prompt, 200) for prompt in range(64, 72))]:
        simulation = alone(way, prompt, answer, 47, interval)
        ledger = simulation.ledger
        plan = ledger.plan(simulation.scheduler.requests["r"])
        pages = ledger.bounds.after_eviction(plan, prompt + answer)
        simulation = alone(way, prompt, answer, 47, interval, pages=pages)
        run(simulation)
        assert simulation.outputs == {"r": answer} and simulation.preemptions == {"r": 0}


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_prompt_of_one_token_with_drafts_up_to_its_first_eviction(beyond: int) -> None:
    """vLLM reads it together with placeholders for drafts, all or none; a server with more of them is refused."""
    least = {"decode_budget": LEAST_BUDGET, "decode_window": 1, "decode_interval": 1}
    setup = dataclasses.replace(server(32, **least), drafts=LEAST_BUDGET + beyond)
    simulation = Simulation(setup)
    simulation.add(make_request("long", 40, 60))
    simulation.step()
    simulation.add(make_request("short", 1, 30))
    if beyond:
        with pytest.raises(AssertionError):
            run(simulation)
    else:
        run(simulation)
        assert simulation.outputs == {"long": 60, "short": 30}
        assert ("short", 1, 1 + LEAST_BUDGET + 1) in simulation.workers.evictions


@pytest.mark.parametrize("way", ["in step", "ahead", "three ahead"])
@pytest.mark.parametrize("in_flight", [False, True], ids=["between steps", "while a step runs"])
def test_an_answer_that_ends_while_it_is_evicted_leaves_what_was_not(way: str, in_flight: bool) -> None:
    """Steps that were dispatched before its end have evicted it; the next turn goes on behind the prompt alone."""
    for steps in range(28, 40):
        setup = dataclasses.replace(server(200, way, decode_interval=24), prefix_caching=True)
        simulation = Simulation(setup)
        asked = document(0, 40)
        simulation.add(make_request("first", asked, 60))
        for _ in range(steps):
            simulation.step()
        if in_flight:
            simulation.dispatch()
        simulation.abort("first")
        run_to_the_end(simulation)
        simulation.add(make_request("next", [*asked, *[TOKEN] * 50, 7], 4))
        run_to_the_end(simulation)


def run_to_the_end(simulation: Simulation) -> None:
    """Until nothing runs; what is cached stays."""
    simulation.run(2000)
    assert not simulation.ledger.accounts
