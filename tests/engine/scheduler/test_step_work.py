"""The scheduler's work in a step depends neither on how many requests wait nor on how many prefixes are cached.

Work is counted in calls of functions, Python's and built-in ones, since seconds are one machine's.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest

from tests.engine.scheduler.test_prefixes import document
from tests.engine.support.servers import Setup, make_request
from tests.engine.support.simulation import Simulation
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.ledger import PageLedger
from vllm_kvevict.engine.scheduler.outbox import Outbox
from vllm_kvevict.engine.scheduler.shared.compressed import CompressedPrefixes
from vllm_kvevict.engine.scheduler.shared.segments import SegmentCache
from vllm_kvevict.engine.scheduler.shared.uncompressed import UncompressedPrefixes
from vllm_kvevict.schedules.plan import Plan

OPTIONS = {"policy": "ada-snapkv", "budget": 0.2, "min_prompt": 0, "policies": "all", "check": True}


def server(pages: int, **changes: Any) -> Simulation:
    settings = {"prefix_caching": True, "max_num_batched_tokens": 8192, "max_num_seqs": 256, **changes}
    return Simulation(Setup([(2, 2)], [pages], 4096, options=OPTIONS, **settings))


def calls(work: Callable[[], Any]) -> int:
    """How many functions are called."""
    count = 0

    def on_event(frame: Any, event: str, function: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def calls_of_a_step(simulation: Simulation) -> int:
    """Of the scheduler alone, in the next step."""
    counted = 0
    schedule = simulation.scheduler.schedule

    def count() -> Any:
        nonlocal counted
        outputs = []
        counted = calls(lambda: outputs.append(schedule()))
        return outputs[0]

    simulation.scheduler.schedule = count
    simulation.step()
    simulation.scheduler.schedule = schedule
    return counted


def ask(simulation: Simulation, name: str, prompt: list[int], answer: int = 4, **fields: Any) -> None:
    simulation.add(make_request(name, prompt, answer, fields))


# Many that wait.


@pytest.mark.parametrize("priority", [False, True], ids=["in order", "priorities"])
def test_behind_many_admitted_the_queue_is_looked_at_once(priority):
    """Each of them asks what the queue will need, before it leaves its prompt for others."""

    def work(waiting: int) -> int:
        simulation = server(20000, priority=priority)
        for index in range(25):
            ask(simulation, f"admitted{index}", document(index, 300))
        for index in range(waiting):
            ask(simulation, f"waiting{index}", document(100 + index, 12), kv_eviction="full")
        return calls_of_a_step(simulation)

    few, many = work(400), work(4000)
    assert many <= 1.3 * few


def waits_without_being_asked(simulation: Simulation) -> None:
    """Let vLLM pass over all that wait without asking more than a connector of two lines could answer."""
    ledger, nothing = simulation.ledger, (simulation.ledger.empty_kv_cache_blocks, 0, 0)
    ledger.get_computed_blocks = lambda *args, **kwargs: nothing
    simulation.scheduler.connector.get_num_new_matched_tokens = lambda *args: (None, False)


@pytest.mark.parametrize("priority", [False, True], ids=["in order", "priorities"])
@pytest.mark.parametrize("policy", ["kvzip", "full"], ids=["compressed", "uncompressed"])
def test_who_waits_for_a_prefix_costs_little_more_than_vllm_takes_to_pass_over(policy, priority):
    """The prefix is read in small parts, so that each step has tokens for the others, and asks all of them."""

    def work(waiting: int, asked: bool) -> int:
        simulation = server(20000, priority=priority, long_prefill=64)
        text = document(0, 3000)
        fields = {"kv_eviction": policy, **({"kv_prefix_len": 3000} if policy == "kvzip" else {})}
        ask(simulation, "reader", [*text, 1], **fields)
        # Alone, the reader would have all of a step.
        ask(simulation, "another", document(1, 100), kv_eviction="full")
        simulation.step()
        for index in range(waiting):
            ask(simulation, f"waiting{index}", [*text, index % 1000, index // 1000], **fields)
        simulation.step()
        assert len(simulation.scheduler.running) == 2
        if not asked:
            waits_without_being_asked(simulation)
        return calls_of_a_step(simulation)

    ours, vllms = (work(1000, asked) - work(200, asked) for asked in (True, False))
    assert ours <= 1.3 * vllms


LOOKUPS = [
    (Plan, "reserved"),
    (CompressedPrefixes, "find"),
    (CompressedPrefixes, "_fits"),
    (UncompressedPrefixes, "find"),
    (UncompressedPrefixes, "_fits_alone"),
]
"""What costs much of a request that needs the reserve."""


def behind_the_reserve(waiting: int, policy: str) -> Simulation:
    """One reads a long prompt, whose sums fill the reserve; so many wait for it with a prefix of their own."""
    simulation = server(20000, long_prefill=64)
    fields = {"kv_eviction": policy, "kv_prefix_len": 2000}
    ask(simulation, "reader", document(-1, 4000), kv_eviction="compactor")
    ask(simulation, "another", document(-2, 100), kv_eviction="full")
    simulation.step()
    for index in range(waiting):
        ask(simulation, f"waiting{index}", document(index, 3000), **fields)
    for _ in range(2):
        simulation.step()
    assert list(simulation.ledger.reserve.spans) == ["reader"] and len(simulation.scheduler.running) == 2
    return simulation


def lookups_of_a_step(waiting: int, policy: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Where so many wait for the reserve."""
    simulation, count = behind_the_reserve(waiting, policy), 0

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return function(*args, **kwargs)

        return counted

    with monkeypatch.context() as patch:
        for owner, name in LOOKUPS:
            patch.setattr(owner, name, counting(getattr(owner, name)))
        simulation.step()
    return count


