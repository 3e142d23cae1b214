"""The loads of the chat benchmark, how answers are read, and its verdict; no server is started."""

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console

from benchmarks.chat import (
    Run,
    ask_last,
    drive,
    figures,
    later_wait,
    lead,
    make_server,
    parse_arguments,
    simulated,
    summary,
    table,
)
from benchmarks.harness.chats import CHEAP, EVICTING, FULL, REPEATING, SCENARIOS, SIDES
from benchmarks.harness.load import page_bytes
from benchmarks.harness.scenarios import STOCK
from benchmarks.harness.server import Snapshot


def test_chats_share_nothing_and_sides_hear_the_same():
    scenario = replace(SCENARIOS["turns"], turn_len=20)
    words = scenario.words(1, 0)
    assert [len(turn) for turn in words] == [20] * 8 and words == scenario.words(1, 0)
    assert words[0] != scenario.words(1, 1)[0] and words[0] != scenario.words(2, 0)[0]
    assert len(scenario.history(1, 0)) == scenario.max_len - scenario.answer_len


@pytest.mark.parametrize("name", SCENARIOS)
def test_sides_differ_in_eviction_alone(name, monkeypatch):
    monkeypatch.setattr("benchmarks.chat.model", lambda max_len: Path("m"))
    flags = {}
    for side in SIDES:
        command = make_server(name, SCENARIOS[name], side, 1).command
        flags[side] = [word for word in command if not word.isdigit()]
    assert flags[FULL] == flags[STOCK] + ["--kv-eviction", "full"]
    budget = ["--kv-budget", f"{SCENARIOS[name].budget:g}"]
    assert flags[EVICTING] == flags[STOCK] + ["--kv-eviction", "ada-snapkv", *budget]


def run(first: list[float], wall: float = 10.0, most_running: int = 0) -> Run:
    return Run(wall, first, cached=0, preemptions=0, most_running=most_running)


def test_the_first_turn_of_a_chat_does_not_count():
    scenario = replace(SCENARIOS["turns"], turns=3)
    assert later_wait(scenario, run([9.0, 1.0, 2.0, 9.0, 3.0, 4.0])) == 2.5


def test_verdict_on_turns():
    def verdict(full: float, evicting: float) -> list[bool]:
        waits = {STOCK: 1.0, FULL: full, EVICTING: evicting}
        one = {side: run(([5.0] + [wait] * 7) * 2, 10 * wait) for side, wait in waits.items()}
        return [target.met for target in figures("turns", SCENARIOS["turns"], [one] * 3)]

    assert verdict(1.05, 1.25) == [True] * 3
    assert verdict(1.15, 1.35) == [False] * 3


def test_verdict_on_a_crowd():
    for most, met in ((6, True), (5, False)):
        one = {STOCK: run([1.0], most_running=3), EVICTING: run([1.0], most_running=most)}
        assert [x.met for x in figures("crowd", SCENARIOS["crowd"], [one] * 3)] == [met]
    console = Console(file=io.StringIO(), width=130)
    console.print(table("crowd", SCENARIOS["crowd"], [one] * 3))
    assert "at once" in console.file.getvalue()


def test_command_line():
    assert list(parse_arguments([])[1]) == list(SCENARIOS)
    _, scenarios = parse_arguments(["turns", "--rounds", "1", "--turn-len", "64", "--dtype", "float32"])
    assert scenarios == {"turns": replace(SCENARIOS["turns"], rounds=1, turn_len=64, dtype="float32")}
    with pytest.raises(SystemExit):
        parse_arguments(["nothing"])


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


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_run_begins_with_nothing_cached(name, monkeypatch):
    """Else what earlier rounds have left would count as the KV of idle chats."""
    sent: list[dict] = []

    async def snapshot() -> Snapshot:
        return Snapshot(cached_pages=3, uncompressed_pages=2)

    server = SimpleNamespace(model="m", log="log", snapshot=snapshot, check=lambda: None)
    monkeypatch.setattr("benchmarks.chat.http_client", lambda server: client_of(sent))
    monkeypatch.setattr("benchmarks.chat.SETTLE_SECONDS", 0)
    small = replace(SCENARIOS[name], chats=2, turns=2, turn_len=3, answer_len=2, system_len=4)
    one = asyncio.run(drive(server, small, 7, by_turns=True))
    assert [message.get("reset") for message in sent] == [True] + [None] * len(one.first_token)
    assert len(one.first_token) == (4 if small.is_led else 2)
    page = page_bytes(small.dtype)
    assert (one.held, one.uncompressed) == (3 * page, 2 * page) and one.cached == sum(
        len(message["prompt"]) - 1 for message in sent[1:]
    )


