"""The cache is reset while requests run: what they read before it never reaches others, and the answer says the truth.

The simulated workers note how many resets there were before a request's first token was read, and fail where a later
one begins with what was read before the last reset.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.scheduler.test_prefixes import check_end, document, steps
from tests.engine.scheduler.test_shared_prefixes import ask, fields_of, served, server
from tests.engine.support.servers import PAGE, Setup, flights
from tests.engine.support.simulation import Simulation


def second_reads_all(simulation: Simulation, prompt: list[int], **fields: Any) -> None:
    """A later request finds nothing; one after it finds what that one has read."""
    assert served(simulation, ask("later", prompt, **fields)) >= len(prompt)
    assert served(simulation, ask("last", prompt, **fields)) <= 2 * PAGE
    check_end(simulation)


@pytest.mark.parametrize("what", ["soft reset", "hard reset", "abort"])
@flights
@pytest.mark.parametrize("policy", ["full", "ada-snapkv", "lava", "kvzip", "take"])
def test_a_prompt_that_is_being_read(policy: str, flight: dict[str, Any], what: str) -> None:
    """After any step: it is read by five, evicted, and then answered."""
    for step in range(1, 14):
        simulation = Simulation(server(max_num_batched_tokens=256, **flight))
        prompt, fields = document(0, 1280), fields_of(policy)
        simulation.add(ask("reader", prompt, 8, **fields))
        steps(simulation, step)
        if what == "abort":
            simulation.add(ask("waiting", prompt, 8, **fields))
            simulation.abort("reader")
        else:
            simulation.reset(hard=what == "hard reset")
        simulation.add(ask("other", prompt, 8, **fields))
        simulation.run(5000)
        assert {simulation.outputs[name] for name in simulation.outputs if name != "reader"} == {8}
        assert what == "abort" or simulation.outputs["reader"] == 8
        check_end(simulation)


@flights
@pytest.mark.parametrize("policy", ["full", "ada-snapkv", "kvzip"])
def test_later_requests_read_what_was_read_before_the_reset(policy: str, flight: dict[str, Any]) -> None:
    simulation = Simulation(server(max_num_batched_tokens=256, **flight))
    prompt, fields = document(0, 1024 + PAGE), fields_of(policy)
    simulation.add(ask("reader", prompt, 8, **fields))
    steps(simulation, 2)
    simulation.reset()
    simulation.run(5000)
    assert not len(simulation.ledger.shared.uncompressed.segments)
    second_reads_all(simulation, prompt, **fields)


@flights
@pytest.mark.parametrize("tokens", [20, 5 * PAGE + 20], ids=["no unit yet", "some units"])
def test_an_answer_that_is_being_written(tokens: int, flight: dict[str, Any]) -> None:
    """When it ends it leaves what it has read and written; not after a reset, whatever of it was left before."""
    simulation = Simulation(server(**flight))
    request = ask("writer", document(0, tokens), 3 * PAGE, kv_eviction="full")
    simulation.add(request)
    steps(simulation, 6)
    assert simulation.outputs["writer"]
    simulation.reset()
    simulation.run(5000)
    assert not len(simulation.ledger.shared.uncompressed.segments)
    second_reads_all(simulation, list(request.all_token_ids), kv_eviction="full")


# What a reset answers.


def test_who_only_reads_is_no_reason_to_say_that_something_is_in_use() -> None:
    simulation = Simulation(server(max_num_batched_tokens=256))
    simulation.add(ask("reader", document(0, 800), 8))
    steps(simulation, 2)
    assert simulation.reset()
    steps(simulation, 8)
    assert simulation.reset() and not simulation.workers.segments
    simulation.run(5000)
    check_end(simulation)


def test_what_a_request_uses_to_its_end_is_in_use_until_then() -> None:
    simulation = Simulation(server())
    simulation.add(ask("whole", document(0, 640), 20, kv_eviction="full"))
    steps(simulation, 3)
    assert not simulation.reset()
    assert not simulation.reset()
    simulation.run(5000)
    assert simulation.reset() and not len(simulation.ledger.shared.uncompressed.segments)
    check_end(simulation)


@pytest.mark.parametrize("questions", [1, 2])
def test_a_compressed_prefix_is_in_use_if_several_share_it(questions: int) -> None:
    """The pages of a single request become its own."""
    simulation = Simulation(server())
    for index in range(questions):
        prompt = document(0, 600) + document(index + 1, 30)
        simulation.add(ask(f"d:{index}", prompt, 20, kv_prefix_len=600))
    steps(simulation, 6)
    (prefix,) = simulation.ledger.shared.compressed
    assert len(prefix.borrowers) == questions
    assert simulation.reset() == (questions == 1)
    simulation.run(5000)
    check_end(simulation)


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@pytest.mark.parametrize("policy", ["ada-snapkv", "kvzip"])
def test_a_prefix_that_is_being_stored_is_in_use_by_who_stores_it(
    policy: str, hard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_kvevict.engine.scheduler.shared.uncompressed.MOST_SEGMENTS", 0)
    simulation = Simulation(server(depth=3))
    fields = {**fields_of(policy), "kv_prefix_len": 600}
    simulation.add(ask("d:0", document(0, 600) + document(1, 30), 20, **fields))
    while not simulation.ledger.shared.compressed.awaits_reports:
        simulation.step()
    assert simulation.reset(hard) == hard
    simulation.run(5000)
    check_end(simulation)


# What goes with new weights.


def short_of_memory() -> Setup:
    """A server on which an answer of 768 tokens has no room beside what is kept of 256."""
    options = {"policy": "snapkv", "budget": 0.4, "min_prompt": 0, "check": True}
    return Setup([(2, 2)], [4 * 24], max_model_len=1024, options=options)


@flights
def test_limits_and_what_was_kept_go_when_all_that_run_are_preempted(flight: dict[str, Any]) -> None:
    simulation = Simulation(replace(short_of_memory(), **flight))
    request = ask("r", document(0, 256), 768)
    simulation.add(request)
    while not simulation.outputs["r"]:
        simulation.step()
    steps(simulation, 3)
    limit, kept = request.max_tokens, simulation.ledger.requests.kept["r"]
    assert limit < 700
    simulation.reset()
    assert request.max_tokens == limit and simulation.ledger.requests.kept["r"] is kept
    assert simulation.reset(hard=True)
    assert request.max_tokens == 768 and not simulation.ledger.requests.kept
    steps(simulation, 4)
    assert request.max_tokens < 700 and simulation.ledger.requests.kept["r"] is not kept
    simulation.run(5000)
    assert simulation.reasons == {"r": "length"} and 600 < simulation.outputs["r"] < 700
    assert not simulation.ledger.requests.kept
    check_end(simulation)
