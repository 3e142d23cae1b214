"""The soak's requests, what it makes of answers, and its verdict; no server is started."""

import asyncio
import io
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from rich.console import Console

from benchmarks.harness import soaking, traffic
from benchmarks.harness.conversations import BLOCK, GOES_ON, WEIGHTS, Turn
from benchmarks.harness.random_soak import MAX_LEN, RandomSoak, Sample, baseline, growth
from benchmarks.harness.server import Snapshot
from benchmarks.harness.soaking import tracebacks, until_idle
from benchmarks.harness.traffic import BROKEN, EXPECTED, HUNG, LEFT, WRONG, Answer, Ask, Outcome, Traffic
from benchmarks.soak import parse_arguments
from tests.benchmarks.runs import missed
from vllm_kvevict.policies import available

LONGEST = 50
# Without one policy, as under pipeline parallelism: no request may name it.
PROBES = {
    policy: ({"prompt": "w9", "max_tokens": 3}, " w1 w2 w3") for policy in available() if policy != "tova"
}


def asks(count: int, seed: int = 0) -> list[Ask]:
    requests = Traffic("m", seed, LONGEST, 512, PROBES)
    return [requests.next() for _ in range(count)]


# Requests.


def test_all_kinds_come():
    kinds = {ask.kind.removesuffix(", left").removesuffix(", streamed") for ask in asks(4000)}
    # Nothing is answered here, so that no conversation goes on.
    turns = {f"conversation, {how}" for how in WEIGHTS if how != GOES_ON}
    assert kinds == turns | {*traffic.ENDPOINTS, "malformed", "probe"}


def test_valid_requests_are_valid():
    found = asks(2000)
    assert {ask.stream for ask in found} == {ask.leave is None for ask in found} == {True, False}
    alone = [ask for ask in found if ask.kind.startswith(tuple(traffic.ENDPOINTS))]
    bodies = [(ask, json.loads(ask.content)) for ask in alone]
    assert {body["vllm_xargs"]["kv_eviction"] for _, body in bodies if "vllm_xargs" in body} == set(PROBES)
    assert any("n" in body for _, body in bodies) and any("seed" in body for _, body in bodies)
    for ask, body in bodies:
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        words = len(text.split())
        assert 1 <= words <= LONGEST
        assert 1 <= body.get("vllm_xargs", {}).get("kv_prefix_len", 1) <= words
        assert ask.choices == body.get("n", 1) and ask.tokens == ask.choices * body["max_tokens"]
        assert ask.stream == body.get("stream", False)


def test_malformed_requests_say_what_their_refusal_must_name():
    malformed = [ask for ask in asks(4000) if ask.refusal is not None]
    assert {ask.refusal for ask in malformed} == {"", *traffic.BAD_VALUES}
    assert all(ask.refusal.encode() in ask.content for ask in malformed)
    assert any(not ask.content.endswith(b"}") for ask in malformed)


# Answers.

ASK = Ask("chat", "/v1/chat/completions", b"{}", choices=2, tokens=6)
STREAM = Ask("completions, streamed", "/v1/completions", b"{}", choices=1, tokens=3, stream=True)
BAD = Ask("malformed", "/v1/completions", b"{}", refusal="kv_budget")


def answer(ends=("length", "length"), tokens=6, text=" w1") -> httpx.Response:
    choices = [{"finish_reason": end, "text": text} for end in ends]
    return httpx.Response(200, json={"choices": choices, "usage": {"completion_tokens": tokens}})


def stream(*events) -> httpx.Response:
    async def lines() -> AsyncIterator[bytes]:
        for event in events:
            yield f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()

    return httpx.Response(200, content=lines())