def test_each_turn_goes_on_with_its_own_answers():
    sent: list[dict] = []

    scenario = replace(SCENARIOS["turns"], chats=1, turns=2, turn_len=2, answer_len=2)
    first, second = scenario.words(7, 0)

    async def chat():
        async with client_of(sent) as client:
            return await lead(client, SERVER, scenario, 7)

    answers = asyncio.run(chat())
    assert [one["prompt"] for one in sent] == [first, [*first, 2, 3, *second]]
    assert [answer.tokens for answer in answers] == [[2, 3], [6, 7]]
    assert [answer.cached for answer in answers] == [1, 5]
    assert all("vllm_xargs" not in one for one in sent)


def test_chats_take_turns_and_tell_where_these_end():
    sent: list[dict] = []
    agents = replace(SCENARIOS["agents"], chats=2, turns=3, turn_len=3, answer_len=2, system_len=4)

    async def chats():
        async with client_of(sent) as client:
            return await lead(client, SERVER, agents, 7, by_turns=True)

    answers = asyncio.run(chats())
    assert [len(one["prompt"]) for one in sent] == [7, 7, 12, 12, 17, 17]
    assert [one["vllm_xargs"]["kv_turns"] for one in sent] == [
        [4],
        [4],
        [4, 9],
        [4, 9],
        [4, 9, 14],
        [4, 9, 14],
    ]
    assert sent[2]["prompt"][:7] == sent[0]["prompt"] != sent[1]["prompt"]
    assert [answer.cached for answer in answers] == [6, 11, 16] * 2
    assert agents.known_len == 2 * (9 + 14)


def test_chats_of_one_system_text():
    shared = replace(SCENARIOS["agents-shared"], turn_len=3, system_len=4)
    first, second = shared.words(7, 0), shared.words(7, 1)
    assert first[0][:4] == second[0][:4] != shared.words(8, 0)[0][:4] and first[0][4:] != second[0][4:]
    assert shared.beginning(0, 4) == shared.beginning(1, 4)
    assert shared.beginning(0, 5) != shared.beginning(1, 5) and shared.beginning(0, 3) != shared.beginning(
        0, 4
    )


def test_cold_chats_ask_one_after_the_other_and_tell_where_turns_end():
    sent: list[dict] = []
    cold = replace(SCENARIOS["agents-cold"], chats=2, turns=3, turn_len=3, answer_len=2, system_len=4)

    async def chats(by_turns: bool):
        async with client_of(sent) as client:
            return await ask_last(client, SERVER, cold, 7, by_turns)

    assert len(asyncio.run(chats(True))) == len(asyncio.run(chats(False))) == 2
    assert [len(one["prompt"]) for one in sent] == [17] * 4 and sent[0]["prompt"] != sent[1]["prompt"]
    assert [one.get("vllm_xargs") for one in sent] == [{"kv_turns": [4, 9, 14]}] * 2 + [None] * 2
    assert not cold.is_led and cold.known_len == 0


def test_what_a_cache_alone_could_find_stands_beside_what_was_found():
    agents = SCENARIOS["agents"]
    half = replace(run([1.0]), cached=agents.known_len // 2)
    one = dict.fromkeys(agents.sides, half)
    console = Console(file=io.StringIO(), width=150)
    content = summary("agents", agents, [one], console)
    assert content["cache_alone"] == simulated(agents)
    assert content["cache_alone"].keys() == {STOCK, "chains", "chains and tails", "perfect"}
    text = console.file.getvalue()
    assert "the cache alone could find, chains and tails" in text
    assert text.count("50.0%") == 4 and "99.2%" in text and "91.5%" in text


@pytest.mark.parametrize("name", ["turns", "crowd", "agents-cold"])
def test_nothing_is_simulated_where_no_turn_is_told_or_known(name):
    scenario = SCENARIOS[name]
    one = dict.fromkeys(scenario.sides, run([1.0] * scenario.chats * scenario.turns))
    assert simulated(scenario) == {}
    summary(name, scenario, [one], Console(file=io.StringIO()))


def test_verdict_on_agents():
    agents = SCENARIOS["agents"]

    def verdict(cached: float, wait: float, held: float) -> list[bool]:
        first = ([1.0] + [wait] * (agents.turns - 1)) * agents.chats
        ours = replace(
            run(first, 10 * wait),
            cached=round(cached * agents.known_len),
            held=round(held * agents.whole_bytes),
            uncompressed=round(0.06 * agents.whole_bytes),
        )
        stock = replace(run([1.0] * agents.turns * agents.chats), cached=0)
        one = {STOCK: stock, EVICTING: stock, CHEAP: ours, REPEATING: ours}
        return [target.met for target in figures("agents", agents, [one] * 3)]

    assert verdict(0.98, 0.1, 0.29) == [True] * 7
    assert verdict(0.9, 0.5, 0.4) == [False, True, False, False, False, False, False]
