"""The page of all benchmark results, from records made up here."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import reasoning, report
from benchmarks.harness import payoff
from benchmarks.harness.baseline import Baseline
from benchmarks.harness.bench import as_record
from benchmarks.harness.cells import cells
from benchmarks.harness.measure import full_name, record, record_name, save
from benchmarks.harness.scenarios import SCENARIOS, STOCK, Scenario
from benchmarks.throughput import show_scenario, vary
from tests.benchmarks.runs import ours, run_of


def rounds_of(scenario: Scenario, seconds: float) -> list[dict]:
    """Stock vLLM takes 2 s, every other side this long."""
    return [
        {turn.name: run_of(2.0) if turn.side == STOCK else ours(seconds) for turn in scenario.turns()}
        for _ in range(3)
    ]


@pytest.fixture
def folder(tmp_path, at_level):
    """Results of one scenario that gains and one that loses, and of a sweep that does both."""
    at_level("avx512")
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
    assert "## Latency" not in text and "## Compared with kvpress" not in text


def test_long_answers_are_among_the_scenarios(folder, at_level):
    at_level("avx512")
    long = reasoning.SCENARIOS["long"]
    rounds = [{**one, "ada-snapkv, prefill": ours(0.5)} for one in rounds_of(long, 1.0)]
    shown = reasoning.summary("long", long, rounds, Console(file=io.StringIO()))
    save("reasoning-long", record("reasoning", {"threads": None, "scenarios": {"long": shown}}), folder)
    text = report.write(folder).read_text()
    load = "24 x (512 in, 4096 out), memory for 3, ada-snapkv, answers to 448, bfloat16, avx512"
    assert f"| reasoning-long | {load} | ada-snapkv | 100.0 | 50.0 | 2 [2, 2] |" in text
    assert "long: requests running at once | 4 | at least 12 | **missed** |" in text


def test_missed_targets_stand_out(folder):
    lines = report.write(folder).read_text().splitlines()
    (missed,) = (line for line in lines if line.startswith("| [throughput-overhead]") and "0.92" in line)
    assert "**missed**" in missed
    (met,) = (line for line in lines if line.startswith("| [throughput-pool-bound]") and "1.25" in line)
    assert "| met |" in met


def test_targets_of_scenarios_name_them(folder):
    target = {"name": "hits", "value": 0.9, "bound": 0.95, "at_most": False, "met": False}
    content = json.loads((folder / "throughput-pool-bound.json").read_text())
    content["results"] = {"scenarios": {"documents": {"targets": [target]}}}
    (folder / "prefix.json").write_text(json.dumps(content))
    text = report.write(folder).read_text()
    assert "| [prefix](prefix.json) | documents: hits | 0.9 | at least 0.95 | **missed** |" in text


def test_another_version_has_a_table_of_its_own(folder):
    assert "other versions" not in report.write(folder).read_text()
    scenario = replace(SCENARIOS["pool-bound"], baseline=Baseline("other", {"vllm-kvevict": "0.1"}, None))
    rounds = [{**one, "budget 0.2, baseline": ours(1.5)} for one in rounds_of(scenario, 1.0)]
    shown = show_scenario(Console(file=io.StringIO()), "pool-bound", scenario, rounds)
    save("throughput-pool-bound-over-baseline", record("throughput", {"threads": 1, **shown}), folder)
    (row,) = [line for line in report.write(folder).read_text().splitlines() if "| 0.1 |" in line]
    assert row.endswith("| budget 0.2 | 0.1 | 100.0 | 66.7 | 1.5 [1.5, 1.5] |")


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
    assert report.no_gain(list(cells("pool-bound", content))) == []


def test_one_round_is_no_comparison():
    scenario = SCENARIOS["overhead"]
    several = as_record(scenario, rounds_of(scenario, 3.0))
    one = json.loads(json.dumps(as_record(scenario, rounds_of(scenario, 3.0)[:1])))
    assert report.no_gain(list(cells("overhead", one))) == []
    both = [*cells("overhead", json.loads(json.dumps(several))), *cells("overhead", one)]
    assert "1 of 1 comparisons" in "\n".join(report.no_gain(both))


def test_gpus_are_judged_in_the_same_table(folder):
    content = json.loads((folder / "throughput-overhead.json").read_text())
    target = {"name": "copy", "value": 2.0, "bound": 1.3, "at_most": True, "met": False}
    content |= {"card": "a card", "results": {"targets": [target]}}
    (folder / "gpu").mkdir()
    (folder / "gpu" / "kernels.json").write_text(json.dumps(content))
    text = report.write(folder).read_text()
    assert "| [gpu/kernels](gpu/kernels.json) | copy | 2 | at most 1.3 | **missed** |" in text
    assert "| a card |" in text.split("## Where the figures come from")[1]


def test_the_level_of_every_file_is_shown(folder):
    old = folder / "throughput-overhead.json"
    content = json.loads(old.read_text())
    del content["level"], content["results"]["scenario"]["dtype"]  # as in records of before
    old.write_text(json.dumps(content))
    text = report.write(folder).read_text()
    sources = text.split("## Where the figures come from")[1].splitlines()
    (without,) = (line for line in sources if line.startswith("| [throughput-overhead]"))
    (recorded,) = (line for line in sources if line.startswith("| [throughput-pool-bound]"))
    assert "| not recorded |" in without and "| avx512 |" in recorded
    loads = text.split("## Scenarios")[1].splitlines()
    assert any(line.startswith("| overhead |") and "ada-snapkv, bfloat16 |" in line for line in loads)
    assert any(line.startswith("| pool-bound |") and "bfloat16, avx512 |" in line for line in loads)


def test_results_of_other_levels_lie_beside_the_usual_ones(folder, at_level):
    before = report.write(folder).read_text()
    at_level("avx2")
    scenario = replace(SCENARIOS["pool-bound"], dtype="float32")
    console = Console(file=io.StringIO())
    shown = show_scenario(console, "pool-bound", scenario, rounds_of(scenario, 0.5))
    name = record_name("throughput-pool-bound", "float32")
    save(name, record("throughput", {"threads": 1, **shown}), folder)
    base = replace(Scenario("", 12, 1024, 128, pool=3), dtype="float32")
    values = [{"value": "2", **as_record(base, rounds_of(base, 1.0))}]
    sweep = record_name("throughput-sweep-pool", "float32")
    save(sweep, record("throughput", {"sweep": "pool", "values": values}), folder)
    drawn = full_name("attention", "float32")
    save(drawn, record("attention", {"dtype": "float32"}), folder)
    (folder / f"{drawn}.png").write_bytes(b"")
    text = report.write(folder).read_text()
    assert "| pool-bound-avx2-float32 |" in text and "float32, avx2 |" in text and "at least 2.3" in text
    heading = "## Throughput over the full requests that the KV memory holds"
    assert f"{heading}\n" in text and f"{heading} (avx2-float32)\n" in text
    assert f"]({sweep}.png)" in text and (folder / f"{sweep}.png").exists()
    assert f"## {drawn}\n" in text and f"]({drawn}.png)" in text
    for line in before.splitlines():
        assert line in text or "comparisons" in line


def test_where_loads_were_swept_a_page_says_when_eviction_pays(folder):
    report.write(folder)
    assert not (folder / payoff.PAGE).exists()
    seconds = {"2048x32@12": 2.5, "2048x256@12": 2.0, "2048x256@3": 1.0, "512x32@3": 1.6}
    values = []
    for load, took in seconds.items():
        scenario = vary(Scenario("", 12, 1024, 128, pool=3), "load", load)
        values.append({"value": load, **as_record(scenario, rounds_of(scenario, took))})
    swept = {"sweep": "load", "threads": None, "values": values}
    save("throughput-sweep-load", record("throughput", swept), folder)
    assert "](throughput-sweep-load.png)" in report.write(folder).read_text()
    text = (folder / payoff.PAGE).read_text()
    assert "as many on both sides" in text
    assert (folder / "throughput-sweep-load.png").exists() and "](throughput-sweep-load.png)" in text
    slowest = "0.80x at 2048 in and 32 out, budget 0.2, memory for 12"
    fastest = "2.00x at 2048 in and 256 out, budget 0.2, memory for 3"
    assert f"4 loads were measured: from {slowest}, to {fastest}." in text
    short, enough = text.split("### budget 0.2, memory for ")[1:]
    assert short.startswith("3 of 12 requests") and enough.startswith("12 of 12 requests")
    assert (
        "| 512 in | 1.25 [1.25, 1.25] (1.00) | - |" in short and "| 2048 in | - | 2 [2, 2] (1.00) |" in short
    )
    assert "| 2048 in | 0.8 [0.8, 0.8] (1.00) | 1 [1, 1] (1.00) |" in enough and "512" not in enough


def test_each_budget_has_tables_of_its_own(tmp_path):
    scenario = Scenario("", 12, 2048, 32, pool=3, budgets=(0.2, 0.4))
    found = list(cells("load", json.loads(json.dumps(as_record(scenario, rounds_of(scenario, 1.0))))))
    titles = [f"budget {budget}, memory for 3 of 12 requests" for budget in (0.2, 0.4)]
    assert {title: len(grid) for title, grid in payoff.grids(found).items()} == dict.fromkeys(titles, 1)
    assert payoff.plot(found, tmp_path / "map.png").exists()


def test_kvpress_of_every_kind_has_a_section():
    run = {"answered": 2, "errors": [], "output_tokens": 10, "wall": 2.0}
    results = {
        "settings": {"requests": 2, "input_len": 64, "output_len": 5, "budget": 0.2},
        "rounds": [{"ours": run}],
        "ratios": {"ours / theirs": {"output tokens/s": None}},
    }
    other = {**results, "settings": results["settings"] | {"dtype": "float32"}}
    records = {"kvpress": {"results": results}, "kvpress-avx2-float32": {"results": other}}
    text = "\n".join(report.kvpress_section(records))
    assert "transformers\n\n2 x (64 in, 5 out), budget 0.2, bfloat16." in text
    assert "transformers (avx2-float32)\n\n2 x (64 in, 5 out), budget 0.2, float32." in text


def test_the_page_in_the_repository_is_made_of_the_files_beside_it(tmp_path):
    (tmp_path / "gpu").symlink_to(report.RESULTS / "gpu")
    pictures = (path for name in report.PICTURES for path in report.RESULTS.glob(f"{name}*.png"))
    for path in (*report.RESULTS.glob("*.json"), *pictures):
        (tmp_path / path.name).symlink_to(path)
    report.write(tmp_path)
    pages = {path.name for path in tmp_path.glob("*.md")}
    assert "README.md" in pages and pages == {path.name for path in report.RESULTS.glob("*.md")}
    for page in pages:
        assert (tmp_path / page).read_text() == (report.RESULTS / page).read_text()


@pytest.mark.parametrize("content", [None, "{", '{"results": {}}', "[]"])
def test_a_folder_without_records_is_an_error(tmp_path, content, capsys):
    if content is not None:
        (tmp_path / "broken.json").write_text(content)
    assert report.main([str(tmp_path)]) == 1
    reason = "holds no results" if content is None else "broken.json is not a benchmark's record"
    assert reason in capsys.readouterr().err
