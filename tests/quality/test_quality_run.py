"""The driver of the quality benchmark against a server that only pretends; real processes where it counts."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.quality.fake_openai import FAST, FakeServer, words
from vllm_kvevict.quality import __main__ as quality
from vllm_kvevict.quality import endpoint
from vllm_kvevict.quality.cases import Generated
from vllm_kvevict.quality.options import PROGRAM, parse_arguments
from vllm_kvevict.quality.results import RESULTS, SETTINGS, Column, Result, read

ROOT = Path(__file__).parents[2]


def arguments(server: FakeServer, folder: Path, *more: str) -> list[str]:
    basis = ["run", "--url", server.url, "--output", str(folder), "--tasks", "single", "--lengths", "40"]
    return [*basis, "--samples", "3", *FAST, *more]


def run(*words: str) -> int:
    return quality.main(words)


def results(folder: Path) -> list:
    return list(read(folder / RESULTS, Result))


def test_requests_and_results(tmp_path):
    with FakeServer() as server:
        code = run(*arguments(server, tmp_path, "--policies", "full", "snapkv", "--budgets", "0.2"))
    assert code == 0
    fields = Counter(json.dumps(body["vllm_xargs"], sort_keys=True) for body in server.asked)
    assert fields == {'{"kv_budget": 0.2, "kv_eviction": "snapkv"}': 3, '{"kv_eviction": "full"}': 3}
    assert all(body["temperature"] == 0 and body["max_tokens"] == 3 * 3 + 8 for body in server.asked)
    assert all([m["role"] for m in body["messages"]] == ["system", "user"] for body in server.asked)
    scores = {(r.policy, r.index): r.score for r in results(tmp_path)}
    assert scores == {**{("full", i): 1.0 for i in range(3)}, **{("snapkv", i): 0.0 for i in range(3)}}
    full, evicted = (next(r for r in results(tmp_path) if r.policy == name) for name in ("full", "snapkv"))
    assert full.evict_at is None and not full.whole
    assert evicted.evict_at == evicted.prompt_tokens > 40 and evicted.whole  # below min_prompt
    assert full.expected[0] in full.reply and full.request.startswith("chatcmpl-")


def test_prefix_len_is_what_two_questions_have_in_common(tmp_path):
    argv = ["--policies", "snapkv", "--budgets", "0.1", "0.2", "--scopes", "prefix", "--concurrency", "4"]
    with FakeServer() as server:
        assert run(*arguments(server, tmp_path, *argv)) == 0
    for body in server.asked:
        before = words({"messages": body["messages"][:1]})[:-1]  # without the mark of the reply
        assert body["vllm_xargs"]["kv_prefix_len"] == len(before) + 1  # and the mark of the user
    assert len(server.tokenized) == 2 * 3  # two for each sample, whatever the number of budgets
    assert {r.evict_at for r in results(tmp_path)} == {b["vllm_xargs"]["kv_prefix_len"] for b in server.asked}


def test_several_questions_about_one_text(tmp_path):
    asked = ("--tasks", "single", "facts", "--lengths", "60", "--samples", "2", "--questions", "3")
    argv = (*asked, "--policies", "snapkv", "--budgets", "0.2", "--scopes", "prefix")
    with FakeServer() as server:
        assert run(*arguments(server, tmp_path, *argv)) == 0
    found = sorted(results(tmp_path), key=lambda one: one.index)
    # The tasks take turns, over the texts as well.
    assert [(one.index, one.task) for one in found] == list(enumerate(["single", "facts"] * 3))
    texts = Counter(body["messages"][0]["content"] for body in server.asked)
    assert len(server.asked) == 6 and list(texts.values()) == [3, 3]
    assert json.loads((tmp_path / SETTINGS).read_text())["questions"] == 3
    assert run("report", str(tmp_path)) == 0
    text = (tmp_path / "report.md").read_text()
    assert "3 questions about each text" in text and "resamples of the texts" in text
    assert "not asked: multikey, " in text


def test_prefix_needs_tokenize(tmp_path, capsys):
    with FakeServer(tokenizes=False) as server:
        argv = arguments(server, tmp_path, "--policies", "full", "snapkv", "--scopes", "prefix")
        assert run(*argv) == 2
    out = capsys.readouterr().err
    assert "/tokenize answered HTTP 404" in out and "--scopes prompt" in out


def test_plain_sends_nothing_of_ours(tmp_path):
    with FakeServer(evicts=False) as server:
        assert run(*arguments(server, tmp_path, "--plain", "--label", "other", "--instruct")) == 0
    assert len(server.asked) == 3 and not any("vllm_xargs" in body for body in server.asked)
    assert all(body["messages"][0]["content"].startswith("Answer from the text") for body in server.asked)
    assert {r.column for r in results(tmp_path)} == {Column("other")}


def test_a_server_that_ignores_the_fields_is_refused(tmp_path, capsys):
    with FakeServer(evicts=False) as server:
        assert run(*arguments(server, tmp_path, "--policies", "snapkv")) == 2
        assert "ignores kv_eviction" in capsys.readouterr().err and not server.asked
        assert run(*arguments(server, tmp_path, "--policies", "full")) == 0  # nothing to ignore


def test_a_failing_endpoint_ends_the_run_but_not_what_is_measured(tmp_path, capsys):
    argv = ("--policies", "full", "--samples", "10", "--concurrency", "1")
    with FakeServer(fail=lambda number, body: (503, "overloaded") if number > 4 else None) as server:
        assert run(*arguments(server, tmp_path, *argv)) == 2
        out = capsys.readouterr().err.replace("\n", " ")
        assert f"{server.url}/chat/completions failed 2 times" in out and "HTTP 503: overloaded" in out
        assert len(results(tmp_path)) == 4 and len(server.asked) == 6
    with FakeServer(fail=lambda number, body: (503, "busy") if number == 1 else None) as server:
        assert run(*arguments(server, tmp_path, *argv)) == 0  # once is no failure
    assert len(results(tmp_path)) == 10 and len(server.asked) == 7


def test_a_server_that_says_nothing_is_not_waited_for_as_long_as_for_an_answer(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(endpoint, "QUICK_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        assert run("run", "--url", url, "--output", str(tmp_path), "--timeout", "600", *FAST) == 2
    expected = f"{PROGRAM} run: error: {url}/models failed 2 times, the last time with ReadTimeout\n"
    assert capsys.readouterr().err == expected


def test_a_refused_request_names_itself_and_the_reason(tmp_path, capsys):
    with FakeServer(fail=lambda number, body: (400, "too long for me")) as server:
        assert run(*arguments(server, tmp_path, "--policies", "snapkv", "--budgets", "0.1")) == 2
    out = capsys.readouterr().err
    # Requests are sent side by side: any of them may be refused first.
    assert re.search(
        r"HTTP 400: too long for me \(asked: single, 40 words, sample \d; snapkv 0.1 \(prompt\)", out
    )
    with FakeServer() as server:
        assert run(*arguments(server, tmp_path / "b", "--policies", "lava")) == 2
    assert "unknown policy 'lava'" in capsys.readouterr().err


def test_other_settings_need_another_folder(tmp_path, capsys):
    with FakeServer() as server:
        assert run(*arguments(server, tmp_path, "--policies", "full")) == 0
        assert run(*arguments(server, tmp_path, "--policies", "full", "--seed", "7")) == 2
        assert "seed: 0, now 7" in capsys.readouterr().err
        assert run(*arguments(server, tmp_path, "--tasks", "facts", "--policies", "full")) == 0
        assert run(*arguments(server, tmp_path, "--model", "gpt")) == 2
        assert "serves fake, not --model gpt" in capsys.readouterr().err
        assert run(*arguments(server, tmp_path, "--policies", "full", "--questions", "2")) == 2
        assert "questions: 1, now 2" in capsys.readouterr().err
        settings = json.loads((tmp_path / SETTINGS).read_text())
        assert set(settings["texts"]) == {"single", "facts"} and len(settings["runs"]) == 2
        del settings["questions"]  # folders of before there were several can still be read
        settings["texts"]["single"] = "before a change"
        (tmp_path / SETTINGS).write_text(json.dumps(settings))
        assert run(*arguments(server, tmp_path, "--policies", "full")) == 2
        assert "the texts of task single" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"{", b""),
        (b'"score": 1.0', b'"score": "high"'),
        (b'"score": 1.0', b'"score": null'),
        (b'"reply": "', b'"reply": "\xff'),
        (b'"task": "single"', b'"task": ["single"]'),
    ],
)
def test_every_kind_of_damage_is_named(old, new, tmp_path, capsys):
    with FakeServer() as server:
        assert run(*arguments(server, tmp_path, "--policies", "full")) == 0
    path = tmp_path / RESULTS
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"score": 1.0', b'"score": 1', 1))
    assert run("report", str(tmp_path)) == 0  # a whole number is a number
    capsys.readouterr()
    path.write_bytes(content.replace(old, new, 1))
    assert path.read_bytes() != content and run("report", str(tmp_path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{PROGRAM} report: error: {path}, line 1 is not a result: ")


def test_killed_runs_are_continued_without_loss_or_repetition(tmp_path):
    """So is one that somebody ends with Ctrl-C."""
    more = ["--samples", "1050", "--lengths", "12", "--policies", "full", "snapkv", "--budgets", "0.2"]
    with FakeServer() as server:
        command = [sys.executable, "-m", "vllm_kvevict", "quality", *arguments(server, tmp_path, *more)]
        for ended_by, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
            before = len(server.asked)
            # Shells start background jobs, which may be this test's own parents, with SIGINT switched off.
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
            while len(server.asked) < before + 500:
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(ended_by)
            out, _ = process.communicate(timeout=20)
            assert process.returncode == code
        assert "interrupted" in out and "Traceback" not in out
        kept = (tmp_path / RESULTS).read_bytes()
        kept = kept[: kept.rfind(b"\n") + 1]
        assert 900 < kept.count(b"\n") < 2000
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        assert (tmp_path / RESULTS).read_bytes().startswith(kept)
        found = results(tmp_path)  # reading refuses repeated keys
        assert len(found) == 2100
        # What was under way when it was ended is asked again.
        assert 2100 <= len(server.asked) <= 2100 + 2 * 8
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        assert len(server.asked) <= 2100 + 2 * 8 and len(results(tmp_path)) == 2100


# Policies with parameters, and real text.


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


# Arguments and what is generated.


@pytest.mark.parametrize("case", Path(__file__).with_name("wrong_arguments.txt").read_text().splitlines())
def test_wrong_arguments(case, capsys):
    words, _, message = case.partition(": ")
    with pytest.raises(SystemExit):
        parse_arguments(words.split())
    assert message in capsys.readouterr().err


def test_several_questions_are_asked_of_all_tasks_that_share_a_text():
    alone, several = (
        parse_arguments(["run", "--output", "x", "--questions", str(count)]) for count in (1, 5)
    )
    assert set(alone.tasks) - set(several.tasks) == {"common"} and "common" not in several.tasks
    (text,) = {case.context for case in Generated(several.tasks, [400], [None], 1, 0, False, 8, 300)}
    assert len(text.split()) > 400


def test_generated_cases_depend_on_the_seed_only():
    few = Generated(["single", "facts"], [40], [None], 2, 0, False, 8)
    many = Generated(["facts"], [40, 80], [0.5, None], 4, 0, False, 8)
    cases = {case.sample: case.context for case in many}
    assert len(list(few)) == len(few) == 4 and len(cases) == len(many) == 16
    assert all(cases[case.sample] == case.context for case in few if case.task == "facts")
    other = Generated(["facts"], [40], [None], 2, 1, False, 8)
    assert {case.context for case in other}.isdisjoint(cases.values())
    assert few.fingerprints() == Generated(["single", "facts"], [99], [0.1], 1, 0, True, 0).fingerprints()
