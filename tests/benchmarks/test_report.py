"""The page of all benchmark results, from records made up here."""

import io
import json

import pytest
from rich.console import Console

from benchmarks import report
from benchmarks.measure import record, save
from benchmarks.scenarios import SCENARIOS, STOCK, Scenario
from benchmarks.throughput import as_record, show_scenario
from tests.benchmarks.runs import ours, run_of


def rounds_of(scenario: Scenario, seconds: float) -> list[dict]:
    """Stock vLLM takes 2 s, every other side this long."""
    return [
        {turn.name: run_of(2.0) if turn.side == STOCK else ours(seconds) for turn in scenario.turns()}
        for _ in range(3)
    ]


@pytest.fixture
def folder(tmp_path):
    """Results of one scenario that gains and one that loses, and of a sweep that does both."""
    for name, seconds in (("pool-bound", 1.0), ("overhead", 2.5)):
        scenario = SCENARIOS[name]
        shown = show_scenario(Console(file=io.StringIO()), name, scenario, rounds_of(scenario, seconds))
        save(f"throughput-{name}", record("throughput", {"threads": 1, **shown}), tmp_path)
    base = Scenario("", 12, 1024, 128, pool=3)
    values = [
        {"value": str(pool), **as_record(base, rounds_of(base, seconds))}
        for pool, seconds in ((2, 1.0), (12, 2.0))
    ]
    save("throughput-sweep-pool", record("throughput", {"sweep": "pool", "values": values}), tmp_path)
    return tmp_path


def test_the_page_has_every_figure_and_every_plot(folder):
    output = report.write(folder)
    text = output.read_text()
    assert output == folder / "README.md"
    assert "| pool-bound |" in text and "2 [2, 2]" in text and "0.8 [0.8, 0.8]" in text
    assert "## Throughput over the full requests that the KV memory holds" in text
    assert "](throughput-sweep-pool.png)" in text and (folder / "throughput-sweep-pool.png").exists()
    assert "## Latency" not in text and "kvpress" not in text


def test_missed_targets_stand_out(folder):
    lines = report.write(folder).read_text().splitlines()
    (missed,) = (line for line in lines if line.startswith("| [throughput-overhead]") and "0.92" in line)
    assert "**missed**" in missed
    (met,) = (line for line in lines if line.startswith("| [throughput-pool-bound]") and "1.25" in line)
    assert "| met |" in met


def test_loads_without_gain_are_listed_slowest_first(folder):
    text = report.write(folder).read_text()
    section = text.split("## Where eviction does not pay")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert "2 of 4 comparisons" in section
    assert rows[0].startswith("| overhead |") and rows[0].endswith("| slower |")
    assert rows[1].startswith("| pool 12 |") and rows[1].endswith("| no clear difference |")


def test_gains_only_make_no_such_section():
    scenario = SCENARIOS["pool-bound"]
    content = json.loads(json.dumps(as_record(scenario, rounds_of(scenario, 1.0))))
    assert report.no_gain(list(report.cells("pool-bound", content))) == []


def test_the_page_in_the_repository_is_made_of_the_files_beside_it(tmp_path):
    kept = [*report.RESULTS.glob("*.json"), *(report.RESULTS / f"{name}.png" for name in report.PICTURES)]
    for path in kept:
        (tmp_path / path.name).symlink_to(path)
    assert report.write(tmp_path).read_text() == (report.RESULTS / "README.md").read_text()


@pytest.mark.parametrize("content", [None, "{", '{"results": {}}', "[]"])
def test_a_folder_without_records_is_an_error(tmp_path, content, capsys):
    if content is not None:
        (tmp_path / "broken.json").write_text(content)
    assert report.main([str(tmp_path)]) == 1
    reason = "holds no results" if content is None else "broken.json is not a benchmark's record"
    assert reason in capsys.readouterr().err
