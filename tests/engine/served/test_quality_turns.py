"""`quality run` and `fidelity` with `--scopes turns` against a server that compresses chats turn by turn."""

import json
import random

import httpx
import pytest

from benchmarks.quality import NEEDLE
from tests.engine.support.clients import evictions
from tests.engine.support.serving import ForkedServer, log_evictions
from vllm_kvevict.quality import __main__ as quality
from vllm_kvevict.quality.fidelity import ANSWERS, FIDELITY, Answer, Fidelity
from vllm_kvevict.quality.results import RESULTS, Column, Result, read
from vllm_kvevict.quality.tasks import make

pytestmark = pytest.mark.engine
POLICY, BUDGET, SAMPLES = "streaming-llm", 0.25, 3


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ["--kv-eviction", POLICY, "--kv-eviction-config.scope", "turns", *log_evictions(log)]
    flags += ["--kv-eviction-config.policies", "all", "--enable-scale-out", "--dtype", "float32"]
    with ForkedServer(NEEDLE, log, *flags) as server:
        yield server


def test_the_turns_of_chats_are_evicted_and_scored(server, tmp_path):
    asked = ["--tasks", "single", "--lengths", "300", "--samples", str(SAMPLES), "--seed", "1"]
    asked += ["--policies", "full", POLICY, "--budgets", str(BUDGET), "--scopes", "turns", "prefix"]
    start = len(server.evictions)
    url = ["--url", f"{server.url}/v1", "--output", str(tmp_path / "out")]
    assert quality.main(["run", *url, *asked]) == 0
    lines = evictions(server, 2 * SAMPLES, start)
    found = list(read(tmp_path / "out" / RESULTS, Result))
    by_column = {
        column: [r for r in found if r.column == column]
        for column in (Column("full"), *(Column(POLICY, BUDGET, scope) for scope in ("turns", "prefix")))
    }
    assert [len(results) for results in by_column.values()] == [SAMPLES] * 3
    full, turns, _ = ([r.score for r in results] for results in by_column.values())
    assert sum(full) > sum(turns)
    # A document is a turn of its own; scope prefix may end a few tokens later, behind the mark of the user.
    of_turns = sorted(r.evict_at for r in by_column[Column(POLICY, BUDGET, "turns")])
    ends = sorted(line["tokens"] for line in lines)
    assert all(0 <= evict_at - end <= 8 for evict_at, end in zip(of_turns, ends[::2], strict=True))


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]


def agent(seed: int) -> dict:
    """Instructions, and results of a tool that the last question is about."""
    rng = random.Random(seed)
    first, second = (make("passage", length, rng) for length in (300, 350))
    return {
        "messages": [
            {"role": "system", "content": first.context},
            {"role": "user", "content": first.question},
            {"role": "assistant", "content": None, "tool_calls": CALLS},
            {"role": "tool", "tool_call_id": "1", "content": second.context},
            {"role": "assistant", "content": first.answer},
            {"role": "user", "content": second.question},
        ],
        "tools": TOOLS,
    }


def said(server, chat: dict, policy: str, tokens: int) -> list[int]:
    """What the server answers to a chat itself, which it evicts as it does for everybody."""
    body = {**chat, "model": server.model, "temperature": 0, "max_tokens": tokens, "logprobs": True}
    body |= {"tool_choice": "none", "return_tokens_as_token_ids": True}
    body["vllm_xargs"] = {"kv_eviction": policy, "kv_budget": BUDGET}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).json()
    return [
        int(row["token"].removeprefix("token_id:")) for row in answer["choices"][0]["logprobs"]["content"]
    ]


def test_answers_are_scored_behind_turns_as_the_server_gives_them(server, tmp_path):
    """The first token that is not a column's first choice is where the server's own answer is another one."""
    chats = [agent(seed) for seed in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    asked = ["--prompts", str(tmp_path / "prompts.jsonl"), "--answer-tokens", "8", "--scopes", "turns"]
    asked += ["--policies", POLICY, "kvzip", "--budgets", str(BUDGET), "1"]
    start = len(server.evictions)
    url = ["--url", f"{server.url}/v1", "--output", str(tmp_path)]
    assert quality.main(["fidelity", *url, *asked]) == 0
    ends = {line["tokens"] for line in evictions(server, 4 * 2 * 2, start)}
    found, answers = list(read(tmp_path / FIDELITY, Fidelity)), list(read(tmp_path / ANSWERS, Answer))
    assert all(all(one.agrees) for one in found if one.budget in (None, 1)) and len(found) == 4 * 5
    evicted = [one for one in found if one.budget == BUDGET]
    assert {one.evict_at for one in evicted} <= ends and not any(one.whole for one in evicted)
    assert any(one.first_lost is not None for one in evicted if one.policy == POLICY)
    for one in evicted:
        (answer,) = (answer for answer in answers if answer.index == one.index)
        tokens = said(server, chats[one.index], one.policy, len(answer.tokens))
        pairs = zip(tokens, answer.tokens, strict=False)
        differs = next((place for place, (token, other) in enumerate(pairs) if token != other), None)
        assert one.first_lost == differs, one
