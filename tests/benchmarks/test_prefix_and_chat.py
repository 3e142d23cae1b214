"""The loads of documents and of chats, how answers are read, and the verdicts; no server is started."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from benchmarks import chat, prefix
from benchmarks.chat import CHEAP, EVICTING, FULL, SIDES, ask_last, lead
from benchmarks.harness import bench, documents, scenarios
from benchmarks.harness.documents import Answer, Run, ask
from benchmarks.harness.scenarios import STOCK
from benchmarks.harness.server import ServerError, Snapshot
from benchmarks.prefix import ALL_EVICTED, STOCK_WITHOUT, WITH, WITHOUT
from benchmarks.prefix import SIDES as OF_DOCUMENTS
from tests.benchmarks.runs import without_port

DOCUMENTS, CHATS = prefix.SCENARIOS, chat.SCENARIOS

# Documents.


def test_questions_share_documents_and_nothing_else():
    scenario = replace(DOCUMENTS["documents"], document_len=50)
    prompts = scenario.prompts(seed=1)
    assert len(prompts) == 16 * 3 and {len(prompt) for prompt in prompts} == {50 + 32}
    for number in range(16):
        assert prompts[number][:50] == prompts[number + 16][:50] == prompts[number + 32][:50]
    assert len({tuple(prompt[:50]) for prompt in prompts}) == 16
    assert len({tuple(prompt[50:]) for prompt in prompts}) == 48
    assert not {tuple(p[:50]) for p in prompts} & {tuple(p[:50]) for p in scenario.prompts(seed=2)}


def flags_of(monkeypatch, scenario, sides) -> dict[str, list[str]]:
    """By side, without the port."""
    monkeypatch.setattr(scenarios, "model", lambda *_, **sizes: Path("m"))
    return {side: without_port(scenario.server(side, 1).command) for side in sides}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_sides_of_documents_differ_in_eviction_and_caching_alone(name, monkeypatch):
    flags = flags_of(monkeypatch, DOCUMENTS[name], (*OF_DOCUMENTS, STOCK_WITHOUT))
    policy = "kvzip" if name == "compressed" else "ada-snapkv"
    no_cache = ["--no-enable-prefix-caching"]
    assert flags[WITH] == flags[STOCK] + ["--kv-eviction", policy, "--kv-budget", "0.2"]
    assert flags[WITHOUT] == flags[WITH] + no_cache and flags[STOCK_WITHOUT] == flags[STOCK] + no_cache


# Chats.


def test_chats_share_nothing_and_sides_hear_the_same():
    scenario = replace(CHATS["turns"], turn_len=20)
    words = scenario.words(1, 0)
    assert [len(turn) for turn in words] == [20] * 8 and words == scenario.words(1, 0)
    assert words[0] != scenario.words(1, 1)[0] and words[0] != scenario.words(2, 0)[0]
    assert len(scenario.history(1, 0)) == scenario.max_len - scenario.answer_len


@pytest.mark.parametrize("name", CHATS)
def test_sides_of_chats_differ_in_eviction_alone(name, monkeypatch):
    flags = flags_of(monkeypatch, CHATS[name], SIDES)
    assert flags[FULL] == flags[STOCK] + ["--kv-eviction", "full"]
    budget = ["--kv-budget", f"{CHATS[name].budget:g}"]
    assert flags[EVICTING] == flags[STOCK] + ["--kv-eviction", "ada-snapkv", *budget]


# Verdicts.

COUNTS = ("hits", "cached", "computed", "held", "uncompressed", "held_by_each")
GOOD = Run(0.1, [], 0, 10**9, 10**9, 100, preemptions=0, most_running=99)
BAD = Run(
    900.0, [], **dict.fromkeys(COUNTS, 10**9) | {"hits": 0, "cached": 0}, output_tokens=100, preemptions=9
)


@pytest.mark.parametrize("name", [*DOCUMENTS, *CHATS])
@pytest.mark.parametrize("ours, wait, found, met", [(GOOD, 0.001, 0, True), (BAD, 900.0, 10**9, False)])
def test_every_target_can_be_met_and_missed(name, ours, wait, found, met):
    """Where only later questions are judged, all sides are slow at first; found is by stock vLLM."""
    scenario = DOCUMENTS.get(name) or CHATS[name]
    if name in CHATS:
        firsts = [index % scenario.turns == 0 for index in range(scenario.chats * scenario.turns)]
    else:
        count = scenario.documents * scenario.questions
        firsts = [index < scenario.documents and not scenario.at_once for index in range(count)]
    others = replace(GOOD, wall=10.0, hits=found, cached=found, preemptions=2, most_running=3)
    one = {}
    for turn, side in scenario.schedule().items():
        other = side in (STOCK, STOCK_WITHOUT, WITHOUT, ALL_EVICTED)
        waits = [99.0 if first else 1.0 if other else wait for first in firsts]
        one[turn] = replace(others if other else ours, first_token=waits)
    targets = scenario.targets(name, [one] * 3)
    assert targets and {target.met for target in targets} == {met}


def client_of(sent: list[dict]) -> httpx.AsyncClient:
    """A server that answers with the prompt's length and the tokens after it, and has cached one less."""

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/reset_prefix_cache":
            sent.append({"reset": True})
            return httpx.Response(200)
        sent.append(json.loads(request.content))
        count = len(sent[-1]["prompt"])
        events = [{"choices": [{"token_ids": [count + index]}]} for index in range(2)]
        details = {"cached_tokens": count - 1}
        events.append({"choices": [], "usage": {"prompt_tokens_details": details}})
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return httpx.Response(200, text=lines)

    return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://x")


