"""The hostile crowd, its honest twin and the verdict; no server is started."""

import asyncio
import json
from collections import Counter
from types import SimpleNamespace

import httpx
import pytest

from benchmarks.harness import hostile
from benchmarks.harness.hostile import HostileSoak, Phase
from benchmarks.harness.server import Snapshot
from benchmarks.harness.traffic import EXPECTED, LEFT, WRONG, Outcome
from benchmarks.soak import parse_arguments
from tests.benchmarks.runs import missed
from vllm_kvevict.policies import available


def body_of(ask) -> dict:
    return json.loads(ask.content)


def test_every_crowd_has_every_kind_and_honest_requests_are_as_long() -> None:
    asks = hostile.hostile_asks("m", 300, 0)
    kinds = Counter(ask.kind for ask in asks)
    assert len(asks) == 300 and len(kinds) == 12 and min(kinds.values()) == 25
    assert (
        hostile.hostile_asks("m", 12, 0)
        == hostile.hostile_asks("m", 12, 0)
        != hostile.hostile_asks("m", 12, 1)
    )
    named = {body_of(a).get("vllm_xargs", {}).get("kv_eviction", "full") for a in asks if a.refusal is None}
    assert named <= set(available())
    honest = hostile.honest_asks("m", [(5, 9), (70, 1)], 0)
    assert [len(body_of(ask)["prompt"].split()) for ask in honest] == [5, 70]
    assert [body_of(ask)["max_tokens"] for ask in honest] == [9, 1]
    assert all(ask.refusal is None and ask.leave is None for ask in honest)


def soak_of(*words: str) -> HostileSoak:
    return HostileSoak(parse_arguments(["--hostile", *words]))


def test_a_phase_lasts_as_long_as_its_crowd() -> None:
    """Ordinary clients ask one question after the other meanwhile, and their tokens are not the crowd's."""
    asked, soak = [], soak_of()

    async def respond(request: httpx.Request) -> httpx.Response:
        asked.append(most := json.loads(request.content)["max_tokens"])
        await asyncio.sleep(0.01)
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        if most == 98:
            return httpx.Response(500, text="oh")
        tokens = most if most == hostile.ANSWER else 3
        choices = [{"finish_reason": "length"}]
        return httpx.Response(200, json={"choices": choices, "usage": usage | {"completion_tokens": tokens}})

    async def run() -> Phase:
        server = SimpleNamespace(model="m", check=lambda: None)
        transport = httpx.MockTransport(respond)
        async with httpx.AsyncClient(base_url="http://nowhere", transport=transport) as client:
            asks = hostile.honest_asks("m", [(4, 99)] * 60 + [(4, 98)], 0)
            return await soak.phase(server, client, asks, 0)

    phase = asyncio.run(run())
    questions = asked.count(hostile.ANSWER)
    assert soak.tally == {("honest", EXPECTED): 60, ("honest", WRONG): 1, ("ordinary", EXPECTED): questions}
    assert phase.lengths == [(7, 3)] * 60  # cut short is not wrong
    assert asked.count(99) == 60 and questions == len(phase.latencies) > 2 * hostile.ORDINARY_CLIENTS
    assert soak.server_errors == 1
    (failure,) = soak.failures
    assert (failure["status"], failure["details"]) == (500, "oh")


@pytest.mark.parametrize(
    ("seconds", "outcome", "expected"),
    [
        (2.9, Outcome(LEFT), set()),
        (3.1, Outcome(EXPECTED), {"the ordinary clients' p99, beside hostile over beside honest clients"}),
    ],
)
def test_verdict(seconds: float, outcome: Outcome, expected: set[str]) -> None:
    soak = soak_of()
    soak.idle = soak.empty = Snapshot(physical_pages=0)
    soak.rounds = [(Phase([seconds] * 5), Phase([1.0] * 5))]
    soak.note("kind", outcome)
    soak.judge(0)
    assert missed(soak) == expected
    assert f"{seconds:.3f}" in soak.rows()["round 1, beside hostile: p50, p99 s"]
    assert soak.results()["rounds"][0]["honest"]["p99"] == 1.0
