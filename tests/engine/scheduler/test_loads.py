"""Random loads whose prompts are evicted part by part: nothing holds more than is allowed, and all requests end."""

import dataclasses
from typing import Any

import pytest

from tests.engine.scheduler.test_scheduler import check_end, tens
from tests.engine.support.loads import Ask, Load, mixed, play, repeated, staged, tight, with_policy
from tests.engine.support.loads_in_turns import with_turns
from tests.engine.support.servers import PAGE, TOKEN, Setup
from tests.engine.support.simulation import Simulation
from vllm_kvevict.engine.config import REPEAT_ROWS
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.schedules import bounds
from vllm_kvevict.schedules.repeat_prompts import HINT, MOST_EXTRA_ROWS, RepeatPrompts

LOADS = {"mixed": mixed, "staged": staged, "tight": tight}


def evicted_in_parts(load: Load, simulation: Any) -> int:
    """How many admissions had more than one eviction of their prompt."""
    times: dict[tuple[str, int], int] = {}
    prompts = {ask.name: ask.prompt for ask in load.asks}
    for name, epoch, tokens in simulation.workers.evictions:
        assert tokens <= prompts[name]
        times[name, epoch] = times.get((name, epoch), 0) + 1
    return sum(count > 1 for count in times.values())


@pytest.fixture(autouse=True)
def nobody_holds_more_than_was_promised(monkeypatch) -> None:
    """While parts of it are to be read, by what was promised at any time: others were admitted beside that."""
    step, promised = Simulation.step, {}

    def checked(simulation: Simulation) -> Any:
        output = step(simulation)
        for name, account in simulation.ledger.accounts.items():
            if account.tokens < account.plan.evicted_at:
                before = promised.get((simulation, name, account.epoch), account.terms.peak)
                peak = [min(pair) for pair in zip(before, account.terms.peak, strict=True)]
                promised[simulation, name, account.epoch] = peak
                pairs = zip(account.held, peak, strict=True)
                assert all(held <= most for held, most in pairs), f"{name} holds more than was promised"
        return output

    monkeypatch.setattr(Simulation, "step", checked)


@pytest.mark.parametrize("first", tens(60))
@pytest.mark.parametrize("name", LOADS)
def test_loads(name: str, first: int) -> None:
    in_parts = 0
    for seed in range(first, first + 10):
        load = with_turns(LOADS[name](seed), seed)
        simulation = play(load, seed)
        check_end(load, simulation)
        assert max(simulation.preemptions.values()) <= 4
        in_parts += evicted_in_parts(load, simulation)
    assert in_parts > 30


@pytest.mark.parametrize("first", tens(20))
@pytest.mark.parametrize("name", LOADS)
def test_loads_that_are_repeated(name: str, first: int) -> None:
    in_parts = 0
    for seed in range(first, first + 10):
        load = repeated(with_turns(LOADS[name](seed), seed), seed)
        simulation = play(load, seed, repeats=True)
        check_end(load, simulation)
        assert max(simulation.preemptions.values()) <= 4
        in_parts += evicted_in_parts(load, simulation)
    assert in_parts > 30


def equal_parts() -> Load:
    """Prompts of 12 parts of 100 tokens, scheduled ahead, in a pool that holds one of them whole."""
    options = {"policy": "ada-snapkv", "budget": 0.1, "min_prompt": 0, "min_turn": 1}
    setup = Setup([(2, 2)], [4 * -(-1300 // PAGE)], 1300, 256, 8, depth=3, asynchronous=True, options=options)
    turns = {"kv_turns": list(range(100, 1300, 100))}
    return Load(setup, [Ask(0, f"r{index}", 1200, 8, turns, 0) for index in range(6)])


def repeated_behind_sinks() -> Load:
    """The same prompts, repeated in as many rows as may be, on a server whose first tokens are as many as a part's."""
    load = equal_parts()
    rows = {REPEAT_ROWS: RepeatPrompts(before=(TOKEN,) * (MOST_EXTRA_ROWS - HINT)).to_lists()}
    asks = [dataclasses.replace(ask, extra_args={**ask.extra_args, **rows}) for ask in load.asks]
    # A page behind the longest prompt for each chunk, its rows and what they see.
    setup = dataclasses.replace(load.setup, max_model_len=1600, pages=[4 * -(-2200 // PAGE)])
    params = {"kvzip_sees": "chunk", "kvzip_chunk": 64, "sinks": 200, "budget": 0.7}
    return with_policy(dataclasses.replace(load, setup=setup, asks=asks), "kvzip", **params)


def as_if_later_parts_saw_nothing_before_them(monkeypatch) -> None:
    monkeypatch.setattr("vllm_kvevict.schedules.repeat.MOST_SINKS", 0)


def as_if_they_saw_all_sinks(monkeypatch) -> None:
    monkeypatch.setattr("tests.engine.support.simulation.MOST_SINKS", 200)


def test_what_repeats_of_later_parts_see_is_counted() -> None:
    load = repeated_behind_sinks()
    simulation = play(load, 1, repeats=True)
    check_end(load, simulation)
    assert evicted_in_parts(load, simulation) == len(load.asks)


@pytest.mark.parametrize("mutate", [as_if_later_parts_saw_nothing_before_them, as_if_they_saw_all_sinks])
def test_repeats_that_see_more_than_was_counted_are_noticed(mutate, monkeypatch) -> None:
    """The controls."""
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=r"would hold .* pages, the ledger allows"):
        play(repeated_behind_sinks(), 1, repeats=True)


def as_if_nothing_was_kept(monkeypatch) -> None:
    monkeypatch.setattr(bounds.Entries, "and_of", lambda entries, phase, rank: entries)


def as_if_nothing_had_to_be_kept_since(monkeypatch) -> None:
    monkeypatch.setattr(bounds._Left, "grown", lambda left, more: left.before.pages)


def as_if_reports_came_at_once(monkeypatch) -> None:
    monkeypatch.setattr(Account, "must_wait", property(lambda account: account.is_undecided))


@pytest.mark.parametrize(
    "mutate", [as_if_nothing_was_kept, as_if_nothing_had_to_be_kept_since, as_if_reports_came_at_once]
)
def test_a_promise_that_is_too_small_is_noticed(mutate, monkeypatch) -> None:
    """The controls, on prompts of equal parts, which need little more than one part."""
    load = equal_parts()
    simulation = play(load, 1)
    check_end(load, simulation)
    assert evicted_in_parts(load, simulation) == len(load.asks)
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="was promised"):
        play(load, 1)
