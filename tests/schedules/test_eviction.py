"""An eviction begins with its request's phase and ends with it; what it has recorded is gone then."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.eviction import Eviction, ResidentRequest
from vllm_kvevict.schedules.plan import Admission
from vllm_kvevict.schedules.registry import eviction_of, plan_of

N = 700
NO_EVICTOR: Any = None
"""Nothing is asked of a rank before the first layer."""


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def begun() -> tuple[ResidentRequest, "weakref.ref[Eviction]"]:
    plan = plan_of(EvictionConfig("snapkv", budget=100), N)
    resident = ResidentRequest(Admission("r", 1, plan), request_slot=0)
    eviction = eviction_of(NO_EVICTOR, resident)
    assert eviction is not None and eviction_of(NO_EVICTOR, resident) is eviction
    return resident, weakref.ref(eviction)


def test_a_request_that_goes_leaves_nothing(without_collector: None) -> None:
    resident, eviction = begun()
    resident.end_eviction()
    assert eviction() is None
    kept, other = begun()  # the control: eviction and request know each other
    del kept
    assert other() is not None


def test_none_begins_behind_the_last_phase() -> None:
    resident, _ = begun()
    resident.end_eviction()
    resident.tokens = N
    assert eviction_of(NO_EVICTOR, resident) is None
