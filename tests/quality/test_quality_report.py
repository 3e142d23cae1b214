"""The report of the quality benchmark: means by hand, verdicts, and that everything is written."""

import json
import random
from dataclasses import asdict

import numpy as np
import pytest

from vllm_kvevict.quality import __main__ as quality
from vllm_kvevict.quality.choices import evictions_by_request, kept_shares
from vllm_kvevict.quality.findings import FAILS, HOLDS, UNKNOWN, check_claims, pick, verdict
from vllm_kvevict.quality.markdown import wins
from vllm_kvevict.quality.results import (
    FULL,
    RESULTS,
    Column,
    Result,
    ResultsError,
    Settings,
    Store,
    write_settings,
)
from vllm_kvevict.quality.scores import Bootstrap, Mean, Scores, of_length, of_task
from vllm_kvevict.quality.tables import table
from vllm_kvevict.schedules.reports import EvictionRecord

FULL_CACHE = Column(FULL)


def name(column: Column) -> str:
    return f"{column.policy}.{column.budget}.{column.scope}"


def result(column: Column, index: int, score: float, task: str = "single", **changes) -> Result:
    defaults = {
        "task": task,
        "length": 100,
        "depth": None,
        "index": index,
        "policy": column.policy,
        "budget": column.budget,
        "scope": column.scope,
        "score": score,
        "reply": "a",
        "expected": ("a",),
        "prompt_tokens": 1000,
        "output_tokens": 3,
        "finish_reason": "stop",
        "evict_at": None if column.budget is None else 1000,
        "whole": False,
        "request": f"chatcmpl-{name(column)}-{index}",
        "seconds": 0.1,
    }
    return Result(**{**defaults, **changes})


def made(**by_column: list[float]) -> Scores:
    """Scores at budget 0.1 in scope prompt; `full` has no budget."""
    found = []
    for policy, values in by_column.items():
        column = FULL_CACHE if policy == FULL else at(policy.replace("_", "-"))
        found += [result(column, index, value) for index, value in enumerate(values)]
    return Scores(found)


def at(policy: str, budget: float = 0.1, scope: str = "prompt") -> Column:
    return Column(policy, budget, scope)


def test_the_mean_is_over_tasks_first():
    results = [result(FULL_CACHE, i, 1.0) for i in range(6)]
    results += [result(FULL_CACHE, i, float(i == 0), "facts") for i in range(2)]
    mean = Scores(results).mean(FULL_CACHE)
    assert mean.mean == pytest.approx((1.0 + 0.5) / 2) and mean.samples == 8
    # The first task never varies; resamples of the second have means 0, 0.5 and 1.
    assert (mean.low, mean.high) == (0.5, 1.0)


def test_an_interval_is_that_of_the_mean():
    values = np.asarray([0.0, 1.0] * 200)
    mean = Bootstrap(["t"] * 400).mean(values)
    error = 1.96 * 0.5 / 400**0.5
    assert mean.low == pytest.approx(0.5 - error, abs=0.006)
    assert mean.high == pytest.approx(0.5 + error, abs=0.006)


def test_texts_are_drawn_with_all_their_questions():
    # Ten questions about each of ten texts: half of the texts are easy, the others hopeless.
    values = np.asarray([float(text % 2) for text in range(10) for _ in range(10)])
    tasks = ["single", "facts"] * 50
    texts = [text for text in range(10) for _ in range(10)]
    alone, together = Bootstrap(tasks).mean(values), Bootstrap(tasks, texts).mean(values)
    assert alone.mean == together.mean == 0.5
    error = 1.96 * 0.5 / 10**0.5
    assert together.low == pytest.approx(0.5 - error, abs=0.05)
    assert alone.high - alone.low < 0.5 * (
        together.high - together.low
    )  # control: as if they were independent
    results = [
        result(FULL_CACHE, i, value, task) for i, (value, task) in enumerate(zip(values, tasks, strict=True))
    ]
    assert (
        Scores(results, questions=10).mean(FULL_CACHE) == together
        and Scores(results).mean(FULL_CACHE) == alone
    )


