"""Scenarios, sweeps, ratios and targets; no engine is started."""

import asyncio
import io
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import throughput
from benchmarks.harness import scenarios
from benchmarks.harness.baseline import Baseline
from benchmarks.harness.bench import as_record
from benchmarks.harness.load import Run
from benchmarks.harness.measure import Estimate
from benchmarks.harness.runs import runs_table
from benchmarks.harness.scenarios import (
    BLOCK,
    DECODING,
    OVER_BASELINE,
    PER_CPU,
    POSSIBLE,
    SCENARIOS,
    SPEED,
    TARGETS,
    Scenario,
    Target,
    figures,
    make_server,
    ratios,
    targets,
    token_bytes,
)
from benchmarks.throughput import (
    SWEEP_BASE,
    SWEEPS,
    parse_arguments,
    show_scenario,
    sweep_table,
)
from tests.benchmarks.runs import ours, run_of


def rounds_of(scenario: Scenario, ours_wall: float = 1.0, **changes) -> list[dict[str, Run]]:
    """Three rounds in which stock vLLM takes 2 s."""
    return [
        {name: run_of(2.0) if name == "stock" else ours(ours_wall, **changes) for name in scenario.sides}
        for _ in range(3)
    ]


def without_port(command: list[str]) -> list[str]:
    port = command.index("--port") + 1
    return command[:port] + command[port + 1 :]


def rendered(table) -> str:
    console = Console(file=io.StringIO(), width=130)
    console.print(table)
    return console.file.getvalue()


def test_targets_are_met_at_their_bound():
    assert Target("at least", 12, 12).met and Target("at most", 2, 2, at_most=True).met
    assert not Target("at least", 11, 12).met and not Target("at most", 3, 2, at_most=True).met
    assert "MISSED" in str(Target("at least", 11, 12))


def test_the_whole_interval_has_to_reach_a_target():
    value = Estimate(1.3, 1.2, 1.4)
    assert Target("at least", value, 1.2).met and not Target("at least", value, 1.25).met
    assert (
        Target("at most", value, 1.4, at_most=True).met
        and not Target("at most", value, 1.35, at_most=True).met
    )
    assert str(Target("speed", value, 1.25)) == "speed: 1.3 [1.2, 1.4], target >= 1.25: MISSED"


def test_ratios_are_taken_over_stock():
    reached = ratios(SCENARIOS["fits"], rounds_of(SCENARIOS["fits"], cpu=0.5))
    assert list(reached) == ["budget 1", "budget 0.2"]
    for one in reached.values():
        assert (one[SPEED].median, one[PER_CPU].median) == (2.0, 2.0)


def test_phases_say_what_would_be_possible():
    scenario = SCENARIOS["memory-bound"]
    turns = {turn.name: (turn.side, turn.input_len, turn.output_len) for turn in scenario.turns()}
    assert turns == {
        "stock": ("stock", 2048, 768),
        "budget 0.2": ("budget 0.2", 2048, 768),
        "stock, prefill": ("stock", 2048, 1),
        "stock, short as budget 0.2": ("stock", 410, 768),
        "stock, short as budget 0.2, prefill": ("stock", 410, 1),
        "budget 0.2, prefill": ("budget 0.2", 2048, 1),
    }
    walls = dict(zip(turns, (90.0, 40.0, 20.0, 18.0, 2.0, 15.0), strict=True))
    reached = figures(scenario, "budget 0.2", [{name: run_of(wall) for name, wall in walls.items()}])
    assert reached[POSSIBLE].median == pytest.approx((20 + 18 - 2) / 40)
    assert reached[DECODING].median == pytest.approx((90 - 20) / (40 - 15))
    assert reached[SPEED].median == pytest.approx(90 / 40)


