"""Layers with a sliding window share the memory with evicted ones: preemptions come to an end."""

import random
from typing import Any

import pytest

from tests.engine.support.servers import PAGE, Setup, make_request
from tests.engine.support.simulation import Simulation
from vllm_kvevict.engine.scheduler import other_layers
from vllm_kvevict.engine.scheduler.admission import PATIENCE

LONGEST, ROWS = 1024, 4
OPTIONS = {"policy": "ada-snapkv", "budget": 0.2, "min_prompt": 0, "policies": "all", "check": True}


def server(window: int) -> Simulation:
    """With memory for two of the longest requests."""
    pages = ROWS * 2 * LONGEST // PAGE
    return Simulation(
        Setup([(2, 2)], [pages], LONGEST, max_num_batched_tokens=512, window=window, options=OPTIONS)
    )


def load(seed: int, window: int) -> Simulation:
    """Requests with long answers, half of them kept whole."""
    simulation, choose = server(window), random.Random(seed)
    for index in range(24):
        fields: dict[str, Any] = {"kv_eviction": "full"} if index % 2 else {}
        prompt, answer = choose.randrange(100, 500), choose.randrange(50, 500)
        simulation.add(make_request(f"r{index}", prompt, answer, fields))
    simulation.run(20_000)
    return simulation


@pytest.mark.parametrize("window", [512, 900])
@pytest.mark.parametrize("seed", [0, 2])
def test_nobody_is_preempted_again_and_again(seed: int, window: int) -> None:
    simulation, alone = load(seed, window), load(seed, 0)
    assert simulation.outputs == alone.outputs
    assert max(simulation.preemptions.values()) <= PATIENCE + 1
    assert simulation.prefilled <= 2 * alone.prefilled


@pytest.mark.parametrize("window", [40, 100, 512])
@pytest.mark.parametrize("prompt", [5, 300, 500])
def test_what_a_window_takes_of_an_answer(window: int, prompt: int) -> None:
    """As many blocks as it lies over at most; the last one behind it is given back a step late."""
    simulation = server(window)
    simulation.add(make_request("r", prompt, 400, {}))
    simulation.step()
    ledger, most = simulation.ledger, 0
    assert ledger.blocks is not None
    _, counted = ledger.accounts["r"].beside
    while "r" in ledger.accounts:
        if ledger.accounts["r"].tokens > prompt + 2:
            most = max(most, ledger.blocks.of_others - other_layers.PADDING)
        simulation.step()
    assert most - 1 <= counted <= most


def test_what_windows_will_take_must_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: beside what other layers hold now there seems to be room."""

    def as_now(self: Any, while_read: Any, at_end: Any, accounts: Any, new: Any) -> Any:
        now = self._blocks.of_others
        return self._with_blocks(while_read, now), self._with_blocks(at_end, now)

    monkeypatch.setattr(other_layers.OtherLayers, "together_later", as_now)
    assert max(load(2, 512).preemptions.values()) > PATIENCE + 1