def test_shares_are_paired():
    low = [(i + 1) / 20 for i in range(18)]
    scores = made(full=low, snapkv=[value / 2 for value in low])
    share = scores.ratio(at("snapkv"), FULL_CACHE)
    assert (share.mean, share.low, share.high) == pytest.approx((0.5, 0.5, 0.5)) and share.samples == 18
    assert scores.ratio(at("lava"), FULL_CACHE) is None
    assert made(full=[0.0], snapkv=[1.0]).ratio(at("snapkv"), FULL_CACHE) is None
    scores = made(full=[1.0, 1.0, 0.0], snapkv=[1.0, 0.5])  # the sample that one side lacks does not count
    assert scores.ratio(at("snapkv"), FULL_CACHE).mean == 0.75


def test_differences_are_paired():
    # Samples differ much, the policies by the same little everywhere.
    low = [i / 20 for i in range(18)]
    scores = made(snapkv=low, ada_snapkv=[value + 0.1 for value in low])
    difference = scores.difference(at("ada-snapkv"), at("snapkv"))
    assert difference.mean == pytest.approx(0.1)
    assert (difference.low, difference.high) == pytest.approx((0.1, 0.1))


def test_only_samples_of_both_sides_are_compared():
    scores = made(full=[1.0, 1.0, 0.0, 0.0], snapkv=[0.5, 0.5])
    assert scores.mean(FULL_CACHE).mean == 0.5
    assert scores.difference(at("snapkv"), FULL_CACHE) == Mean(-0.5, -0.5, -0.5, 2)
    assert scores.mean(at("lava")) is None and scores.difference(at("lava"), FULL_CACHE) is None


def test_groups():
    results = [
        result(FULL_CACHE, 0, 1.0),
        result(FULL_CACHE, 0, 0.0, length=200),
        result(FULL_CACHE, 1, 0.5, "facts"),
    ]
    scores = Scores(results)
    assert scores.mean(FULL_CACHE, of_task("single")).mean == 0.5
    assert scores.mean(FULL_CACHE, of_length(100)).mean == 0.75
    assert scores.lengths == [100, 200] and scores.tasks == ["single", "facts"]


def test_nearest_budget_and_share():
    results = [result(at("snapkv", b), 0, 1.0) for b in (0.05, 0.25, 100.0)]
    scores = Scores(results)
    assert scores.nearest(0.2) == 0.25 and scores.nearest(64) == 100 and Scores([]).nearest(0.2) is None
    assert scores.share(0.25, "prompt") == 0.25 and scores.share(100.0, "prompt") == 0.1


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.01, 0.2, HOLDS), (-0.2, -0.01, FAILS), (-0.1, 0.1, UNKNOWN), (0.0, 0.0, UNKNOWN)],
)
def test_verdict(low, high, expected):
    assert verdict(Mean((low + high) / 2, low, high, 10)) == expected


def test_claims_are_checked_at_tight_budgets():
    rng = random.Random(0)
    results = []
    for index in range(60):
        base = rng.random() / 2
        for budget, gain in ((0.1, 0.2), (0.2, 0.1), (0.4, -0.9)):
            results.append(result(at("snapkv", budget), index, base))
            results.append(result(at("ada-snapkv", budget), index, base + gain))
            results.append(result(at("cake", budget), index, base + rng.choice((-0.2, 0.2))))
            results.append(result(at("pyramidkv", budget), index, base - 0.1))
    findings = {finding.compared: finding for finding in check_claims(Scores(results))}
    ada = findings["ada-snapkv - snapkv"]
    assert ada.budgets == (0.1, 0.2) and ada.verdict == HOLDS
    assert ada.difference.mean == pytest.approx(0.15)
    assert [one.mean for one in ada.by_budget] == pytest.approx([0.2, 0.1])
    assert findings["pyramidkv - snapkv"].verdict == FAILS
    assert findings["cake - snapkv"].verdict == UNKNOWN
    assert findings["lava - lava-uniform"].verdict == "not measured"


def test_scopes_are_compared_at_all_budgets_that_evict():
    results = [
        result(at("snapkv", budget, scope), index, score)
        for index in range(5)
        for scope, score in (("prompt", 0.8), ("prefix", 0.5))
        for budget in (0.1, 0.4, 1.0)
    ]
    finding = check_claims(Scores(results))[-1]
    assert finding.budgets == (0.1, 0.4) and finding.scope is None
    assert finding.difference.mean == pytest.approx(0.3) and finding.verdict == HOLDS


