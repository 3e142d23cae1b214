"""The hostile crowd, its honest twin and the verdict; no server is started."""

import asyncio
import json
from collections import Counter
from types import SimpleNamespace

import httpx
import pytest

from benchmarks.harness import hostile
from benchmarks.harness.hostile import HostileSoak, Phase, run_phase
from benchmarks.harness.traffic import EXPECTED, HUNG, LEFT, WRONG
from benchmarks.soak import parse_arguments
from vllm_kvevict.policies import available


def body_of(ask) -> dict:
    return json.loads(ask.content)


def test_every_crowd_has_every_kind_and_honest_requests_are_as_long() -> None:
    asks = hostile.hostile_asks("m", 300, 0)
    kinds = Counter(ask.kind for ask in asks)
    assert len(asks) == 300 and len(kinds) == 13 and min(kinds.values()) >= 300 // 13
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


def test_a_phase_lasts_as_long_as_its_crowd() -> None:
    """Ordinary clients ask one question after the other meanwhile, and their tokens are not the crowd's."""
    asked = []

    async def respond(request: httpx.Request) -> httpx.Response:
        asked.append(most := json.loads(request.content)["max_tokens"])
        await asyncio.sleep(0.01)
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        if most == 98:
            return httpx.Response(500, text="oh")
        tokens = most if most == hostile.ANSWER else 3
        choices = [{"finish_reason": "length"}]
        return httpx.Response(200, json={"choices": choices, "usage": usage | {"completion_tokens": tokens}})

    async def snapshot() -> SimpleNamespace:
        return SimpleNamespace(preemptions=len(asked))

    async def run() -> Phase:
        server = SimpleNamespace(model="m", check=lambda: None, snapshot=snapshot)
        transport = httpx.MockTransport(respond)
        async with httpx.AsyncClient(base_url="http://nowhere", transport=transport) as client:
            return await run_phase(server, client, hostile.honest_asks("m", [(4, 99)] * 60 + [(4, 98)], 0), 0)

    phase = asyncio.run(run())
    questions = asked.count(hostile.ANSWER)
    assert phase.tally == {("honest", EXPECTED): 60, ("honest", WRONG): 1, ("ordinary", EXPECTED): questions}
    assert phase.lengths == [(7, 3)] * 60 and phase.tokens == (420, 180)  # cut short is not wrong
    assert asked.count(99) == 60 and questions == len(phase.latencies) > 2 * hostile.ORDINARY_CLIENTS
    assert phase.preemptions == len(asked) and phase.failures == ["honest: HTTP 500 oh"]


def soak_of(*words: str) -> HostileSoak:
    return HostileSoak(parse_arguments(["--hostile", *words]))


def phase(seconds: float, *results: str, failures: int = 0) -> Phase:
    tally = Counter({("kind", result): 1 for result in results})
    return Phase(latencies=[seconds] * 5, failures=["wrong"] * failures, tally=tally)


@pytest.mark.parametrize(
    ("hostiles", "missed"),
    [
        (phase(2.9, EXPECTED, LEFT), []),
        (phase(3.1, EXPECTED), ["the ordinary clients' p99"]),
        (phase(1.0, HUNG), ["requests that hung"]),
        (phase(1.0, WRONG, failures=1), ["answers that were wrong"]),
    ],
)
def test_verdict(hostiles: Phase, missed: list[str]) -> None:
    soak = soak_of()
    soak.rounds = [(hostiles, phase(1.0, EXPECTED))]
    soak.judge(0)
    names = [requirement.name for requirement in soak.requirements if not requirement.met]
    assert len(names) == len(missed) and all(map(str.startswith, names, missed))
    assert f"{hostiles.percentile(99):.3f}" in soak.rows()["round 1, beside hostile: p50, p99 s"]
    assert soak.results()["rounds"][0]["honest"]["p99"] == 1.0


def test_records_of_different_servers_have_different_names() -> None:
    lines = ([], ["--server", "layers"], ["--tensor-parallel-size", "2"], ["--pipeline-parallel-size", "2"])
    made = [soak_of(*line) for line in lines]
    assert [one.name for one in made] == ["hostile", "hostile-layers", "hostile-tp2", "hostile-pp2"]
    assert [one.ranks for one in made] == [1, 1, 2, 2] and made[0].arguments.requests == 300
