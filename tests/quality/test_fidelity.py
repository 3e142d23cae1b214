"""Fidelity: its measures against slow references, and its runs against a server that only pretends."""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest

from tests.quality.fake_openai import FAST, TOP, FakeServer
from vllm_kvevict.quality import __main__ as quality
from vllm_kvevict.quality.fidelity import ANSWERS, FIDELITY, Answer, Fidelity, divergence, score
from vllm_kvevict.quality.measures import Measures, _lost, fidelity_section, gather
from vllm_kvevict.quality.prompts import SHAPES, read_prompts
from vllm_kvevict.quality.results import RESULTS, Column, Settings, Store, read

VOCABULARY = 60


def distribution(seed: int, sharpness: float = 2.0) -> np.ndarray:
    weights = np.exp(sharpness * np.random.default_rng(seed).standard_normal(VOCABULARY))
    return weights / weights.sum()


def listed(probabilities: np.ndarray, token: int, top: int = TOP) -> dict[int, float]:
    """What a server tells: the most likely tokens, and this one."""
    best = sorted(range(len(probabilities)), key=lambda one: -probabilities[one])[:top]
    return {one: math.log(probabilities[one]) for one in {*best, token}}


def slow_divergence(full: np.ndarray, found: np.ndarray, token: int) -> float:
    """Over the whole vocabulary: every token gets a group, those that one side does not list share one."""
    sides = [listed(one, token) for one in (full, found)]
    group = [one if all(one in side for side in sides) else -1 for one in range(VOCABULARY)]
    total = 0.0
    for name in set(group):
        members = [one for one in range(VOCABULARY) if group[one] == name]
        p, q = (sum(float(side[one]) for one in members) for side in (full, found))
        total += p * math.log(p / q)
    return total


@pytest.mark.parametrize("seed", range(8))
def test_divergence_is_that_of_the_groups_and_a_lower_bound(seed):
    full, found = distribution(seed), distribution(seed + 100, 1.0)
    token = int(full.argmax())
    mine = divergence(listed(full, token), listed(found, token), token)
    assert mine == pytest.approx(slow_divergence(full, found, token), abs=1e-9)
    whole = float((full * np.log(full / found)).sum())
    assert 0 < mine < whole
    complete = [listed(one, token, VOCABULARY) for one in (full, found)]
    assert divergence(*complete, token) == pytest.approx(whole, abs=1e-9)
    assert divergence(complete[0], complete[0], token) == 0.0
    certain, half = {token: 0.0}, {token: math.log(0.5)}  # rounding leaves nothing for the others
    assert divergence(certain, half, token) == pytest.approx(math.log(2))
    assert 0 <= divergence(half, certain, token) < math.inf


def answer(tokens=(5, 6, 7), index=0) -> Answer:
    rows = [{"5": -0.1, "6": -3.0}, {"6": -0.2, "5": -2.0}, {"7": -0.3, "8": -2.0}]
    return Answer("prompts", None, None, index, "x", 300, tokens, rows, "text")


def test_the_first_token_counts_only_where_it_is_chosen_after_the_eviction():
    found = [{5: -2.0, 6: -0.5}, {6: -0.4, 5: -1.5}, {7: -1.8, 8: -0.4}]
    columns = [Column("snapkv", 0.2, scope) for scope in ("prompt", "prefix")]
    prompt, prefix = (score(answer(), column, found, 300, False, 1.0) for column in columns)
    assert (prompt.first, prompt.agrees, prompt.first_lost) == (1, (True, False), 2)
    assert (prefix.first, prefix.agrees, prefix.first_lost) == (0, (False, True, False), 0)
    assert prefix.differences == pytest.approx((-1.9, -0.2, -1.5))
    assert prompt.differences == prefix.differences[1:]
    assert prompt.divergences == prefix.divergences[1:] and min(prefix.divergences) > 0
    assert Fidelity.parse(json.dumps(vars(prompt))) == prompt
    tie = score(answer(), Column("snapkv", 0.2, "prefix"), [{5: -1.0, 6: -1.0}, *found[1:]], 300, False, 1.0)
    assert tie.agrees[0]


