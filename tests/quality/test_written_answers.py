"""Answers that are scored while they are evicted: what counts, and runs against a server that only pretends."""

import json
from collections import Counter
from itertools import product

import pytest

from tests.quality.fake_openai import FAST, INTERVAL, LENGTH, FakeServer
from vllm_kvevict.engine.decoding import DecodeOptions
from vllm_kvevict.quality import __main__ as quality
from vllm_kvevict.quality.decoding import (
    DECODING,
    PIECE,
    TRIES,
    WRITTEN,
    Decoded,
    Written,
    first_changed,
    interval_of,
    places,
    repeats_itself,
    score,
)
from vllm_kvevict.quality.decoding_tasks import recall, writing
from vllm_kvevict.quality.measures import gather
from vllm_kvevict.quality.results import FULL, Column, read
from vllm_kvevict.quality.scores import of_task

BUDGET = 32
NAMES = ("snapkv", "streaming-llm")
FIRST = BUDGET + INTERVAL + 1


def written(tokens=(5, 6, 7), counted=()) -> Written:
    return Written("writing", None, None, 0, "x", 300, tuple(tokens), tuple(counted), 1, 0, "text")


@pytest.mark.parametrize("budget", [16, 256, 1000, 1024, 2000, 4096])
def test_the_interval_is_the_servers(budget):
    for asked in (None, 24):
        options = DecodeOptions(budget, asked, None, "snapkv", {}, "measured", 32)
        assert interval_of(budget, asked) == options.interval_for(budget)


def test_tokens_count_that_are_chosen_behind_the_first_eviction():
    """The server evicts when prompt and D + I tokens are stored; the last of them has chosen the next one already."""
    options = DecodeOptions(256, None, None, "snapkv", {}, "measured", 32)
    position = options.phase(256, 300).positions[0]
    assert first_changed(256, interval_of(256)) == position - 300 + 1
    answer, column = written(range(500)), Column("snapkv", 256, "answer")
    assert list(places(answer, column, None)) == list(range(385, 500))
    assert list(places(answer, Column(FULL), None)) == list(range(500))
    assert list(places(written(range(500), (3, 384, 385, 499)), column, None)) == [385, 499]


def test_answers_that_repeat_themselves():
    row = list(range(16))
    assert repeats_itself([*row, 90, *row, 91, *row])
    assert not repeats_itself([*row, 90, *row, 91])
    assert not repeats_itself([*row[:15], 90, *row[:15], 91, *row[:15], 92])
    assert repeats_itself([7] * 18) and not repeats_itself([7] * 17)


def test_agreement_is_of_the_most_likely_token_and_recall_of_the_answers_own():
    full = [{5: -0.1, 8: -3.0}, {8: -0.2, 6: -2.0}, {7: -0.3, 8: -2.0}]
    found = [{5: -0.4, 8: -2.0}, {8: -0.1, 6: -3.0}, {8: -0.2, 7: -2.5}]
    made = score(written(), Column("snapkv", 4, "answer"), full, found, (0, 1, 2), 304, 1.0)
    assert made.agrees == (True, True, False) and made.hits == (True, False, False)
    assert made.differences == pytest.approx((-0.3, -1.0, -2.2)) and min(made.divergences) > 0
    assert Decoded.parse(json.dumps(vars(made))) == made
    same = score(written(), Column(FULL), full, full, (0, 1, 2), None, 1.0)
    assert all(same.agrees) and same.divergences == (0.0, 0.0, 0.0)


def test_what_is_recalled_was_said_before():
    for index in range(5):
        _, pieces = recall(3, index, 60)
        values = pieces[1::2]
        begin, between, _ = pieces[0].split("\n\n")
        assert len(values) == 4 and all(begin.count(value) == 1 for value in values)
        assert len(between.split()) >= 60 and not any(value in between for value in values)
    assert recall(3, 0, 60) == recall(3, 0, 60) != recall(4, 0, 60)
    assert writing(3, 10) == writing(3, 20)[:10] != writing(4, 10)


def answers(server: FakeServer, folder, policy="snapkv", *more) -> int:
    shape = ["--samples", "3", "--answer-tokens", LENGTH, "--budgets", BUDGET, "--interval", INTERVAL]
    basis = ["answers", "--url", server.url, "--output", folder, "--policy", policy, *shape]
    return quality.main([str(word) for word in (*basis, *FAST, *more)])