RESERVED = pytest.mark.parametrize("policy", ["h2o", "kvzip", "compactor"])


@RESERVED
def test_nothing_is_looked_up_for_who_waits_behind_a_full_reserve(policy, monkeypatch):
    few, many = (lookups_of_a_step(waiting, policy, monkeypatch) for waiting in (10, 200))
    assert few == many > 0


# Much that is cached.


def take_away_what_is_free(ledger: PageLedger) -> None:
    ranks = [
        replace(rank, pages=pages)
        for rank, pages in zip(ledger.books.ranks, ledger.books.cached, strict=True)
    ]
    ledger.requests.control = replace(ledger.requests.control, bounds=replace(ledger.bounds, ranks=ranks))
    ledger.books.ranks = ranks


@pytest.mark.parametrize("policy", ["snapkv", "full"], ids=["compressed", "uncompressed"])
def test_the_work_to_make_room_does_not_depend_on_what_is_cached(policy):
    """The memory is full of prefixes that nobody uses; one has to go for a request."""

    def work(cached: int) -> int:
        simulation = server(100 * cached)
        for index in range(cached):
            fields = {"kv_eviction": policy} | ({"kv_prefix_len": 70} if policy == "snapkv" else {})
            ask(simulation, f"cached{index}", document(index, 72), 1, **fields)
        simulation.run(100 + cached)
        ledger = simulation.ledger
        if policy == "snapkv":
            ledger.shared.uncompressed.segments.drop_until(lambda: False)  # these would go first
        assert len(ledger.shared.compressed) + len(ledger.shared.uncompressed.segments) == cached
        take_away_what_is_free(ledger)
        ask(simulation, "needs room", document(-1, 30), kv_eviction="full")
        counted = calls_of_a_step(simulation)
        assert "needs room" in ledger.accounts
        assert cached > len(ledger.shared.compressed) + len(ledger.shared.uncompressed.segments) > cached - 10
        return counted

    few, many = work(50), work(500)
    assert many <= 1.1 * few


def test_twice_the_segments_are_dropped_with_twice_the_work():
    def work(count: int) -> int:
        cache = SegmentCache(1, 4, count, Outbox(), Books([], mock.Mock()))
        for prompt in range(count // 4):  # a chain of three segments, and one by itself that is used later
            for name, units in ((f"long{prompt}", 12), (f"short{prompt}", 4)):
                cache.store(name, None, lambda count, name=name: (name, count), 0, units)
        assert len(cache) == count
        return calls(lambda: cache.drop_until(lambda: False))

    sizes = [work(count) for count in (400, 800, 1600)]
    assert all(after <= 2.2 * before for before, after in pairwise(sizes))
