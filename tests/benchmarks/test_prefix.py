"""The loads of the prefix cache's benchmark, how answers are read, and its verdict; no server is started."""

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console

from benchmarks.harness.documents import Answer, ask, waits_table
from benchmarks.harness.load import PAGE
from benchmarks.harness.questions import SCENARIOS, SIDES, STOCK_WITHOUT, WITH, WITHOUT
from benchmarks.harness.scenarios import KV_HEADS, LAYERS, STOCK
from benchmarks.harness.server import ServerError
from benchmarks.prefix import Run, figures, make_server, parse_arguments, table


def test_questions_share_documents_and_nothing_else():
    scenario = replace(SCENARIOS["documents"], document_len=50)
    prompts = scenario.prompts(seed=1)
    assert len(prompts) == 16 * 3 and {len(prompt) for prompt in prompts} == {50 + 32}
    for number in range(16):
        assert prompts[number][:50] == prompts[number + 16][:50] == prompts[number + 32][:50]
    assert len({tuple(prompt[:50]) for prompt in prompts}) == 16
    assert len({tuple(prompt[50:]) for prompt in prompts}) == 48
    assert not {tuple(p[:50]) for p in prompts} & {tuple(p[:50]) for p in scenario.prompts(seed=2)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_sides_differ_in_eviction_and_caching_alone(name, monkeypatch):
    monkeypatch.setattr("benchmarks.prefix.model", lambda max_len: Path("m"))
    flags = {
        side: [word for word in make_server(SCENARIOS[name], side, 1).command if not word.isdigit()]
        for side in (*SIDES, STOCK_WITHOUT)
    }
    policy = "kvzip" if name == "compressed" else "ada-snapkv"
    no_cache = ["--no-enable-prefix-caching"]
    assert flags[WITH] == flags[STOCK] + ["--kv-eviction", policy, "--kv-budget", "0.2"]
    assert flags[WITHOUT] == flags[WITH] + no_cache and flags[STOCK_WITHOUT] == flags[STOCK] + no_cache


def run(first: list[float], wall: float, computed: int = 0, hits: int = 0, preemptions: int = 0) -> Run:
    return Run(wall, first, computed, hits, preemptions, output_tokens=100, cached_pages=0.0)


def test_verdict_on_one_document():
    scenario = SCENARIOS["document"]
    least = 8192 + 16 * 32
    cold = {STOCK: run([1.0], 20.0), WITHOUT: run([10.0], 90.0), WITH: run([1.05], 10.0, least)}
    rounds = [{"cold": cold, "warm": {side: run([0.1], 5.0) for side in SIDES}}] * 3
    targets = figures("document", scenario, rounds)
    assert all(target.met for target in targets) and len(targets) == 5
    assert [round(getattr(t.value, "median", t.value), 3) for t in targets] == [0.105, 1.05, 0.01, 2.0, least]
    # One document read twice is one too many.
    worse = [{**rounds[0], "cold": {**cold, WITH: run([1.05], 10.0, least + 8192)}}, *rounds[1:]]
    assert [target.met for target in figures("document", scenario, worse)] == [True] * 4 + [False]
    console = Console(file=io.StringIO(), width=130)
    console.print(table("document", rounds))
    assert "with cache, warm" in console.file.getvalue()


def test_verdict_on_documents_in_turns():
    waits = [1.0] * 16 + [0.05] * 32
    cold = {STOCK: run([1.0] * 48, 1.0), WITHOUT: run([1.0] * 48, 1.0), WITH: run(waits, 1.0, hits=31)}
    targets = figures("documents", SCENARIOS["documents"], [{"cold": cold}] * 3)
    assert all(target.met for target in targets)
    cold[WITH] = run(waits, 1.0, hits=30)
    cold[STOCK] = run([1.0] * 48, 1.0, hits=2)
    met = [target.met for target in figures("documents", SCENARIOS["documents"], [{"cold": cold}] * 3)]
    assert met == [False, False, True]


def test_verdict_without_shared_prefixes():
    cold = {
        STOCK: run([1.0], 1.0),
        WITHOUT: run([1.0], 1.0, preemptions=2),
        WITH: run([1.0], 1.01, preemptions=2),
    }
    assert all(target.met for target in figures("unique", SCENARIOS["unique"], [{"cold": cold}] * 3))
    cold[WITH] = run([1.0], 1.05, preemptions=3)
    assert not any(target.met for target in figures("unique", SCENARIOS["unique"], [{"cold": cold}] * 3))


def test_verdict_on_a_compressed_document():
    # The first question waits for the compression; the others must not.
    whole = 8192 // PAGE * LAYERS * KV_HEADS
    cold = {
        STOCK_WITHOUT: run([10.0] * 16, 160.0),
        WITH: replace(run([30.0] + [0.15] * 15, 33.0), cached_pages=0.21 * whole),
    }
    targets = figures("compressed", SCENARIOS["compressed"], [{"cold": cold}] * 3)
    assert [round(getattr(t.value, "median", t.value), 3) for t in targets] == [0.015, 0.21]
    assert all(target.met for target in targets)
    cold[WITH] = replace(run([30.0] + [0.25] * 15, 33.0), cached_pages=0.26 * whole)
    assert not any(t.met for t in figures("compressed", SCENARIOS["compressed"], [{"cold": cold}] * 3))


def test_verdict_on_a_long_document():
    def verdict(wait: float) -> bool:
        cold = {STOCK_WITHOUT: run([150.0, 150.0], 310.0), WITH: run([140.0, wait], 142.0)}
        (target,) = figures("long", SCENARIOS["long"], [{"cold": cold}] * 3)
        return target.met

    assert verdict(2.9) and not verdict(3.1)


def test_verdict_on_a_document_that_is_found_uncompressed():
    def verdict(wait: float):
        cold = {side: run([10.0] * 16, 160.0) for side in SIDES}
        cold[WITH] = run([10.0] + [wait] * 15, 20.0)
        return figures("exact", SCENARIOS["exact"], [{"cold": cold}] * 3)

    assert [target.met for target in verdict(0.5)] == [True]
    assert [target.met for target in verdict(0.7)] == [False]
    # The other scenario without a document of its own is judged as prompts that share nothing.
    cold = {WITHOUT: run([1.0], 1.0), WITH: run([1.0], 1.05)}
    targets = figures("unrelated", SCENARIOS["unrelated"], [{"cold": cold}] * 3)
    assert [target.met for target in targets] == [False, True]


def test_command_line():
    assert list(parse_arguments([])[1]) == list(SCENARIOS)
    _, scenarios = parse_arguments(["unique", "--rounds", "1", "--document-len", "64", "--dtype", "float32"])
    assert scenarios["unique"] == replace(SCENARIOS["unique"], rounds=1, document_len=64, dtype="float32")
    with pytest.raises(SystemExit):
        parse_arguments(["nothing"])


# Answers.

TOKEN = {"choices": [{"text": " w1", "token_ids": [1]}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 40}}}