PIECE = {"choices": [{"finish_reason": None}]}
LAST = {"choices": [{"finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 3}}


@pytest.mark.parametrize(
    "ask, response, result",
    [
        (ASK, answer(), EXPECTED),
        (ASK, answer(("length",)), WRONG),
        (ASK, answer(("length", "abort")), WRONG),
        (ASK, answer(tokens=5), WRONG),
        (ASK, httpx.Response(500, text="oh"), WRONG),
        (ASK, httpx.Response(400, text="no"), WRONG),
        (ASK, httpx.Response(200, text="not JSON"), BROKEN),
        (Ask("probe", "/", b"", tokens=6, text=" w1"), answer(("length",)), EXPECTED),
        (Ask("probe", "/", b"", tokens=6, text=" w2"), answer(("length",)), WRONG),
        (BAD, httpx.Response(400, text="kv_budget must be"), EXPECTED),
        (BAD, httpx.Response(400, text="no"), WRONG),
        (BAD, answer(), WRONG),
        (BAD, httpx.Response(500, text="kv_budget"), WRONG),
        (STREAM, stream(PIECE, LAST, USAGE, "[DONE]"), EXPECTED),
        (STREAM, stream(PIECE, LAST, "[DONE]"), WRONG),
        (STREAM, stream(PIECE, {"error": {"code": 500}}, "[DONE]"), WRONG),
        (STREAM, stream(PIECE), BROKEN),
        (STREAM, httpx.Response(503, text="busy"), WRONG),
        (Ask("s", "/", b"", tokens=3, stream=True, leave=1), stream(PIECE, LAST, USAGE, "[DONE]"), LEFT),
        (Ask("s", "/", b"", tokens=3, stream=True, leave=9), stream(PIECE, LAST, USAGE, "[DONE]"), EXPECTED),
    ],
)
def test_what_becomes_of_a_request(ask, response, result):
    assert outcome_of(ask, lambda request: response).result == result


def outcome_of(ask: Ask, handler) -> Outcome:
    async def one() -> Outcome:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://x") as client:
            return await traffic.send(client, ask)

    return asyncio.run(one())


async def never(request: httpx.Request) -> httpx.Response:
    await asyncio.sleep(60)
    raise AssertionError


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def test_silence_is_a_hang_and_leaving_is_not(monkeypatch):
    assert outcome_of(Ask("left", "/", b"", leave=0.01), never).result == LEFT
    monkeypatch.setattr(traffic, "DEADLINE", 0.05)
    assert outcome_of(ASK, never).result == outcome_of(STREAM, never).result == HUNG
    assert outcome_of(ASK, refuse).result == BROKEN


# The verdict.


def test_tracebacks_of_refused_bodies_do_not_count():
    start = "Traceback (most recent call last):\n  File ...\n"
    broken = (
        f"{start}json.decoder.JSONDecodeError: ...\n{start}fastapi.exceptions.RequestValidationError: 4\n"
    )
    assert tracebacks("INFO nothing\n") == tracebacks(broken) == 0
    assert tracebacks(f"{broken}{start}KeyError: 1\nINFO\n{broken}") == 1


def samples(*rss: float) -> list[Sample]:
    return [Sample(mib, Snapshot(preemptions=3)) for mib in rss]


def test_growth_is_measured_after_the_warm_up():
    warm = samples(*[50] * 4, *[100] * 9)
    assert baseline(warm) == 100 and growth(warm) == 0
    leaking = samples(*[100 + second for second in range(13)])
    assert baseline(leaking) == 105 and growth(leaking) == pytest.approx(111 / 105 - 1)
    assert growth(samples(100)) == 0


IDLE = Snapshot(physical_pages=0, logical_entries=0)


def verdict(*outcomes: tuple[Ask, Outcome], rss=(100, 100), idle=IDLE, empty=IDLE, changed=0, tracebacks=0):
    soak = RandomSoak(parse_arguments(["--requests", "5"]))
    soak.samples, soak.idle, soak.empty, soak.changed = samples(*rss), idle, empty, changed
    for ask, outcome in outcomes:
        soak.note_answer(ask, outcome)
    soak.judge(tracebacks)
    return soak


def turn_of(turn: Turn, cached: int) -> tuple[Ask, Outcome]:
    ask = Ask("conversation, goes on", "/v1/completions", b"{}", tokens=3, turn=turn)
    return ask, Outcome(EXPECTED, 200, answer=Answer(["length"], 3, " w1", cached))


FIRST = Turn(("w1 w2 w3 w4", "w5 w6"), 3)
LATER = Turn((*FIRST.said, "w7", "w8"), 3)
FOUND = turn_of(LATER, cached=7)
GOOD = [(ASK, Outcome(EXPECTED, 200)), (BAD, Outcome(EXPECTED, 400)), (STREAM, Outcome(LEFT)), FOUND]


def test_a_good_run_passes_and_is_recorded(monkeypatch):
    soak = verdict(*GOOD)
    assert not missed(soak) and soak.tally.total() == 4 and not soak.failures
    saved = {}
    monkeypatch.setattr(
        soaking, "save", lambda name, content, folder: saved.update({name: (content, folder)})
    )
    soak.console = Console(file=io.StringIO(), width=110)
    soak._report(2.0, 0.5)
    content, folder = saved["soak"]
    assert folder == soaking.RESULTS and content["results"]["tally"]["chat: as expected"] == 1
    assert len(content["results"]["targets"]) == 13 and content["results"]["extremes"]["preemptions"] == 3
    assert "4 requests in 2 s" in soak.console.file.getvalue()
    assert not RandomSoak(parse_arguments(["--minutes", "0.5"])).passed  # nothing measured is no success


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"outcome": (ASK, Outcome(HUNG))}, {"requests that hung"}),
        ({"outcome": (ASK, Outcome(BROKEN))}, {"connections that broke off"}),
        ({"outcome": (ASK, Outcome(WRONG, 200))}, {"wrong answers"}),
        ({"outcome": (ASK, Outcome(WRONG, 500))}, {"wrong answers", "answers 5xx"}),
        ({"outcome": (BAD, Outcome(WRONG, 200))}, {"malformed requests not refused with 4xx"}),
        ({"changed": 1}, {"probes answered otherwise at the end"}),
        ({"tracebacks": 1}, {"tracebacks in the server's log"}),
        ({"idle": Snapshot(running=1)}, {"requests running or waiting when idle"}),
        ({"idle": Snapshot(waiting=1)}, {"requests running or waiting when idle"}),
        ({"idle": Snapshot(physical_pages=2, cached_pages=1)}, {"pages held when idle"}),
        ({"empty": Snapshot(physical_pages=1, cached_pages=1)}, {"pages cached after a reset"}),
        ({"empty": Snapshot(logical_entries=1)}, {"KV entries stored when idle"}),
        ({"rss": [100] * 9 + [103] * 3}, {"growth of the resident memory after a third of the load"}),
    ],
)
def test_each_requirement_can_fail(change, expected):
    change = dict(change)
    outcomes = [*GOOD, change.pop("outcome")] if "outcome" in change else GOOD
    soak = verdict(*outcomes, **change)
    assert missed(soak) == expected and len(soak.failures) == len(outcomes) - len(GOOD)


