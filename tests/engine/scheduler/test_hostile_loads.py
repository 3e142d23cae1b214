"""Hostile loads: the simulated choices are those of the policies, what goes wrong is found, and nothing does."""

import dataclasses
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.support import hostile_loads
from tests.engine.support.choices import Choices
from tests.engine.support.hostile_loads import WINDOW, Outcome, load_of, play, play_many, summary
from tests.engine.support.loads import Ask, Load
from tests.engine.support.overtaking import MOST_OVERTAKEN
from tests.engine.support.servers import Setup, capacities
from vllm_kvevict.engine.scheduler.ledger import PageLedger
from vllm_kvevict.engine.scheduler.shared.store import SharedStore
from vllm_kvevict.policies import EvictionConfig, LayerScores, available, parameters, select
from vllm_kvevict.schedules.plan import Admission
from vllm_kvevict.schedules.registry import plan_of

LAYERS, HEADS = 3, 4
STUCK_BEFORE: dict[int, tuple[str, ...]] = {
    **dict.fromkeys((67, 133, 137, 142, 281, 365), ()),
    6: ("answers", "streams", "resets"),
    96: ("answers", "streams", "drafts"),
}
"""Servers that once stood still, or stopped, with their kinds."""


# Choices.


def chosen(config: EvictionConfig, n: int, choices: Choices, request_id: str) -> np.ndarray:
    """What `select` keeps, [layers, KV heads], where the rows that the request prefers have far larger scores."""
    _, order = choices._greed(request_id)
    weights = choices.weights(request_id)
    m = n - config.window_for(n)
    # Rows that come earlier beat later ones with every candidate.
    rank = torch.from_numpy(order.ravel().argsort().argsort().reshape(order.shape))
    scores = torch.rand(LAYERS, HEADS, m) + 2.0 * (LAYERS * HEADS - rank)[:, :, None]
    layers = [
        LayerScores(layer, LAYERS, HEADS, scores[layer], weight=weights[layer], second=scores[layer])
        for layer in range(LAYERS)
    ]
    return np.array([[len(head) for head in layer] for layer in select(config, layers, n)])


@pytest.mark.parametrize("policy", [name for name in available() if name not in ("full", "take")])
def test_choices_are_those_of_the_policy(policy: str) -> None:
    """As far as a few rows can have it all, they do, and the others keep what the policy leaves every row."""
    setup = Setup([(LAYERS, HEADS)], [1], 1024)
    choices = Choices(capacities(setup), greeds=("rank", "layer", "head", "row"))
    choose = random.Random(policy)
    for index in range(20):
        n, params = choose.choice((50, 90, 300)), dict[str, Any]()
        if "alpha" in parameters(policy):
            params["alpha"] = choose.choice((0.0, 0.3))
        if "ada_safeguard" in parameters(policy):
            params["ada_safeguard"] = choose.choice(("interp", "guarantee"))
        if policy == "knorm":
            params["skip_layers"] = choose.choice((0, 2))
        if "window" in parameters(policy):
            params |= WINDOW
        config = EvictionConfig(policy, keep_ratio=choose.choice((0.1, 0.4, 0.8)), **params)
        admission = Admission(f"r{index}", 1, plan_of(config, n))
        (lengths,) = choices.lengths(admission)
        assert lengths.tolist() == chosen(config, n, choices, admission.request_id).tolist()


def small_load(**changes: Any) -> Load:
    """A long request and, behind it, a small one."""
    options = {"policy": "snapkv", "budget": 0.2, "check": True}
    setup = Setup([(2, 2)], [4 * 40], 1024, options=options)
    asks = [Ask(0, "long", 500, 400, {}, 0), Ask(30, "small", 20, 20, {}, 0)]
    return Load(dataclasses.replace(setup, **changes), asks)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    outcome = play(small_load())
    assert not outcome.failure and outcome.reasons == {"length": 2} and outcome.preemptions == {0: 2}
    assert outcome.longest_wait == 0 and outcome.shortened == 0 and 400 <= outcome.steps < 410


