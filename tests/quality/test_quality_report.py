"""The report of the quality benchmark: means by hand, verdicts, and that everything is written."""

import random
from dataclasses import replace

import numpy as np
import pytest

from vllm_kvevict.quality import __main__ as quality
from vllm_kvevict.quality.findings import pick, read_folder, too_hard
from vllm_kvevict.quality.markdown import pick_section
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
from vllm_kvevict.quality.scores import Bootstrap, Mean, Scores

FULL_CACHE = Column(FULL)
SERVER = {"url": "http://there/v1", "vllm": "0.32.0", "note": "on a shelf"}
ABOUT = {"date": "2026-01-01T00:00:00+00:00", "cpu": "a processor", "versions": {"vllm": "0.32.0"}}
RUN = {"command": "vllm-kvevict quality run --note x", **ABOUT, "results": {"server": SERVER}}


def result(column: Column, index: int, score: float, task: str = "single", **changes) -> Result:
    answered = score, "a", ("a",), 1000, 3, "stop", None if column.budget is None else 1000, False
    found = Result(task, 100, None, index, *column.key, *answered, f"chatcmpl-{index}", 0.1)
    return replace(found, **changes)


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
    assert alone.high - alone.low < 0.5 * (together.high - together.low)  # control: as if independent
    results = [result(FULL_CACHE, i, *told) for i, told in enumerate(zip(values, tasks, strict=True))]
    assert Scores(results, questions=10).mean(FULL_CACHE) == together
    assert Scores(results).mean(FULL_CACHE) == alone


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


def test_pick_names_the_best_and_its_equals():
    mixed = [float(i % 2) for i in range(40)]
    best = [1.0] * 30 + [0.0] * 10
    nearly = [1.0] * 29 + [0.0] * 11
    scores = made(full=best, snapkv=mixed, lava=best, cake=nearly)
    (found,) = pick(scores)
    assert (found.scope, found.budget, found.best) == ("prompt", 0.1, "lava")
    assert found.equals == ("cake",) and found.lossless == ("lava", "cake")
    assert pick_section([found])[-1].endswith(": lava (1 of 1), cake (1 of 1).")


@pytest.fixture
def folder(tmp_path):
    """Two policies in both scopes, a server that is not ours, and a needle map."""
    rng = random.Random(1)
    columns = [FULL_CACHE, Column("other")]
    columns += [
        at(p, b, s) for p in ("snapkv", "ada-snapkv") for b in (0.1, 0.2) for s in ("prompt", "prefix")
    ]
    write_settings(tmp_path, Settings("m", 0, False, 8, {"single": "x"}), {**RUN})
    with Store(tmp_path / RESULTS, Result) as store:
        for column in columns:
            for index in range(8):
                for task, length in (("single", 100), ("facts", 200)):
                    store.add(result(column, index, rng.random(), task, length=length))
            for depth in (0.0, 0.5, 1.0):
                store.add(result(column, 0, 0.5, depth=depth, whole=column.budget == 0.1))
    return tmp_path


def report(*words: object) -> int:
    return quality.main(["report", *map(str, words)])


def test_report(folder):
    target = folder / "docs" / "QUALITY.md"
    target.parent.mkdir()
    argv = (folder, "--title", "A title", "--output", target)
    assert report(*argv) == 0
    text = target.read_text()
    assert text.startswith("# A title\n") and "on a shelf" in text and "`vllm-kvevict quality run" in text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(headings) == 9
    assert headings[1] == "## Which policy to pick" and headings[-1] == "## Commands"
    assert "## By task at budget 0.2" in headings
    assert "## Scope prefix: the policy does not see the question" in headings
    assert "12 prompts or prefixes were too short" in text and "nan" not in text and "None" not in text
    pictures = [line.split("(")[-1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    names = ["scores", "needle-prompt", "needle-prefix"]
    assert pictures == [f"QUALITY/{name}.png" for name in names]
    for picture in pictures:
        content = (target.parent / picture).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) < 200_000
    found = read_folder(folder, "", 0.2)
    scores, snapkv = found.scores, at("snapkv", 0.2)
    assert len(found.results) == len((folder / RESULTS).read_text().splitlines())
    assert scores.mean(snapkv).samples == 16 and set(scores.tasks) == {"single", "facts"}
    assert str(scores.mean(snapkv)) in text and scores.difference(snapkv, FULL_CACHE).signed in text


def test_a_task_that_the_full_cache_cannot_do_does_not_count(tmp_path):
    write_settings(tmp_path, Settings("m", 0, False, 8, {}), {**RUN})
    with Store(tmp_path / RESULTS, Result) as store:
        for index in range(10):
            for task, right in (("text/number", 8), ("text/json", 7), ("number", 3)):
                store.add(result(FULL_CACHE, index, float(index < right), task, length=1024))
                store.add(result(at("snapkv"), index, float(index < right / 2), task, length=1024))
    assert report(tmp_path) == 0
    found = read_folder(tmp_path, "", 0.2)
    assert too_hard(found.full) == {"text/json": 0.7} and len(found.results) == 60
    assert found.scores.tasks == ["text/number", "number"]
    assert found.scores.ratio(at("snapkv"), FULL_CACHE).mean == pytest.approx((4 + 2) / (8 + 3))
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
