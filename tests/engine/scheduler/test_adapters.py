"""LoRA adapters: no step computes more of them than it has places for, also where evictions leave requests out."""

import pytest

from tests.engine.support.servers import Setup, make_request
from tests.engine.support.simulation import Simulation
from vllm_kvevict.engine.scheduler.adapters import AdapterSlots

OPTIONS = {"policy": "ada-snapkv", "budget": 0.2, "check": True}


def simulation(**changes: object) -> Simulation:
    """Twelve requests of three adapters and of none, on a server that schedules ahead."""
    settings = {"adapters": 1, "depth": 2, "asynchronous": True, "options": OPTIONS} | changes
    made = Simulation(Setup([(2, 2)], [800], 1024, **settings))
    for index in range(12):
        made.add(make_request(f"r{index}", 300, 40, adapter=index % 4))
    return made


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("adapters", [1, 2])
def test_a_request_that_waits_for_its_reports_keeps_its_place(adapters: int, logprobs: bool) -> None:
    """vLLM counts only the adapters that a step computes, and then stops where those of two steps come together.

    For requests that ask for their prompt's log probabilities vLLM does not mind what the connector says of them.
    """
    made = simulation(adapters=adapters)
    for request in made.scheduler.requests.values():
        request.skip_reading_prefix_cache = logprobs
    made.run(2000)
    assert made.outputs == {f"r{index}": 40 for index in range(12)}


def test_without_that_vllm_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterSlots, "has_slot", lambda self, request: True)
    with pytest.raises(AssertionError):
        simulation().run(2000)


def test_requests_of_an_adapter_in_use_overtake_as_in_vllm() -> None:
    """Whose adapter has no place is passed over; the others, of the one in use or of none, go on."""
    made = simulation()
    made.step()
    assert set(made.ledger.accounts) == {f"r{index}" for index in range(12) if index % 4 < 2}
