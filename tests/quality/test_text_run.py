"""The driver on real text and with policies that have parameters, against a server that only pretends."""

import json
from collections import Counter

from tests.quality.fake_openai import FakeServer
from tests.quality.test_quality_run import FAST, arguments, results, run


def test_parameters_of_a_column_are_sent_with_its_requests(tmp_path):
    argv = ("--policies", "full", "snapkv:kernel=31@x", "snapkv", "--budgets", "0.2", "--samples", "1")
    with FakeServer() as server:
        assert run(*arguments(server, tmp_path, *argv)) == 0
    fields = Counter(json.dumps(body["vllm_xargs"], sort_keys=True) for body in server.asked)
    assert fields == {
        '{"kv_eviction": "full"}': 1,
        '{"kv_budget": 0.2, "kv_eviction": "snapkv"}': 1,
        '{"kv_budget": 0.2, "kv_eviction": "snapkv", "kv_params": "kernel=31"}': 1,
    }
    policies = {r.column.policy for r in results(tmp_path)}
    assert policies == {"full", "snapkv", "snapkv:kernel=31@x"}


def test_a_server_that_takes_no_parameters_by_request_is_refused_before_anything_is_asked(tmp_path, capsys):
    argv = ("--policies", "full", "snapkv:kernel=31,rows=max", "--budgets", "0.2")
    with FakeServer(tunes=False) as server:
        assert run(*arguments(server, tmp_path, *argv)) == 2
    err = capsys.readouterr().err
    assert "takes parameters at its start only" in err and not server.asked and not list(tmp_path.iterdir())
    assert "--kv-eviction snapkv --kv-eviction-config.kernel 31 --kv-eviction-config.rows max" in err
    assert "ask it for snapkv@kernel=31,rows=max" in err


TEXT = ("--family", "text", "--tasks", "number", "json", "--samples", "2", "--policies", "full")


def test_questions_on_real_text(tmp_path):
    argv = ["run", *TEXT, "snapkv", "--budgets", "0.2", "--scopes", "prompt", "prefix", *FAST]
    with FakeServer() as server:
        assert run(*argv, "--url", server.url, "--output", str(tmp_path), "--tokens", "400") == 0
        found = results(tmp_path)
        assert Counter(r.task for r in found) == {"text/number": 6, "text/json": 6}
        assert {r.length for r in found} == {400} and all(360 < r.prompt_tokens <= 400 for r in found)
        for body in server.asked:
            assert [m["role"] for m in body["messages"]] == ["user", "assistant"]
            if "kv_prefix_len" in (fields := body["vllm_xargs"]):
                text = body["messages"][0]["content"].rpartition("\n\n")[0]
                assert fields["kv_prefix_len"] == len(text.split()) + 1  # and the mark of the user
        before = len(server.asked)
        assert run(*argv, "--url", server.url, "--output", str(tmp_path), "--tokens", "400") == 0
        assert len(server.asked) == before  # nothing is asked twice
        harder = [*argv, "--difficulty", "json=24", "--url", server.url, "--output", str(tmp_path)]
        assert run(*harder) == 2  # other texts need another folder


def test_a_model_that_can_do_nothing_is_said_to_first(tmp_path):
    argv = ["run", *TEXT, "snapkv", "--budgets", "0.2", *FAST, "--form", "plain", "--tokens", "400"]
    with FakeServer() as server:
        assert run(*argv, "--url", server.url, "--output", str(tmp_path)) == 0
    assert all("prompt" in body for body in server.asked)
    assert run("report", str(tmp_path)) == 0
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert lines[2].startswith(
        "**With the full cache the model scores 0.00: it cannot answer these questions"
    )
    assert lines.count("| text/number | 0.00 | the model cannot do this |") == 1
    assert lines.count("| text/json | 0.00 | the model cannot do this |") == 1


CHATS = ("--family", "chats", "--tasks", "turns-number", "turns-words", "--samples", "4", "--tokens", "900")


def test_chats_are_evicted_turn_by_turn_by_a_server_that_finds_their_turns(tmp_path):
    argv = ["run", *CHATS, "--policies", "full", "snapkv", "--budgets", "0.25", "--scopes", "turns", "prefix"]
    with FakeServer(finds_turns=True) as server:
        assert run(*argv, *FAST, "--url", server.url, "--output", str(tmp_path)) == 0
    found = results(tmp_path)
    assert Counter((r.policy, r.scope) for r in found) == {
        ("full", None): 8,
        ("snapkv", "turns"): 8,
        ("snapkv", "prefix"): 8,
    }
    chosen = {"kv_eviction": "snapkv", "kv_budget": 0.25}
    fields = [body["vllm_xargs"] for body in server.asked]
    assert fields.count(chosen) == 8
    prefixes = [f["kv_prefix_len"] for f in fields if "kv_prefix_len" in f]
    assert sorted(prefixes) == sorted(r.evict_at for r in found if r.scope == "turns")
    assert run("report", str(tmp_path)) == 0
    report = (tmp_path / "report.md").read_text()
    by_turn, beside = report.partition("## Turn by turn")[2].split("How much higher than with one part")
    assert "| told in 1 | told in 2 | told in 3 | told in 4 | asked in 5 |" in by_turn
    assert by_turn.count("| snapkv 0.25 (turns) | 0.000") == by_turn.count("| full | 1.000") == 1
    assert "| snapkv 0.25 (turns) | +0.000 [+0.000, +0.000] |" in beside