def test_pool_bound_counts_take_the_worst_run(at_level):
    at_level("avx512")
    scenario = SCENARIOS["pool-bound"]
    rounds = rounds_of(scenario, peak=13)
    rounds[1]["budget 0.2"] = ours(1.0, peak=11, preemptions=3)
    assert [target.met for target in targets("pool-bound", scenario, rounds)] == [True, False, False]
    assert targets("prefill-bound", replace(SCENARIOS["prefill-bound"], dtype="float32"), rounds) == []


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in TARGETS for name in SCENARIOS])
def test_every_target_can_be_met_and_missed(kind, name, at_level):
    at_level(kind[0])
    scenario = replace(SCENARIOS[name], dtype=kind[1])
    for wall, cpu, met in ((0.5, 0.5, True), (3.0, 2.0, False)):
        rounds = [
            {
                turn.name: ours(wall, cpu=cpu, peak=12 * met, preemptions=3 * (not met))
                if turn.name == "budget 0.2"
                else run_of(0.1 if turn.output_len == 1 else 2.0)
                for turn in scenario.turns()
            }
            for _ in range(3)
        ]
        if name != "memory-bound":
            for one in rounds:
                one |= {
                    side: ours(wall, cpu=cpu, peak=12 * met, preemptions=3 * (not met))
                    for side in scenario.evicting
                }
        wanted = targets(name, scenario, rounds)
        assert len(wanted) >= len(TARGETS[kind].get(name, {})) and all(target.met == met for target in wanted)