def test_pick_names_the_best_and_its_equals():
    mixed = [float(i % 2) for i in range(40)]
    best = [1.0] * 30 + [0.0] * 10
    nearly = [1.0] * 29 + [0.0] * 11
    scores = made(full=best, snapkv=mixed, lava=best, cake=nearly)
    (found,) = pick(scores)
    assert (found.scope, found.budget, found.best) == ("prompt", 0.1, "lava")
    assert found.equals == ("cake",) and found.lossless == ("lava", "cake")
    assert wins([found, found]) == [("lava", 2), ("cake", 2)]


def test_pick_without_the_full_cache_and_without_eviction():
    assert pick(made(snapkv=[1.0]))[0].lossless is None
    assert pick(Scores([result(at("snapkv", 1.0), 0, 1.0)])) == []


def test_table():
    assert table(["a", "b"], [["x", 1]]) == ["| a | b |", "| --- | ---: |", "| x | 1 |"]
    assert table(["a", "b"], [], left=2) == ["| a | b |", "| --- | --- |"]


def eviction_line(request: str, policy: str) -> str:
    """A line of an eviction log."""
    heads = [[20, 40], [10, 10]]
    eviction = EvictionRecord(request, 100, policy, 80, 400, 8, 16, heads, 0.0, 0.0)
    return json.dumps(asdict(eviction)) + "\n"


def test_evictions_find_their_requests(tmp_path):
    column, path = at("ada-snapkv", 0.2), tmp_path / "evictions.jsonl"
    path.write_text("".join(eviction_line(f"chatcmpl-{name}", "ada-snapkv") for name in ("a-0f3b", "x-1111")))
    evictions = evictions_by_request(path)
    results = [result(column, 0, 1.0, request="chatcmpl-a"), result(column, 1, 1.0, request=None)]
    shares = kept_shares(results, evictions, 0.2)
    assert shares[column].tolist() == [[0.2, 0.4], [0.1, 0.1]]
    assert kept_shares(results, evictions, 0.4) == {}


@pytest.fixture
def folder(tmp_path):
    """Two policies in both scopes, a server that is not ours, and a needle map."""
    rng = random.Random(1)
    columns = [FULL_CACHE, Column("other")]
    columns += [
        at(p, b, s) for p in ("snapkv", "ada-snapkv") for b in (0.1, 0.2) for s in ("prompt", "prefix")
    ]
    run = {
        "command": "vllm-kvevict quality run --note x",
        "date": "2026-01-01T00:00:00+00:00",
        "cpu": "a processor",
        "versions": {"vllm": "0.32.0"},
        "results": {"server": {"url": "http://there/v1", "vllm": "0.32.0", "note": "on a shelf"}},
    }
    write_settings(tmp_path, Settings("m", 0, False, 8, {"single": "x"}), run)
    with Store(tmp_path / RESULTS, Result) as store:
        for column in columns:
            for index in range(8):
                for task, length in (("single", 100), ("facts", 200)):
                    store.add(result(column, index, rng.random(), task, length=length))
            for depth in (0.0, 0.5, 1.0):
                store.add(result(column, 0, 0.5, depth=depth, whole=column.budget == 0.1))
    (tmp_path / "evictions.jsonl").write_text(
        "".join(eviction_line(f"chatcmpl-{name(column)}-0", column.policy) for column in columns[2:])
    )
    return tmp_path


def report(*words: object) -> int:
    return quality.main(["report", *map(str, words)])