def test_where_agreement_is_lost():
    lost = score(answer(), Column("a", 0.2, "prompt"), [{}, {6: -0.4}, {7: -1.8, 8: -0.4}], 300, False, 1.0)
    kept = score(answer(), Column("a", 0.2, "prompt"), [{}, {6: -0.4}, {7: -0.8}], 300, False, 1.0)
    assert _lost([lost, kept])[:4] == ["0.50", "3", "0.750", "-"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "one two three " * 10},
        {"messages": [{"role": "system", "content": "a b " * 20}, {"role": "user", "content": "what now ?"}]},
        {"document": "some words " * 30, "question": "which words ?"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    return path


def fidelity(server: FakeServer, folder, *more) -> int:
    basis = ["fidelity", "--url", server.url, "--output", str(folder), "--policies", "snapkv", "--budgets"]
    return quality.main([*basis, "0.2", "0.8", *FAST, *map(str, more)])


def test_requests_and_measures(prompts, tmp_path):
    folder = tmp_path / "out"
    with FakeServer() as server:
        assert fidelity(server, folder, "--prompts", prompts, "--scopes", "prompt", "prefix") == 0
    found = list(read(folder / FIDELITY, Fidelity))
    # The full cache once, each budget in scope prompt; in scope prefix where something comes before the question.
    assert Counter(one.index for one in found) == {0: 3, 1: 5, 2: 5}
    answers = [body for body in server.asked if "logprobs" in body]
    assert len(answers) == 3 and all(body["vllm_xargs"] == {"kv_eviction": "full"} for body in answers)
    assert all(body["logprobs"] == 20 and body["max_tokens"] == 32 for body in answers)
    forced = [body for body in server.asked if "prompt_logprobs" in body]
    assert len(forced) == len(found)
    for body in forced:
        fields, length = body["vllm_xargs"], len(body["prompt"]) - 3
        assert body["prompt"][length:] == [1001, 1002, 1003] and body["max_tokens"] == 1
        if fields["kv_eviction"] == "full":
            assert fields == {"kv_eviction": "full"}
        else:
            assert fields["kv_prefix_len"] <= length
    evicting = [body for body in forced if len(body["vllm_xargs"]) > 1]
    evicted = [body["vllm_xargs"]["kv_prefix_len"] - len(body["prompt"]) + 3 for body in evicting]
    assert Counter(evicted) == {0: 6, -4: 4}  # the question of three words and the mark of the reply
    # One prompt after another, with all columns of each.
    order = [tuple(body["prompt"][:4]) for body in server.asked]
    assert len(list(dict.fromkeys(order))) == 3 and order == sorted(order, key=order.index)
    assert quality.main(["report", str(folder)]) == 0
    text = (folder / "report.md").read_text()
    assert text.startswith("# Quality under eviction\n\n## Fidelity: how far answers change\n")
    assert "lower bound" in text and "agreement 1.0000, KL 0.000000" in text and "## Which policy" not in text
    assert "| snapkv | 0.2 | 0.000 " in text and "| snapkv | 0.8 | 1.000 " in text
    assert (folder / "report" / "divergence.png").exists()


def test_exact_tokens_of_a_lookahead_count_apart(prompts, tmp_path):
    """Of three tokens the first is chosen before any eviction, and of a lookahead of one the second, too."""
    folder, ahead = tmp_path / "out", ["snapkv:kernel=5,lookahead=1", "snapkv:lookahead=3"]
    with FakeServer() as server:
        assert fidelity(server, folder, "--prompts", prompts, "--policies", "snapkv:lookahead=0", *ahead) == 0
    fields = [body["vllm_xargs"] for body in server.asked if "prompt_logprobs" in body]
    of_first = [one for one in fields if one.get("kv_budget") == 0.2][:3]
    n = of_first[0]["kv_prefix_len"]
    basis = {"kv_eviction": "snapkv", "kv_budget": 0.2}
    assert of_first == [
        basis | {"kv_lookahead": 0, "kv_prefix_len": n},
        basis | {"kv_params": "kernel=5", "kv_lookahead": 1, "kv_answer_from": n},
        basis | {"kv_lookahead": 3, "kv_answer_from": n},
    ]
    found = gather(folder, Fidelity)
    columns = [Column(name, 0.2, "prompt") for name in ("snapkv:lookahead=0", *ahead)]
    said = [(one.exact, one.agrees) for column in columns for one in found.of(column)[:1]]
    assert said == [(0, (False, False)), (1, (True, False)), (2, (True, True))]
    means = [found.divergence.mean(column).mean for column in columns]
    assert means == pytest.approx([means[0], means[0] / 2, 0.0])
    text = "\n".join(fidelity_section(found))
    assert "Of 18 exact tokens the largest KL is 0." in text and "| KL behind the exact tokens |" in text
    behind = [row.split("|")[-2].split()[0] for row in text.splitlines() if row.startswith("| snapkv")][:3]
    assert behind == [f"{means[0]:.3f}", f"{means[0]:.3f}", "-"]


def test_it_goes_on_where_it_was_interrupted(prompts, tmp_path, capsys):
    folder = tmp_path / "out"
    with FakeServer() as server:
        assert fidelity(server, folder, "--prompts", prompts) == 0
        lines = (folder / FIDELITY).read_bytes().splitlines(keepends=True)
        (folder / FIDELITY).write_bytes(b"".join(lines[:-2]) + lines[-2][:10])
        before = len(server.asked)
        assert fidelity(server, folder, "--prompts", prompts) == 0
        again = server.asked[before:]
        assert len(again) == 2 and all("prompt_logprobs" in body for body in again)
        assert len(list(read(folder / ANSWERS, Answer))) == 3
        assert len(list(read(folder / FIDELITY, Fidelity))) == 9
        assert fidelity(server, folder, "--prompts", prompts, "--answer-tokens", "16") == 2
        # Another prompt in its place is not mixed with the old answer.
        prompts.write_text(prompts.read_text().replace("some words", "other words"))
        assert fidelity(server, folder, "--prompts", prompts) == 2
        assert "the texts of task prompts, which have changed" in capsys.readouterr().err


def test_settings_of_a_run_that_stored_nothing_do_not_count(prompts, tmp_path):
    with FakeServer() as server:
        assert fidelity(server, tmp_path / "out", "--prompts", prompts, "--top", "40") == 2
        assert fidelity(server, tmp_path / "out", "--prompts", prompts) == 0


def test_a_full_cache_that_disagrees_with_itself_is_an_error(prompts, tmp_path, capsys):
    folder = tmp_path / "out"
    with FakeServer(noise=0.6) as server:
        assert fidelity(server, folder, "--prompts", prompts) == 2
    err = capsys.readouterr().err
    assert "the full cache agrees with itself on 0.000 of the tokens only" in err and "--dtype float32" in err
    assert gather(folder, Fidelity).floor.mean == 0.0
    (folder / RESULTS).touch()  # of a run that was killed before it had an answer
    assert quality.main(["report", str(folder)]) == 0
    assert "the measures of the others mean little" in (folder / "report.md").read_text()


def test_real_text_is_scored_too(tmp_path):
    more = ["--tasks", "summary", "number", "open", "--samples", "2", "--tokens", "300", "--scopes", "prefix"]
    with FakeServer() as server:
        assert fidelity(server, tmp_path, *more) == 0
    found = list(read(tmp_path / FIDELITY, Fidelity))
    assert Counter(one.task for one in found) == {f"text/{name}": 6 for name in ("summary", "number", "open")}
    assert {one.length for one in found} == {300} and all(270 < one.prompt_tokens <= 300 for one in found)
    assert {(one.whole, one.first) for one in found if one.budget} == {(False, 0)}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--policies", "take"], "take cannot be scored this way, since it evicts while it reads the prompt"),
        (["--policies", "lava"], "unknown policy 'lava'"),
        (["--top", "40"], "--top 40 needs a server with --max-logprobs of at least that"),
        (["--prompts", "{plain}", "--scopes", "prefix"], "no prompt has anything before its question"),
    ],
)
def test_what_cannot_be_scored(more, message, prompts, tmp_path, capsys):
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "a b c"}\n')
    basis = [] if "--prompts" in more else ["--prompts", prompts]
    with FakeServer() as server:
        assert fidelity(server, tmp_path / "out", *basis, *(word.format(plain=plain) for word in more)) == 2
    assert message in capsys.readouterr().err