SERVER = SimpleNamespace(model="m", log="log")


def sent_by(work, *arguments) -> tuple[list[dict], list[Answer]]:
    """What work with a client sends, and what it returns."""
    sent: list[dict] = []

    async def all_of_it():
        async with client_of(sent) as client:
            return await work(client, SERVER, *arguments)

    return sent, asyncio.run(all_of_it())


def test_what_an_answer_tells():
    sent, answer = sent_by(ask, [1, 2, 3], 2, 2)
    assert (answer.tokens, answer.cached) == ([3, 4], 2) and 0 < answer.first_token < 60
    assert sent[0]["vllm_xargs"] == {"kv_prefix_len": 2} and sent[0]["max_tokens"] == 2
    sent, _ = sent_by(ask, [1, 2, 3], None, 2)
    assert "vllm_xargs" not in sent[0]
    with pytest.raises(ServerError, match="an answer has 2 tokens, not 3"):
        sent_by(ask, [1, 2, 3], None, 3)


@pytest.mark.parametrize("name", CHATS)
def test_each_run_begins_with_nothing_cached(name, monkeypatch):
    """Else what earlier rounds have left would count as the KV of idle chats."""
    sent: list[dict] = []

    async def snapshot() -> Snapshot:
        return Snapshot(cached_pages=3, uncompressed_pages=2)

    server = SimpleNamespace(model="m", log="log", snapshot=snapshot, check=lambda: None)
    monkeypatch.setattr(documents, "http_client", lambda server: client_of(sent))
    monkeypatch.setattr(documents, "SETTLE_SECONDS", 0)
    small = replace(CHATS[name], chats=2, turns=2, turn_len=3, answer_len=2, system_len=4)
    one = asyncio.run(small.send(server, CHEAP, 7))
    assert [message.get("reset") for message in sent] == [True] + [None] * len(one.first_token)
    assert len(one.first_token) == (2 if small.at_once else 4)
    assert (one.held, one.uncompressed) == (3, 2)
    assert one.cached == sum(len(message["prompt"]) - 1 for message in sent[1:])


def test_chats_take_turns_and_tell_where_these_end():
    agents = replace(CHATS["agents"], chats=2, turns=3, turn_len=3, answer_len=2, system_len=4)
    sent, answers = sent_by(lead, agents, 7, True)
    assert [len(one["prompt"]) for one in sent] == [7, 7, 12, 12, 17, 17]
    ends = [[4], [4], [4, 9], [4, 9], [4, 9, 14], [4, 9, 14]]
    assert [one["vllm_xargs"]["kv_turns"] for one in sent] == ends
    first, other, second = (one["prompt"] for one in sent[:3])
    assert second[:9] == first + answers[0].tokens and second[9:] == agents.words(7, 0)[1] and first != other
    assert [answer.cached for answer in answers] == [6, 11, 16] * 2 and agents.known_len == 2 * (9 + 14)
    crowd = replace(CHATS["crowd"], chats=2, turns=3, turn_len=3, answer_len=2, system_len=4)
    sent, _ = sent_by(ask_last, crowd, 7)
    assert [len(one["prompt"]) for one in sent] == [17] * 2 and sent[0]["prompt"] != sent[1]["prompt"]
    assert not crowd.known_len


# Rounds.


class Idle:
    """A server that does nothing."""

    paused = False

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    def signal(self, number):
        self.paused = not self.paused


def test_another_side_begins_each_round_and_works_alone(monkeypatch, at_level):
    at_level("avx512")
    told, saved = [], {}
    servers = {side: Idle() for side in CHATS["crowd"].sides}

    async def send(scenario, server, side, number):
        others = [other for other in servers.values() if other is not server]
        told.append((side, number, scenario.chats))
        assert not number or (not server.paused and all(other.paused for other in others))
        return Run(1.0, [1.0], most_running=3 if side == STOCK else 9)

    monkeypatch.setattr(chat.Scenario, "server", lambda scenario, side, threads: servers[side])
    monkeypatch.setattr(chat.Scenario, "send", send)
    monkeypatch.setattr(bench, "save", lambda name, content: saved.update({name: content["results"]}))
    arguments, chosen = chat.parse_arguments(["crowd", "--rounds", "3", "--dtype", "bfloat16"])
    asyncio.run(bench.measure("chat", arguments, chosen, CHATS))
    warm_up = [(STOCK, 0, 1), (EVICTING, 0, 1)]
    assert told[:6] == [*warm_up, (EVICTING, 1, 12), (STOCK, 1, 12), (STOCK, 2, 12), (EVICTING, 2, 12)]
    results = saved["chat-crowd"]
    assert len(told) == 8 and list(results["rounds"][0]) == [STOCK, EVICTING]
    assert results["rounds"][0][STOCK]["most_running"] == 3 and results["targets"][0]["met"]