def test_conversations_must_be_found():
    """First turns do not count, and what is found otherwise is no chain."""
    first, *others = turn_of(FIRST, 4), *(turn_of(LATER, cached) for cached in (0, 4, 6))
    assert verdict(*GOOD, *[first] * 99, *others * 3).passed
    assert missed(verdict(*GOOD, *others * 4)) == {"share of later turns that begin with earlier ones"}


def test_a_soak_waits_until_nothing_is_held():
    held = Snapshot(physical_pages=2, cached_pages=2)
    seen = iter([Snapshot(running=1), Snapshot(physical_pages=3, cached_pages=2), held, held, IDLE])

    class Resting:
        async def snapshot(self):
            return next(seen)

    assert asyncio.run(until_idle(Resting())) == held
    assert asyncio.run(until_idle(Resting(), empty=True)) == IDLE


# Conversations.


def test_turns_end_where_answers_do():
    assert FIRST.ends == [4] and LATER.ends == [4, 7] and LATER.is_later and not FIRST.is_later
    assert LATER.prompt("completions") == {"prompt": "w1 w2 w3 w4 w5 w6 w7 w8"}
    roles = "system", "user", "assistant", "user"
    messages = [(message["role"], message["content"]) for message in LATER.prompt("chat")["messages"]]
    assert messages == list(zip(roles, LATER.said, strict=True))
    # One turn may be found as a single prefix is, and whole blocks as uncompressed ones are.
    assert [cached for cached in range(9) if LATER.is_found(cached)] == [7]
    block = Turn(("w1 w2 w3 w4", "w " * (BLOCK - 5), "w7", "w8"), 3)
    assert block.ends == [4, BLOCK] and not block.is_found(BLOCK)


def test_the_same_turn_must_be_answered_in_the_same_way():
    requests = Traffic("m", 0, 50, MAX_LEN, PROBES)
    turn = Ask("conversation", "/v1/completions", b"", tokens=3, turn=LATER)
    other = Ask("completions", "/v1/completions", b"", tokens=3)

    def hear(ask: Ask, text: str, result: str = EXPECTED) -> str:
        return requests.hear(ask, Outcome(result, 200, answer=Answer(["length"], 3, text))).result

    assert hear(turn, " w2", WRONG) == WRONG  # and is not what others must be answered
    assert hear(turn, " w1") == hear(turn, " w1") == EXPECTED
    assert hear(turn, " w2") == WRONG
    assert hear(other, " w1") == hear(other, " w2") == EXPECTED
    assert requests.hear(turn, Outcome(LEFT)).result == LEFT