@pytest.mark.parametrize(
    "level, dtype, speeds",
    [
        (
            "avx512",
            "bfloat16",
            {"memory-bound": 1.6, "pool-bound": 1.25, "overhead": 0.92, "prefill-bound": 1.2},
        ),
        ("avx2", "float32", {"pool-bound": 2.3}),
        ("avx2", "bfloat16", {}),
        ("avx512", "float32", {}),
        ("generic", "bfloat16", {}),
    ],
)
def test_targets_hold_for_their_level_and_dtype(at_level, level, dtype, speeds):
    at_level(level)
    found, counts = {}, 0
    for name, own in SCENARIOS.items():
        scenario = replace(own, dtype=dtype)
        walls = {turn.name: 0.1 if turn.output_len == 1 else 1.0 for turn in scenario.turns()}
        wanted = targets(name, scenario, [{turn: ours(wall) for turn, wall in walls.items()}])
        found.update((name, target.bound) for target in wanted if SPEED in target.name)
        counts += sum("stock" not in target.name and "speed" not in target.name for target in wanted)
    assert found == speeds and counts == 2 * ("pool-bound" in speeds)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_pool_holds_as_many_full_requests_as_it_says(name, dtype):
    scenario = replace(SCENARIOS[name], dtype=dtype)
    blocks = scenario.kv_bytes() // (BLOCK * token_bytes(dtype))
    per_request = -(-(scenario.input_len + scenario.output_len) // BLOCK)
    assert (blocks - 1) // per_request == scenario.pool  # vLLM keeps one block


def test_options_change_the_scenario():
    changes = ["--requests", "3", "--budget", "0.5", "0.2", "--rate", "2", "--rounds", "1"]
    arguments, chosen = parse_arguments(["overhead", *changes, "--dtype", "float32"])
    given = {"requests": 3, "budgets": (0.5, 0.2), "rate": 2.0, "rounds": 1, "dtype": "float32"}
    assert chosen == {"overhead": replace(SCENARIOS["overhead"], **given)} and arguments.threads is None
    assert parse_arguments(["overhead", "--threads", "1"])[0].threads == 1
    assert parse_arguments(["overhead", "--threads", "auto"])[0].threads is None
    assert parse_arguments(["--dtype", "bfloat16"])[1] == {"pool-bound": SCENARIOS["pool-bound"]}


def test_a_sweep_varies_one_thing():
    _, pools = parse_arguments(["--sweep", "pool", "--requests", "5", "--dtype", "bfloat16"])
    assert [scenario.pool for scenario in pools.values()] == [2, 3, 4, 6, 9, 12]
    assert {replace(one, pool=3) for one in pools.values()} == {replace(SWEEP_BASE, requests=5)}
    _, budgets = parse_arguments(["--sweep", "budget", "--values", "0.3", "64"])
    assert [scenario.budgets for scenario in budgets.values()] == [(0.3,), (64.0,)]
    _, parallel = parse_arguments(["--sweep", "parallel"])
    assert [(one.tensor, one.pipeline) for one in parallel.values()] == [(1, 1), (2, 1), (1, 2), (2, 2)]
    _, loads = parse_arguments(["--sweep", "load"])
    sizes = {(one.input_len, one.output_len, one.pool) for one in loads.values()}
    assert len(loads) == len(sizes) == 18 and (8192, 32, 12) in sizes
    assert loads["512x1024@3"].output_len == 1024 and loads["512x1024@3"].requests == 12
    _, contexts = parse_arguments(["--sweep", "context"])
    assert [one.input_len for one in contexts.values()] == [256, 512, 1024, 2048, 4096]


@pytest.mark.parametrize(
    "line, message",
    [
        ("overhead --requests 0", "--requests: must be at least 1"),
        ("overhead --threads 0", "--threads: must be at least 1"),
        ("overhead --budget 1.5", "--budget: must be in"),
        ("overhead --spread 1", "--spread: must be"),
        ("overhead --rate inf", "--rate: must be"),
        ("overhead --pool 1 --spread 0.5", "--pool 1 does not hold"),
        ("overhead --values 3", "--values belong to --sweep"),
        ("overhead --sweep pool", "--sweep has a load of its own"),
        ("--sweep pool --pool 3", "--sweep pool sets that itself"),
        ("--sweep pool --values 1 --spread 0.5", "--pool 1 does not hold"),
        ("--sweep parallel --values 3x1", "--values 3x1: "),
        ("--sweep parallel --values 2", "--values 2: expected TPxPP"),
        ("--sweep load --output-len 3", "--sweep load sets that itself"),
        ("--sweep load --values 2x3", "--values 2x3: expected PROMPTxANSWER@POOL"),
        ("--sweep context --values -5x", "--values"),
        (f"--sweep pool --baseline {sys.prefix}", "--baseline belongs to a scenario"),
        ("overhead --baseline .", "--baseline: there is no bin/python: give a Python environment"),
    ],
)
def test_bad_arguments_are_named(capsys, line, message):
    with pytest.raises(SystemExit):
        parse_arguments(line.split())
    assert message in capsys.readouterr().err


def test_sides_differ_in_the_eviction_only(monkeypatch, tmp_path):
    monkeypatch.setattr(scenarios, "model", lambda max_len: tmp_path)
    scenario = replace(SCENARIOS["pool-bound"], tensor=2, dtype="float32")
    stock, evicting = (make_server(scenario, side, threads=1).command for side in scenario.sides)
    assert evicting[-4:] == ["--kv-eviction", "ada-snapkv", "--kv-budget", "0.2"]
    assert without_port(stock) == without_port(evicting)[:-4]
    per_rank = stock[stock.index("--kv-cache-memory-bytes") + 1]
    assert int(per_rank) * 2 == scenario.kv_bytes()
    assert stock[stock.index("--tensor-parallel-size") + 1] == "2"
    assert stock[stock.index("--dtype") + 1] == "float32"


def test_the_baseline_serves_each_budget_once_more(monkeypatch, tmp_path):
    monkeypatch.setattr(scenarios, "model", lambda max_len: tmp_path)
    baseline = Baseline("other", {"vllm-kvevict": "0.1"}, "abc")
    scenario = replace(SCENARIOS["fits"], baseline=baseline)
    assert scenario.sides == ["stock", "budget 1", "budget 0.2", "budget 1, baseline", "budget 0.2, baseline"]
    _, _, served, _, other = (make_server(scenario, side, threads=None) for side in scenario.sides)
    assert Path(other.command[0]) == Path.cwd() / "other/bin/vllm" and other.command[0] != served.command[0]
    assert without_port(other.command)[1:] == without_port(served.command)[1:] and other.log != served.log


def test_the_baseline_is_compared_with_the_same_budget(at_level):
    at_level("avx512")
    scenario = replace(SCENARIOS["fits"], baseline=Baseline("other", {}, None))
    walls = dict(zip(scenario.sides, (2.0, 1.0, 0.5, 3.0, 0.25), strict=True))
    rounds = [{side: run_of(wall) for side, wall in walls.items()}] * 3
    reached = ratios(scenario, rounds)
    assert list(reached) == ["budget 1", "budget 0.2"]
    assert [one[OVER_BASELINE].median for one in reached.values()] == [3.0, 0.5]
    assert OVER_BASELINE not in ratios(SCENARIOS["fits"], rounds)["budget 1"]
    # The scenario's own targets still hold.
    assert show_scenario(Console(file=io.StringIO()), "fits", scenario, rounds)["targets"]
    assert asdict(scenario)["baseline"] == {"environment": "other", "versions": {}, "commit": None}


def test_tables_show_every_turn_and_value():
    scenario = SCENARIOS["pool-bound"]
    rounds = rounds_of(scenario, peak=13)
    text = rendered(runs_table("title", rounds))
    assert "stock" in text and "budget 0.2" in text and "50.0" in text and "100.0" in text and "13" in text
    text = rendered(sweep_table("pool", {"3": (scenario, rounds), "4": (scenario, rounds)}))
    assert text.count("2 [2, 2]") == 2 and set(SWEEPS) >= {"pool"}


def test_targets_hold_for_the_scenarios_own_sizes_and_enough_rounds(at_level):
    at_level("avx512")
    scenario = SCENARIOS["overhead"]
    console = Console(file=io.StringIO())
    rounds = rounds_of(scenario)
    (target,) = show_scenario(console, "overhead", scenario, rounds)["targets"]
    assert target["met"] and target["bound"] == 0.92
    assert show_scenario(console, "overhead", scenario, rounds[:2])["targets"] == []
    assert show_scenario(console, "overhead", replace(scenario, requests=1), rounds)["targets"] == []
    assert show_scenario(console, "overhead", replace(scenario, dtype="float32"), rounds)["targets"] == []
    at_level("avx2")
    assert show_scenario(console, "overhead", scenario, rounds)["targets"] == []
    other = replace(SCENARIOS["pool-bound"], dtype="float32")
    assert len(show_scenario(console, "pool-bound", other, rounds_of(other))["targets"]) == 3


def test_the_record_holds_the_raw_runs():
    scenario = SCENARIOS["pool-bound"]
    content = as_record(scenario, rounds_of(scenario))
    assert len(content["rounds"]) == 3 and content["rounds"][0]["stock"]["wall"] == 2.0
    assert content["ratios"]["budget 0.2"][SPEED] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert content["scenario"]["kv_bytes"] == scenario.kv_bytes()
    assert content["scenario"]["dtype"] == "bfloat16"


def test_records_of_another_dtype_have_files_of_their_own(monkeypatch, at_level):
    saved = []

    async def run(self, scenario, prefix=""):
        return rounds_of(scenario)

    monkeypatch.setattr(throughput.Bench, "run", run)
    monkeypatch.setattr(throughput, "save", lambda name, content: saved.append(name))
    for level, options in (
        ("avx512", "overhead --dtype bfloat16"),
        ("avx512", "overhead --dtype float32"),
        ("avx2", "--sweep pool"),
        ("avx2", "overhead --name mine"),
        ("avx512", f"overhead --dtype bfloat16 --baseline {sys.prefix}"),
    ):
        at_level(level)
        asyncio.run(throughput.measure(*parse_arguments(options.split())))
    expected = ["throughput-overhead", "throughput-overhead-avx512-float32"]
    # A sweep is saved after each value.
    assert list(dict.fromkeys(saved)) == [
        *expected,
        "throughput-sweep-pool-avx2-float32",
        "mine",
        "throughput-overhead-over-baseline",
    ]


def test_a_sweep_that_is_stopped_keeps_the_values_it_has(monkeypatch):
    saved = []

    async def run(self, scenario, prefix=""):
        if scenario.pool == 4:
            raise KeyboardInterrupt
        return rounds_of(scenario)

    monkeypatch.setattr(throughput.Bench, "run", run)
    monkeypatch.setattr(throughput, "save", lambda name, content: saved.append((name, content["results"])))
    options = ["--sweep", "pool", "--values", "2", "3", "4", "--name", "mine"]
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(throughput.measure(*parse_arguments(options)))
    assert [name for name, _ in saved] == ["mine", "mine"]
    assert [[one["value"] for one in results["values"]] for _, results in saved] == [["2"], ["2", "3"]]