def test_requests_and_measures(tmp_path):
    with FakeServer() as server:
        assert answers(server, tmp_path) == 0
    wrote = [body for body in server.asked if "logprobs" in body]
    assert len({body["seed"] for body in wrote}) == len(wrote) == 6
    assert Counter(body["max_tokens"] for body in wrote) == {PIECE: 3, LENGTH - PIECE: 3}
    for body in wrote:
        assert body["max_tokens"] == body["min_tokens"] and body["temperature"] == 0.8
        assert body["vllm_xargs"] == {"kv_eviction": "full", "kv_decode_budget": 0}
    scored = [body for body in server.asked if "prompt_logprobs" in body]
    fields = [(len(body["prompt"]), body["vllm_xargs"]) for body in scored]
    told = {one.sample: one for one in read(tmp_path / WRITTEN, Written)}
    assert len(told["writing", LENGTH, None, 0].tokens) == LENGTH
    evicted = [(length, own["kv_answer_from"]) for length, own in fields if own["kv_decode_budget"] == BUDGET]
    expected = [(one.prompt_tokens + len(one.tokens), one.prompt_tokens) for one in told.values()]
    assert Counter(evicted) == Counter(expected)
    found = list(read(tmp_path / DECODING, Decoded))
    kinds = Counter((one.task, one.policy) for one in found)
    assert set(kinds.values()) == {3} and set(kinds) == {*product(("writing", "recall"), (FULL, "snapkv"))}
    for one in found:
        if one.task == "writing" and one.policy != FULL:
            assert one.first == FIRST and len(one.agrees) == LENGTH - FIRST
            assert one.evict_at == one.prompt_tokens + BUDGET + INTERVAL
            assert not any(one.agrees) and min(one.divergences) > 0.1
        elif one.policy == FULL:
            assert all(one.agrees) and max(one.divergences) < 1e-6
        if one.task == "recall":
            said = told[one.sample].text.split()
            assert len(one.hits) == 4 and one.answer_tokens > len(said) - 4


def test_one_token_earlier_nothing_has_changed(tmp_path):
    """A wrong interval is seen: with a longer one than ours, the first tokens that count have not changed."""
    with FakeServer() as server:
        assert answers(server, tmp_path, "snapkv", "--interval", INTERVAL - 1) == 0
    found = [one for one in read(tmp_path / DECODING, Decoded) if one.policy != FULL]
    assert {one.agrees[:2] for one in found if one.task == "writing"} == {(True, False)}


def test_servers_with_other_policies_score_the_same_answers(tmp_path):
    with FakeServer(loss=2.0) as server:
        assert answers(server, tmp_path, "streaming-llm") == 0
    with FakeServer(loss=0.9) as other:
        assert answers(other, tmp_path, "snapkv") == 0
    assert not any("logprobs" in body for body in other.asked) and len(other.asked) == 6
    assert quality.main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Quality under eviction\n\n## Answers that are evicted while they are written\n")
    assert "agreement 1.0000" in text and "3 answers of 160 to 160 tokens." in text
    rows = [line for line in text.splitlines() if line.startswith(("| full", "| snapkv", "| streaming-llm"))]
    assert [row.split("|")[1].strip() for row in rows] == ["full", "snapkv", "streaming-llm"] * 2
    found, (_, ours, baseline, whole, forgets, _) = gather(tmp_path, Decoded), rows
    kl = [
        found.divergence.mean(Column(policy, BUDGET, "answer"), of_task("writing")).mean for policy in NAMES
    ]
    assert f"| {kl[0] / kl[1]:.3f} [" in ours and kl[0] < kl[1] and "| - |" in baseline
    assert whole.endswith("| 1.000 [1.000, 1.000] |") and forgets.endswith("| 0.000 [0.000, 0.000] |")


def test_answers_that_repeat_themselves_are_left_out(tmp_path, capsys):
    with FakeServer(repeats=(0,)) as server:
        assert answers(server, tmp_path / "some", "snapkv", "--tasks", "writing") == 0
    # Such a try ends with its first piece.
    assert sum("logprobs" in body for body in server.asked) == 3 * (1 + 2)
    assert {one.left_out for one in read(tmp_path / "some" / WRITTEN, Written)} == {1}
    with FakeServer(repeats=range(TRIES)) as server:
        assert answers(server, tmp_path / "all", "snapkv", "--tasks", "writing") == 2
    expected = "says 16 tokens 3 times in each of 64 answers to writing, 160 tokens, sample"
    assert expected in capsys.readouterr().err


def test_own_prompts(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one two three"}\n')
    with FakeServer() as server:
        assert answers(server, tmp_path / "out", "snapkv", "--prompts", tmp_path / "prompts.jsonl") == 0
    (one,) = read(tmp_path / "out" / WRITTEN, Written)
    assert (one.task, one.prompt_tokens) == ("prompts", 3)


@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        ({"decodes": False}, [], "start its server with --kv-eviction full --kv-decode-budget D"),
        ({"evicts": False}, [], "ignores kv_eviction"),
        ({"tells": False}, [], "/v1 answers without logprobs"),
        ({}, ["--budgets", "152"], "--answer-tokens must be above 161, not 160"),
        ({}, ["--budgets", "120", "--tasks", "recall"], "before what counts"),
    ],
)
def test_what_cannot_be_scored(settings, more, message, tmp_path, capsys):
    with FakeServer(**settings) as server:
        assert answers(server, tmp_path, "snapkv", *more) == 2
    assert message in " ".join(capsys.readouterr().err.split())
