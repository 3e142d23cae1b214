"""Random loads of every kind: nobody holds more than is allowed, all requests end, and little is computed twice.

Those of conversations are in test_branching.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.scheduler.test_prefixes import check_end as nothing_is_left
from tests.engine.support.chains import Watched
from tests.engine.support.hostile_loads import with_salts
from tests.engine.support.loads import Ask, Load, mixed, play, repeated, staged, tight, with_policy
from tests.engine.support.loads_in_turns import with_turns
from tests.engine.support.servers import PAGE, TOKEN, Setup, options_of
from tests.engine.support.simulation import Simulation
from vllm_kvevict.engine.request_options import RENDERED, plan_for
from vllm_kvevict.policies import cuts
from vllm_kvevict.schedules.registry import schedule_of
from vllm_kvevict.schedules.repeat_prompts import HINT, MOST_EXTRA_ROWS

SERVERS = {"mixed": mixed, "staged": staged, "tight": tight}
TAKE = {"take_chunk": 128, "take_probe": 16, "take_warmup_layers": 1}


def loads() -> dict[str, Callable[[int], Load]]:
    """By name, how a seed becomes a load."""
    found = {
        "mixed": mixed,
        "staged": staged,
        "chunks": lambda seed: with_policy(mixed(seed), "take", budget=64, **TAKE),
    }
    for name, make in SERVERS.items():
        found[f"{name}_repeated"] = lambda seed, make=make: repeated(
            make(seed), seed, budget=64, window=(0, 24)[seed // 2 % 2]
        )
        found[f"{name}_turns"] = lambda seed, make=make: with_turns(make(seed), seed)
        found[f"{name}_turns_repeated"] = lambda seed, make=make: repeated(with_turns(make(seed), seed), seed)
    return found


LOADS = loads()


def tens(seeds: int) -> list[Any]:
    """The first of each ten seeds; all but the first ten take their time."""
    return [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(10, seeds, 10))]


def watched(load: Load, seed: int) -> Watched:
    """Play a load; nobody may hold more than was promised."""
    return play(load, seed, (load.setup.options or {})["policy"] == "kvzip", Watched)


def check_asked(load: Load, simulation: Simulation) -> None:
    """Everybody got an answer of the length asked for, and was evicted where it should be, once in an admission."""
    options, evictions = options_of(load.setup), simulation.workers.evictions
    assert len(set(evictions)) == len(evictions)
    plans = {ask.name: plan_for(options, ask.prompt, ask.extra_args) for ask in load.asks}
    for name, epoch, position in evictions:
        assert position in {place for part in plans[name].parts for place in part.positions}
        assert 1 <= epoch <= simulation.preemptions[name] + 1
    for ask in load.asks:
        assert ask.name in load.aborted or simulation.outputs[ask.name] == ask.output


def check_end(load: Load, simulation: Simulation) -> None:
    """All prompts were evicted to their end, and nobody left anything behind."""
    check_asked(load, simulation)
    evicted = {(name, position) for name, _, position in simulation.workers.evictions}
    for ask in load.asks:
        plan = plan_for(options_of(load.setup), ask.prompt, ask.extra_args)
        if ask.name not in load.aborted and plan.prompt is not None:
            # Where more is to be done than read the prompt, one that ends with its first token is not evicted.
            waits = load.setup.pipeline or schedule_of(plan.prompt).repeats_prompt
            assert (waits and ask.output == 1) or (ask.name, plan.evicted_at) in evicted
    nothing, ledger = [0] * len(load.setup.shapes), simulation.ledger
    assert (ledger.books.used, ledger.books.promised) == (nothing, nothing)
    assert ledger.requests.is_empty and not ledger.outbox.answered


def evicted_in_parts(load: Load, simulation: Any) -> int:
    """How many admissions had more than one eviction of their prompt."""
    times: dict[tuple[str, int], int] = {}
    prompts = {ask.name: ask.prompt for ask in load.asks}
    for name, epoch, tokens in simulation.workers.evictions:
        assert tokens <= prompts[name]
        times[name, epoch] = times.get((name, epoch), 0) + 1
    return sum(count > 1 for count in times.values())


@pytest.mark.parametrize("first", tens(40))
@pytest.mark.parametrize("name", LOADS)
def test_loads(name: str, first: int, monkeypatch) -> None:
    """Stages that decide together need several rounds; no request goes on in between, however little room there is."""
    monkeypatch.setattr(cuts, "MOST_KEYS", 16)
    work = ideal = in_parts = 0
    rounds = 1
    for seed in range(first, first + 10):
        load = LOADS[name](seed)
        simulation = watched(load, seed)
        check_end(load, simulation)
        assert max(simulation.preemptions.values()) <= 4
        work, ideal = work + simulation.prefilled, ideal + load.ideal_work
        in_parts += evicted_in_parts(load, simulation)
        rounds = max(rounds, simulation.workers.most_rounds)
    assert name != "mixed" or work <= 1.25 * ideal
    assert name != "staged" or rounds >= 3
    assert "turns" not in name or in_parts > 30


def test_loads_of_shared_documents() -> None:
    """Segments and compressed prefixes compete for the same pages."""
    shares = hits = 0
    for seed in range(10):
        simulation = watched(with_salts(mixed(seed), seed), seed)
        nothing_is_left(simulation)
        shares, hits = shares + simulation.workers.shares, hits + simulation.workers.hits
    assert shares > 20 and hits > 5


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 32, 64])
def test_tight_loads_preempt_less_than_vllm_does(first: int) -> None:
    """Outputs far beyond the reserve must preempt; still it happens less often than without eviction.

    Seeds 35 and 69 have ranks that keep more of a replay than there was room to promise them.
    """
    ours, theirs, ideal = [], [], 0
    for seed in range(first, first + 8):
        load = tight(seed)
        simulation = play(load, seed)
        check_end(load, simulation)
        # Who was preempted is expected to double its output, so the wrong guesses are at most logarithmic.
        assert max(simulation.preemptions.values()) <= 5
        stock = dataclasses.replace(load, setup=dataclasses.replace(load.setup, options=None))
        ours.append(simulation)
        theirs.append(play(stock, seed))
        ideal += load.ideal_work
    preemptions = [sum(sum(each.preemptions.values()) for each in some) for some in (ours, theirs)]
    assert preemptions[0] < preemptions[1]
    assert sum(s.steps for s in ours) < sum(s.steps for s in theirs)
    assert sum(s.prefilled for s in ours) <= 2 * ideal


def equal_parts() -> Load:
    """Prompts of 12 parts of 100 tokens, scheduled ahead, in a pool that holds one of them whole."""
    options = {"policy": "ada-snapkv", "budget": 0.1, "min_prompt": 0, "min_turn": 1}
    setup = Setup([(2, 2)], [4 * -(-1300 // PAGE)], 1300, 256, 8, depth=3, asynchronous=True, options=options)
    turns = {"kv_turns": list(range(100, 1300, 100))}
    return Load(setup, [Ask(0, f"r{index}", 1200, 8, turns, 0) for index in range(6)])


def repeated_behind_sinks() -> Load:
    """The same prompts, repeated in as many rows as may be, on a server whose first tokens are as many as a part's."""
    load = equal_parts()
    rows = {RENDERED: {"repeat": {"before": [TOKEN] * (MOST_EXTRA_ROWS - HINT)}}}
    asks = [dataclasses.replace(ask, extra_args={**ask.extra_args, **rows}) for ask in load.asks]
    # A page behind the longest prompt for each chunk, its rows and what they see.
    setup = dataclasses.replace(load.setup, max_model_len=1600, pages=[4 * -(-2200 // PAGE)])
    params = {"kvzip_sees": "chunk", "kvzip_chunk": 64, "sinks": 200, "budget": 0.7}
    return with_policy(dataclasses.replace(load, setup=setup, asks=asks), "kvzip", **params)


def test_what_repeats_of_later_parts_see_is_counted() -> None:
    load = repeated_behind_sinks()
    simulation = watched(load, 1)
    check_end(load, simulation)
    assert evicted_in_parts(load, simulation) == len(load.asks)


def test_equal_parts_need_little_more_than_one_part() -> None:
    load = equal_parts()
    simulation = watched(load, 1)
    check_end(load, simulation)
    assert evicted_in_parts(load, simulation) == len(load.asks)