def answer_of(*events, document_len: int | None = 2) -> Answer:
    sent = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return httpx.Response(200, text=lines)

    async def one() -> Answer:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://x") as client:
            return await ask(client, SimpleNamespace(model="m", log="log"), [1, 2, 3], document_len, 3)

    answer = asyncio.run(one())
    fields = None if document_len is None else {"kv_prefix_len": document_len}
    assert sent[0].get("vllm_xargs") == fields and sent[0]["max_tokens"] == 3
    return answer


def test_what_an_answer_tells():
    answer = answer_of(TOKEN, TOKEN, TOKEN, USAGE)
    assert (answer.tokens, answer.cached) == ([1, 1, 1], 40) and 0 < answer.first_token < 60
    assert answer_of(TOKEN, TOKEN, TOKEN).cached == 0
    assert answer_of(TOKEN, TOKEN, TOKEN, USAGE, document_len=None).cached == 40
    with pytest.raises(ServerError, match="an answer has 2 tokens, not 3"):
        answer_of(TOKEN, TOKEN, USAGE)


def test_the_demo_shows_what_each_question_waited():
    console = Console(file=io.StringIO(), width=120)
    console.print(waits_table(2032, [Answer(1.25, [1], 0), Answer(0.05, [1], 2032)]))
    for part in ("2 questions about one document of 2,032 tokens", "1.250 s", "0.050 s", "2,032 "):
        assert part in console.file.getvalue()
