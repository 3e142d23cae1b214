"""Under priorities nobody waits for who is less urgent, nor for who came later."""

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.scheduler.test_prefixes import check_end, document
from tests.engine.support.servers import PAGE, Setup, make_request
from tests.engine.support.simulation import Simulation

ROWS = 4
"""Of one rank with two layers and two KV heads."""


def server(pages: int = 4000, longest: int = 4096, **changes: Any) -> Setup:
    options = {"policy": "ada-snapkv", "budget": 0.2, "min_prompt": 0, "policies": "all"}
    return Setup([(2, 2)], [pages], longest, priority=True, options=options, **changes)


def first_token(simulation: Simulation, name: str, limit: int) -> int:
    """Steps until a request has its first token."""
    for step in range(1, limit + 1):
        simulation.step()
        if simulation.outputs[name]:
            return step
    raise AssertionError(f"{name} has no token after {limit} steps")


def readers(first_priority: int) -> Simulation:
    """Of one document: the first reads 64 tokens a step when the second one, with priority 0, arrives."""
    simulation = Simulation(server(prefix_caching=True, max_num_batched_tokens=1024, long_prefill=64))
    plain = {"kv_eviction": "full"}
    simulation.add(make_request("first", document(0, 2000), 4, plain, first_priority, arrival=1.0))
    simulation.step()
    simulation.add(make_request("second", [*document(0, 1900), 7], 4, plain, priority=0, arrival=2.0))
    simulation.step()
    return simulation


def test_nobody_waits_for_a_reader_that_is_less_urgent() -> None:
    simulation = readers(first_priority=9)
    assert "second" in simulation.ledger.accounts
    simulation.run(500)
    check_end(simulation)


def test_who_comes_later_waits_for_a_reader() -> None:
    """The control: between equals the second one reads nothing that the first one leaves."""
    simulation = readers(first_priority=0)
    assert "second" not in simulation.ledger.accounts
    simulation.run(500)
    assert simulation.prefilled < 2000 + 200


@pytest.mark.parametrize("policy", ["kvzip", "ada-snapkv"])
def test_who_reads_a_prefix_is_as_urgent_as_who_waits_for_it(policy: str) -> None:
    """Others of a priority between the two arrive in every step, and repeat their prompts."""
    simulation = Simulation(server(prefix_caching=True, max_num_batched_tokens=2048))
    asked = {"kv_eviction": policy, "kv_prefix_len": 1500}
    simulation.add(make_request("patient", [*document(0, 1500), 1, 2], 4, asked, priority=9))
    simulation.step()
    for number in range(4):
        others = {"kv_eviction": policy}
        simulation.add(make_request(f"early {number}", document(number + 1, 900), 4, others, priority=5))
    simulation.step()
    simulation.add(make_request("urgent", [*document(0, 1500), 3, 4], 4, asked, priority=0))
    for number in range(60):
        simulation.add(make_request(f"other {number}", document(number + 9, 900), 4, others, priority=5))
        simulation.step()
        if simulation.outputs["urgent"]:
            break
    assert simulation.outputs["urgent"] and number < 20
    assert simulation.ledger.requests.in_flight["urgent"].priority == 0
    simulation.run(2000)


@pytest.mark.parametrize("ours", [True, False])
def test_room_for_answers_of_the_less_urgent_is_no_reason_to_wait(ours: bool) -> None:
    """Memory for both prompts, but not for all of the less urgent answer; vLLM alone admits the urgent one at once."""
    pages = ROWS * (2 * 640 + 200) // PAGE
    setup = server(pages, 1024, max_num_batched_tokens=1024)
    setup = setup if ours else replace(setup, options=None)
    simulation = Simulation(setup)
    plain = {"kv_eviction": "full"} if ours else None
    simulation.add(make_request("patient", 600, 300, plain, priority=9))
    simulation.step()
    simulation.add(make_request("urgent", 600, 20, plain, priority=0))
    assert first_token(simulation, "urgent", 5) <= 2
    simulation.run(3000)
    assert simulation.outputs == {"patient": 300, "urgent": 20}


@pytest.mark.parametrize("priorities", [False, True])
def test_priorities_count_only_where_vllm_looks_at_them(priorities: bool) -> None:
    """First come, first served: whoever asks to be urgent waits for the memory of the answer before it like anybody."""
    setup = replace(server(ROWS * (2 * 640 + 200) // PAGE, 1024), priority=priorities)
    waited = []
    for priority in (0, -9):
        simulation = Simulation(setup)
        plain = {"kv_eviction": "full"}
        simulation.add(make_request("first", 600, 300, plain))
        simulation.step()
        simulation.add(make_request("second", 600, 20, plain, priority))
        waited.append(first_token(simulation, "second", 1000))
        simulation.run(3000)
        assert simulation.outputs == {"first": 300, "second": 20}
    alike, urgent = waited
    assert alike > 10
    assert urgent <= 3 if priorities else urgent == alike
