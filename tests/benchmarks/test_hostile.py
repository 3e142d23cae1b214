"""The hostile crowd, its honest twin and the verdict; no server is started."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console

from benchmarks import hostile
from benchmarks.harness.measure import estimate
from benchmarks.hostile import DONE, HUNG, LEFT, REFUSED, WRONG, Ask, Phase, met, run_phase, send, table
from vllm_kvevict.policies import available


def answer(status: int = 200, reason: str = "length", text: str = "") -> httpx.Response:
    if status != 200:
        return httpx.Response(status, text=text)
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    return httpx.Response(200, json={"choices": [{"finish_reason": reason}], "usage": usage})


def client(respond) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url="http://nowhere", transport=httpx.MockTransport(respond))


def sent(ask: Ask, response: httpx.Response) -> tuple[str, Phase]:
    async def run() -> str:
        async with client(lambda request: response) as there:
            return await send(there, ask, phase)

    phase = Phase()
    return asyncio.run(run()), phase


def test_every_crowd_has_every_kind() -> None:
    asks = hostile.hostile_asks("m", 300, 0)
    kinds = {ask.kind for ask in asks}
    assert len(asks) == 300 and len(kinds) == 13
    assert all(sum(ask.kind == kind for ask in asks) >= 300 // 13 for kind in kinds)
    assert asks == hostile.hostile_asks("m", 300, 0) != hostile.hostile_asks("m", 300, 1)
    named = {ask.body.get("vllm_xargs", {}).get("kv_eviction") for ask in asks if ask.refusal is None}
    assert named <= set(available())


def test_honest_requests_are_as_long() -> None:
    asks = hostile.honest_asks("m", [(5, 9), (70, 1)], 0)
    assert [len(ask.body["prompt"].split()) for ask in asks] == [5, 70]
    assert [ask.body["max_tokens"] for ask in asks] == [9, 1]
    assert all(ask.refusal is None and ask.leave is None for ask in asks)


@pytest.mark.parametrize(
    ("response", "refusal", "result"),
    [
        (answer(), None, DONE),
        (answer(reason="error"), None, WRONG),
        (answer(500), None, WRONG),
        (answer(400, text="min_tokens is too much"), None, WRONG),
        (answer(400, text="min_tokens is too much"), "min_tokens", REFUSED),
        (answer(400, text="no"), "min_tokens", WRONG),
        (answer(500, text="min_tokens"), "min_tokens", WRONG),
        (answer(), "min_tokens", WRONG),
    ],
)
def test_what_became_of_a_request(response: httpx.Response, refusal: str | None, result: str) -> None:
    got, phase = sent(Ask("kind", {}, refusal=refusal), response)
    assert got == result
    assert [failure.split(":")[0] for failure in phase.failures] == ["kind"] * (result == WRONG)
    assert phase.lengths == [(7, 3)] * (response.status_code == 200 and refusal is None)


@pytest.mark.parametrize(("leave", "result"), [(0.01, LEFT), (None, HUNG)])
def test_who_leaves_and_who_hangs(leave: float | None, result: str, monkeypatch) -> None:
    monkeypatch.setattr(hostile, "DEADLINE", 0.02)

    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        return answer()

    async def run() -> str:
        async with client(never) as there:
            return await send(there, Ask("kind", {}, leave=leave), Phase())

    assert asyncio.run(run()) == result


def test_a_phase_lasts_as_long_as_its_crowd() -> None:
    """Ordinary clients ask one question after the other meanwhile, and their tokens are not the crowd's."""
    asked = []

    async def respond(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["max_tokens"])
        await asyncio.sleep(0.01)
        return answer()

    async def snapshot() -> SimpleNamespace:
        return SimpleNamespace(preemptions=len(asked))

    async def run() -> Phase:
        server = SimpleNamespace(model="m", check=lambda: None, snapshot=snapshot)
        async with client(respond) as there:
            return await run_phase(server, there, hostile.honest_asks("m", [(4, 99)] * 60, 0), 0)

    phase = asyncio.run(run())
    questions = asked.count(hostile.ANSWER)
    assert (
        phase.tally == {("honest", DONE): 60}
        and phase.lengths == [(7, 3)] * 60
        and phase.tokens == (420, 180)
    )
    assert asked.count(99) == 60 and questions == len(phase.latencies) > 2 * hostile.ORDINARY_CLIENTS
    assert phase.preemptions == len(asked) and phase.seconds > 0 and not phase.failures


def phase(seconds: float, *results: str, failures: int = 0) -> Phase:
    made = Phase(latencies=[seconds] * 5, failures=["wrong"] * failures)
    for result in results:
        made.tally["kind", result] += 1
    return made


@pytest.mark.parametrize(
    ("hostiles", "ratio", "missed"),
    [
        (phase(2.9, DONE, REFUSED, LEFT), 2.9, []),
        (phase(3.1, DONE), 3.1, ["the ordinary clients' p99"]),
        (phase(1.0, HUNG), 1.0, ["requests that hung"]),
        (phase(1.0, WRONG, failures=1), 1.0, ["answers that were wrong"]),
    ],
)
def test_verdict(hostiles: Phase, ratio: float, missed: list[str]) -> None:
    rounds = [(hostiles, phase(1.0, DONE))]
    found = met(estimate([ratio]), rounds)
    names = [name for name, (value, most) in found.items() if value > most]
    assert len(names) == len(missed) and all(map(str.startswith, names, missed))
    console = Console(width=110, record=True)
    console.print(table(rounds, estimate([ratio])))
    assert f"{ratio:.3f}" in console.export_text()


def test_records_of_different_servers_have_different_names() -> None:
    lines = ([], ["--server", "layers"], ["--tensor-parallel-size", "2"], ["--pipeline-parallel-size", "2"])
    made = [hostile.Hostile(hostile.parse_arguments(list(line))) for line in lines]
    assert [one._record_name() for one in made] == ["hostile", "hostile-layers", "hostile-tp2", "hostile-pp2"]
    assert [one.ranks for one in made] == [1, 1, 2, 2]
