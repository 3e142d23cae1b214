"""The page of all benchmark results, from records made up here."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import report
from benchmarks.harness.baseline import Baseline
from benchmarks.harness.bench import as_record, summary
from benchmarks.harness.measure import record, save
from benchmarks.harness.scenarios import SCENARIOS, STOCK, Scenario
from tests.benchmarks.runs import ours, run_of


def rounds_of(scenario: Scenario, seconds: float) -> list[dict]:
    """Stock vLLM takes 2 s, every other side this long."""
    return [{side: run_of(2.0) if side == STOCK else ours(seconds) for side in scenario.sides}] * 3


@pytest.fixture
def folder(tmp_path, at_level):
    """Results of one scenario that gains and one that loses, of a sweep that does both, and of a card."""
    at_level("avx512")
    for name, seconds in (("pool-bound", 1.0), ("overhead", 2.5)):
        scenario = replace(SCENARIOS[name], baseline=Baseline("other", {}, "abc") if seconds == 1 else None)
        rounds = rounds_of(scenario, seconds)
        shown = summary(Console(file=io.StringIO()), name, scenario, SCENARIOS[name], rounds)
        save(f"throughput-{name}", record("throughput", {"threads": 1, **shown}), tmp_path)
    base = Scenario("", 12, 1024, 128, pool=3)
    values = [
        {"value": str(pool), **as_record(base, rounds_of(base, seconds))}
        for pool, seconds in ((2, 1.0), (12, 2.0))
    ]
    save("throughput-sweep-pool", record("throughput", {"sweep": "pool", "values": values}), tmp_path)
    target = {"name": "copy", "value": 2.0, "bound": 1.3, "at_most": True, "met": False}
    content = record("gpu", {"scenarios": {"one": {"targets": [target]}}}) | {"card": {"name": "a card"}}
    save("kernels", content, tmp_path / "gpu")
    return tmp_path


def test_the_page_has_every_figure_and_what_was_missed(folder):
    text = report.write(folder).read_text()
    rows = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    load = "24 x (2048 in, 256 out), memory for 4 | budget 0.2 (1 [1, 1] the baseline's)"
    assert f"| pool-bound | {load} | 100.0 | 50.0 | 2 [2, 2] |" in text
    assert "| **0.8 [0.8, 0.8]** |" in rows["| overhead"] and "| **1 [1, 1]** |" in rows["| sweep-pool, 12"]
    missed = text.split("## Missed targets")[1].split("##")[0]
    assert "| [throughput-overhead](throughput-overhead.json) | budget 1: output tokens/s" in missed
    assert "| [gpu/kernels](gpu/kernels.json) | copy | 2 | at most 1.3 |" in missed
    sources = text.split("## Where the figures come from")[1]
    assert ", avx512, threads: 1; 0 of 1 met" in sources and "; 2 of 3 met" in sources
    assert ", a card" in sources
    assert "](throughput-sweep-pool.png)" in text and (folder / "throughput-sweep-pool.png").exists()
    assert "## Latencies" not in text and "## Compared with kvpress" not in text


def test_the_page_in_the_repository_is_made_of_the_files_beside_it(tmp_path):
    for path in (*report.RESULTS.glob("*.json"), *report.RESULTS.glob("*.png"), report.RESULTS / "gpu"):
        (tmp_path / path.name).symlink_to(path)
    for sweep in tmp_path.glob("throughput-sweep-*.png"):
        sweep.unlink()  # drawn anew
    text = report.write(tmp_path).read_text()
    assert text == (report.RESULTS / "README.md").read_text()
    assert "## Latencies over stock's" in text and "## Compared with kvpress" in text


@pytest.mark.parametrize("content", [None, "{", '{"results": {}}', "[]"])
def test_a_folder_without_records_is_an_error(tmp_path, content, capsys):
    if content is not None:
        (tmp_path / "broken.json").write_text(content)
    assert report.main([str(tmp_path)]) == 1
    reason = "holds no results" if content is None else "broken.json is not a benchmark's record"
    assert reason in capsys.readouterr().err
