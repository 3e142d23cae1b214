"""Prompts that begin alike, in vLLM's scheduler: who reads what, who waits, and what it must not cost anybody."""

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.scheduler.test_prefixes import check_end, document, steps
from tests.engine.support.chains import check_exact
from tests.engine.support.servers import PAGE, Setup, flights, make_request
from tests.engine.support.simulation import Simulation
from vllm_kvevict.engine.request_options import plan_for
from vllm_kvevict.policies import available

POLICY = {"policy": "ada-snapkv", "budget": 0.2, "min_prompt": 0, "policies": "all"}


def server(**changes: Any) -> Setup:
    setup = Setup([(2, 2)], [4 * 400], max_model_len=4096, prefix_caching=True, options=POLICY)
    return replace(setup, **changes)


def ask(
    name: str,
    prompt: list[int],
    max_tokens: int = 4,
    salt: str | None = None,
    priority: int = 0,
    **fields: Any,
):
    return make_request(name, prompt, max_tokens, fields or None, salt=salt, priority=priority)


def fields_of(policy: str) -> dict[str, Any]:
    return {"kv_eviction": policy, **({} if policy == "full" else {"kv_budget": 0.3})}


def served(simulation: Simulation, *requests: Any) -> int:
    """Run requests to their end; the tokens that were read of their prompts."""
    before = simulation.prefilled
    for request in requests:
        simulation.add(request)
    simulation.run(5000)
    check_exact(simulation)
    return simulation.prefilled - before


WINDOW = 32
"""Of most policies, in tokens: it is read in any case."""


@pytest.mark.parametrize("policy", available())
def test_a_second_question_reads_what_is_its_own(policy: str) -> None:
    """The last page of a document that is asked again lies within the window of some policies."""
    simulation = Simulation(server())
    fields = fields_of(policy)
    first, second = document(0, 640), document(0, 600) + document(1, 5)
    assert served(simulation, ask("a", first, **fields)) == 640
    read = served(simulation, ask("b", second, **fields))
    plan = plan_for(simulation.ledger.options, 605, fields)
    window = max(1, plan.config.window_for(605)) if plan.prompt else 1
    hits = policy not in ("take", "h2o", "compactor", "expected-attention")
    assert read == 605 - hits * (min(600, 605 - window) // PAGE * PAGE)
    check_end(simulation)


@flights
@pytest.mark.parametrize("chunk", [128, 2048])
@pytest.mark.parametrize("policy", ["full", "ada-snapkv", "lava", "kvzip"])
def test_samples_of_one_prompt_read_it_once(policy: str, chunk: int, flight: dict[str, Any]) -> None:
    simulation = Simulation(server(max_num_batched_tokens=chunk, **flight))
    fields = fields_of(policy)
    prompt = document(0, 1000)
    read = served(simulation, *(ask(f"s{index}", prompt, 20, **fields) for index in range(8)))
    assert read <= 1000 + 7 * (1000 - (1000 - WINDOW) // PAGE * PAGE)
    assert simulation.workers.shares == 7
    check_end(simulation)


def test_a_chat_reads_each_turn_once() -> None:
    for policy, again in (("full", 0), ("ada-snapkv", 1)):
        simulation, prompt, answer = Simulation(server()), document(0, 320), 64
        fields = fields_of(policy)
        for turn in range(5):
            request = ask(f"t{turn}", prompt, answer, **fields)
            read = served(simulation, request)
            # Of what was read before, the rest of a page; of an evicted turn the window and the answer as well.
            most = 320 + 2 * PAGE + again * (answer + WINDOW)
            assert read <= most, (policy, turn)
            prompt = list(request.all_token_ids) + document(turn + 1, 256)
        check_end(simulation)


def test_another_salt_reads_for_itself_and_prompt_logprobs_all() -> None:
    simulation, prompt = Simulation(server()), document(0, 640)
    assert served(simulation, ask("a", prompt, salt="a")) == 640
    assert served(simulation, ask("b", prompt, salt="b")) == 640
    assert served(simulation, ask("c", prompt, salt="a")) < 640
    asked = ask("d", prompt, salt="a")
    asked.sampling_params.prompt_logprobs = 1
    asked.skip_reading_prefix_cache = True
    assert served(simulation, asked) == 640
    check_end(simulation)


def test_a_compressed_prefix_comes_first_and_an_uncompressed_one_shortens_its_reading() -> None:
    simulation, text = Simulation(server()), document(0, 640)
    assert served(simulation, ask("a", text + document(1, 30))) == 670
    prefix = {"kv_prefix_len": 640, "kv_budget": 0.3}
    assert served(simulation, ask("b", text + document(2, 30), **prefix)) == 670 - 608
    assert served(simulation, ask("c", text + document(3, 30), **prefix)) == 30
    assert simulation.workers.hits == 1
    check_end(simulation)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    simulation = Simulation(server(max_num_batched_tokens=256, long_prefill=128))
    text = document(0, 3000)
    simulation.add(ask("long", text))
    steps(simulation, 1)
    simulation.add(ask("short", text[:64] + document(1, 60)))
    steps(simulation, 2)
    assert "short" in simulation.ledger.accounts or "short" not in simulation.scheduler.requests
    simulation.run(5000)


def unlike(seed: int, **changes: Any) -> tuple[Setup, list[Any]]:
    """A load without shared prompts in a pool that is short."""
    choose = random.Random(seed)
    setup = server(
        pages=[4 * choose.randint(40, 120)],
        max_model_len=1024,
        max_num_batched_tokens=choose.choice([128, 512, 2048]),
        **changes,
    )
    arguments = [
        (f"r{index}", document(index, choose.randint(60, 900)), choose.choice([4, 60, 120]))
        for index in range(12)
    ]
    return setup, arguments


def began(setup: Setup, arguments: list[Any]) -> tuple[Simulation, dict[str, int], int]:
    """Run requests to their end: the step at which each of them began, and the number of steps."""
    simulation, first, count = Simulation(setup), {}, 0
    for arguments_of_one in arguments:
        simulation.add(ask(*arguments_of_one))
    while simulation.scheduler.has_requests() and count < 5000:
        count += 1
        for new in simulation.step().scheduled_new_reqs:
            first.setdefault(new.req_id, count)
    return simulation, first, count


@pytest.mark.parametrize("depth, asynchronous", [(1, False), (2, True)])
def test_nobody_waits_or_is_preempted_for_what_is_stored(depth: int, asynchronous: bool) -> None:
    """Prompts that have nothing in common begin as early as without the cache, and none is preempted more often."""
    stored = 0
    for seed in range(40):
        setup, arguments = unlike(seed, depth=depth, asynchronous=asynchronous)
        plain, first, count = began(replace(setup, prefix_caching=False), arguments)
        caching, first_with, count_with = began(setup, arguments)
        assert {name: step for name, step in first_with.items() if step > first[name]} == {}, seed
        assert count_with <= count, seed
        assert sum(caching.preemptions.values()) <= sum(plain.preemptions.values()), seed
        stored += len(caching.ledger.shared.uncompressed.segments)
    assert stored