def test_report(folder):
    target = folder / "docs" / "QUALITY.md"
    target.parent.mkdir()
    argv = (folder, "--eviction-log", folder / "evictions.jsonl", "--title", "A title", "--output", target)
    assert report(*argv) == 0
    text = target.read_text()
    assert text.startswith("# A title\n") and "on a shelf" in text and "`vllm-kvevict quality run" in text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(headings) == 11
    assert headings[1] == "## Which policy to pick" and headings[-1] == "## Commands"
    assert (
        "## By task at budget 0.2" in headings
        and "## Scope prefix: the policy does not see the question" in headings
    )
    assert "12 prompts or prefixes were too short" in text and "nan" not in text and "None" not in text
    pictures = [line.split("(")[-1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    names = ["scores", "needle-prompt", "needle-prefix", "kept"]
    assert pictures == [f"QUALITY/{name}.png" for name in names]
    for picture in pictures:
        content = (target.parent / picture).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) < 200_000


def test_an_eviction_log_of_other_requests(folder, capsys):
    (folder / "evictions.jsonl").write_text(eviction_line("chatcmpl-other-0", "snapkv"))
    assert report(folder, "--eviction-log", folder / "evictions.jsonl") == 2
    assert "does not mention the requests" in " ".join(capsys.readouterr().err.split())


def test_summary_has_the_numbers_of_the_text(folder):
    assert report(folder) == 0
    content = json.loads((folder / "summary.json").read_text())["results"]
    assert content["answers"] == len((folder / RESULTS).read_text().splitlines())
    by_column = {(c["policy"], c["budget"], c["scope"]): c for c in content["columns"]}
    snapkv = by_column["snapkv", 0.2, "prompt"]
    assert snapkv["score"]["samples"] == 16 and set(snapkv["tasks"]) == {"single", "facts"}
    assert by_column["full", None, None]["difference_to_full"]["mean"] == 0
    text = (folder / "report.md").read_text()
    assert str(Mean(**snapkv["score"])) in text and Mean(**snapkv["difference_to_full"]).signed in text
    assert {claim["verdict"] for claim in content["claims"]} <= {HOLDS, FAILS, UNKNOWN, "not measured"}
    assert len(content["picks"]) == 4 and "kept" not in content


def test_the_same_results_give_the_same_report(folder):
    assert report(folder) == 0
    first = (folder / "report.md").read_text(), (folder / "report" / "scores.png").read_bytes()
    assert report(folder) == 0
    assert first == ((folder / "report.md").read_text(), (folder / "report" / "scores.png").read_bytes())


def test_a_task_that_the_full_cache_cannot_do_does_not_count(tmp_path):
    write_settings(tmp_path, Settings("m", 0, False, 8, {}), {**RUN})
    with Store(tmp_path / RESULTS, Result) as store:
        for index in range(10):
            for task, right in (("text/number", 8), ("text/json", 7), ("longbench/qasper", 3)):
                store.add(result(FULL_CACHE, index, float(index < right), task, length=1024))
                store.add(result(at("snapkv"), index, float(index < right / 2), task, length=1024))
    assert report(tmp_path) == 0
    content = json.loads((tmp_path / "summary.json").read_text())["results"]
    assert content["too_hard"] == {"text/json": 0.7} and content["answers"] == 60
    full, snapkv = content["columns"]
    assert set(full["tasks"]) == {"text/number", "longbench/qasper"}
    assert snapkv["ratio_to_full"]["mean"] == pytest.approx((4 + 2) / (8 + 3))
    text = (tmp_path / "report.md").read_text()
    assert "| text/json | 0.70 | the model cannot do this |" in text and "scores 0." not in text
    assert "streaming-llm was not measured: it is the control" in text


def test_needles_only_and_plain_only(tmp_path):
    write_settings(tmp_path, Settings("m", 0, False, 8, {}), {**RUN})
    with Store(tmp_path / RESULTS, Result) as store:
        for depth in (0.0, 1.0):
            store.add(result(Column("plain"), 0, 1.0, depth=depth))
    assert report(tmp_path) == 0
    assert "| plain | 1.000 [1.000, 1.000] | - |" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report" / "needle-prompt.png").exists()


RUN = {
    "command": "c",
    "date": "d",
    "cpu": "p",
    "versions": {},
    "results": {"server": {"url": "u", "vllm": None, "note": ""}},
}


def test_no_results(tmp_path, capsys):
    assert report(tmp_path) == 2
    assert "settings.json cannot be read" in capsys.readouterr().err
    write_settings(tmp_path, Settings("m", 0, False, 8, {}), RUN)
    assert report(tmp_path) == 2
    assert "has no results yet" in capsys.readouterr().err


def test_two_runs_cannot_write_at_once(tmp_path):
    path = tmp_path / RESULTS
    with Store(path, Result), pytest.raises(ResultsError, match="another run"), Store(path, Result):
        pass