def test_chats_are_evicted_turn_by_turn(prompts, tmp_path):
    """As the server says when it renders them; what it keeps whole is marked."""
    folder = tmp_path / "out"
    with FakeServer(finds_turns=True) as server:
        scopes = ("--scopes", "turns", "prefix", "--min-prompt", "0")
        assert fidelity(server, folder, "--prompts", prompts, *scopes) == 0
    found = [one for one in read(folder / FIDELITY, Fidelity) if one.scope == "turns"]
    told = {(one.index, one.evict_at, one.whole, one.first) for one in found}
    assert told == {(1, 41, False, 0), (2, 0, True, 0)}
    asked = [body for body in server.asked if "token_ids" in body]
    assert len(asked) == len(found) == 4
    fields = {"kv_eviction": "snapkv", "kv_budget": 0.2, "kv_turns": [41], "kv_rendered": {}}
    sampling = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 20, "extra_args": fields}
    assert asked[0]["sampling_params"] == sampling and asked[0]["token_ids"][-3:] == [1001, 1002, 1003]
    assert quality.main(["report", str(folder)]) == 0
    text = (folder / "report.md").read_text()
    assert "### Fidelity in scope turns" in text and "2 prompts or prefixes were too short" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "evicts chats whole: start its server with --kv-eviction-config.scope turns"),
        ({"finds_turns": True, "renders": False}, "start its server with --enable-scale-out"),
        ({"finds_turns": True, "extra": [7]}, "renders prompts, sample 1 and tokenizes it as different"),
    ],
)
def test_servers_that_do_not_tell_turns(settings, message, prompts, tmp_path, capsys):
    with FakeServer(**settings) as server:
        assert fidelity(server, tmp_path / "out", "--prompts", prompts, "--scopes", "turns") == 2
    assert message in capsys.readouterr().err