def stop_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ledger allow the long request to grow to 550 tokens only."""
    allocate = PageLedger.allocate_slots

    def stingy(self: PageLedger, request: Any, count: int, *args: Any, **kwargs: Any) -> Any:
        if request.request_id == "long" and request.num_computed_tokens + count > 550:
            return None
        return allocate(self, request, count, *args, **kwargs)

    monkeypatch.setattr(PageLedger, "allocate_slots", stingy)


@pytest.mark.parametrize(
    ("priority", "seats", "most", "says"),
    [
        (False, 64, None, "long .* preempted 21 times.* was preempted more than 20 times"),
        (True, 64, None, "long .* preempted 21 times.* was preempted more than 20 times"),
        (True, 1, 10**6, "small .* waits for 2[0-9][0-9] steps, in 201 of which nobody got further; .*long"),
        (True, 64, 10**6, "nobody got further in 601 steps: long"),
    ],
)
def test_a_request_that_gets_no_further_is_found(
    priority: bool, seats: int, most: int | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_growing(monkeypatch)
    if most:
        monkeypatch.setattr(hostile_loads, "MOST_PREEMPTIONS", most)
    failure = play(small_load(priority=priority, max_num_seqs=seats)).failure or ""
    assert re.search(says, failure), failure


def behind_a_patient_one(**changes: Any) -> Load:
    """A request, and small ones that come later, one in every step."""
    load = small_load(**changes)
    stream = [Ask(step, f"other{step}", 20, 2, {}, 0) for step in range(1, 300)]
    return dataclasses.replace(load, asks=[Ask(0, "patient", 60, 5, {}, 0), *stream])


@pytest.mark.parametrize("priority", [False, True])
def test_a_request_that_is_always_put_off_is_found(priority: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    load = behind_a_patient_one(priority=priority)
    outcome = play(load)
    assert not outcome.failure and outcome.overtaken == 0
    monkeypatch.setattr(SharedStore, "is_awaited", lambda self, request: request.request_id == "patient")
    failure = play(load).failure or ""
    says = rf"patient .* waits, and {MOST_OVERTAKEN + 1} steps admitted others behind it"
    assert re.search(says, failure), failure


# The gate.


@pytest.mark.parametrize("seed", STUCK_BEFORE)
def test_servers_that_stood_still(seed: int) -> None:
    outcome = play(load_of(seed, STUCK_BEFORE[seed]), seed)
    assert not outcome.failure, outcome.failure


@pytest.mark.parametrize(
    "kinds, steps",
    [
        *(("", 5000), ("drafts", 5000), ("pauses", 5000), ("resets", 5000)),
        *(("lookahead", 5000), ("lookahead resets", 3000), ("lookahead drafts pauses", 3000)),
        ("lookahead answers", 3000),
        *(("drafts pauses", 5000), ("drafts pauses resets", 5000)),
        *(("streams", 1500), ("salts", 1500), ("adapters", 1500), ("layers", 1500)),
        *(("streams pauses resets salts adapters", 1500), ("streams pauses adapters layers", 1500)),
        *(("drafter", 1500), ("resets salts layers drafter", 1500)),
    ],
)
def test_hostile_loads(kinds: str, steps: int) -> None:
    """`python -m tests.engine.support.hostile_loads` plays more."""
    check_none_failed(play_many(2000, steps=steps, servers=100, kinds=kinds.split()))


def check_none_failed(outcomes: list[Outcome]) -> None:
    assert not any(outcome.failure for outcome in outcomes), summary(outcomes, 0)


def test_crowds() -> None:
    """60 servers, as many as hung in the one version of vLLM that goes on with who stands behind a prompt put off."""
    check_none_failed(play_many(0, steps=10**6, servers=60, crowd=True))