TEXTS = "with texts that are not empty: "
ANSWERED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("5", f"line 2 is not {SHAPES}, {TEXTS}it has no fields"),
        ('{"text": "x"}', f"line 2 is not {SHAPES}, {TEXTS}its fields are text"),
        ('{"prompt": 3}', f"line 2 is not {SHAPES}, {TEXTS}its fields are prompt"),
        ('{"messages": []}', "line 2 must be a list of messages"),
        (
            json.dumps(ANSWERED),
            "line 2, message 2: the last message is the assistant's, whose turn it is next",
        ),
    ],
)
def test_wrong_prompts_are_named(line, message, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    with FakeServer() as server:
        assert fidelity(server, tmp_path / "out", "--prompts", path) == 2
    assert f"--prompts {path} {message}" in capsys.readouterr().err


def test_prompts_become_chats_and_texts(prompts):
    goes_on = {"messages": ANSWERED, "add_generation_prompt": False, "continue_final_message": True}
    prompts.write_text(prompts.read_text() + json.dumps(goes_on))
    plain, chat, document, answer = read_prompts(str(prompts))
    assert answer.prompt() == goes_on and not answer.has_prefix
    assert plain.prompt() == {"prompt": "one two three " * 10} and not plain.has_prefix
    assert [m["role"] for m in chat.prompt()["messages"]] == ["system", "user"] and chat.has_prefix
    (message,) = document.prompt()["messages"]
    assert message["content"] == "some words " * 30 + "\n\nwhich words ?" and document.has_prefix


def test_intervals_are_paired(tmp_path):
    """Answers differ much, two columns by the same little everywhere: the difference has no width."""
    rng = random.Random(0)
    with Store(tmp_path / FIDELITY, Fidelity) as store:
        for index in range(12):
            base = rng.random()
            for policy, more in (("snapkv", 0.25), ("ada-snapkv", 0.0)):
                cell = ("prompts", None, None, index, policy, 0.2, "prompt")
                store.add(Fidelity(*cell, 1, (True,), (-base,), (base + more,), 300, 300, False, 1.0))
    found = Measures(Settings("m", 0, False, 0, {}, top=20), [], list(read(tmp_path / FIDELITY, Fidelity)))
    mean = found.divergence.mean(Column("snapkv", 0.2, "prompt"))
    assert mean.high - mean.low > 0.1
    text = "\n".join(fidelity_section(found))
    assert "+0.250 [+0.250, +0.250]" in text and "The full cache was not scored against itself." in text
