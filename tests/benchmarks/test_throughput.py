"""Scenarios, sweeps, rates, ratios and targets; no engine is started."""

import asyncio
import contextlib
import io
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import throughput
from benchmarks.harness import bench, scenarios
from benchmarks.harness.baseline import Baseline
from benchmarks.harness.bench import Bench, summary
from benchmarks.harness.load import Run
from benchmarks.harness.measure import Estimate
from benchmarks.harness.scenarios import OVER_BASELINE, SCENARIOS, TARGETS, Scenario, Target
from benchmarks.latency import BASE, AtRate, panels, run_rates
from benchmarks.latency import show as show_latency
from benchmarks.latency import targets as latency_targets
from benchmarks.throughput import parse_arguments
from tests.benchmarks.runs import ours, run_of, without_port

QUIET = Console(file=io.StringIO())


def rounds_of(scenario: Scenario, ours_wall: float = 1.0, **changes) -> list[dict[str, Run]]:
    """Three rounds in which stock vLLM takes 2 s."""
    return [
        {name: run_of(2.0) if name == "stock" else ours(ours_wall, **changes) for name in scenario.sides}
        for _ in range(3)
    ]


def test_the_whole_interval_has_to_reach_a_target():
    assert Target("at least", 12, 12).met and not Target("at most", 3, 2, at_most=True).met
    value = Estimate(1.3, 1.2, 1.4)
    assert Target("at least", value, 1.2).met and not Target("at least", value, 1.25).met
    assert Target("at most", value, 1.4, at_most=True).met
    assert not Target("at most", value, 1.35, at_most=True).met
    assert str(Target("speed", value, 1.25)) == "speed: 1.3 [1.2, 1.4], target >= 1.25: MISSED"


def test_pool_bound_counts_take_the_worst_run(at_level):
    at_level("avx512")
    scenario = SCENARIOS["pool-bound"]
    rounds = rounds_of(scenario, peak=13)
    rounds[1]["budget 0.2"] = ours(1.0, peak=11, preemptions=3)
    assert [target.met for target in scenario.targets("pool-bound", rounds)] == [True, False, False]


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in TARGETS for name in throughput.SCENARIOS])
def test_every_target_can_be_met_and_missed(kind, name, at_level):
    at_level(kind[0])
    scenario = replace(throughput.SCENARIOS[name], dtype=kind[1])
    for wall, cpu, met in ((0.5, 0.5, True), (3.0, 2.0, False)):
        run = ours(wall, cpu=cpu, peak=24 * met, preemptions=3 * (not met))
        run = replace(run, decision_seconds=wall * (not met))
        sides = dict.fromkeys(scenario.sides, run_of(2.0)) | dict.fromkeys(scenario.evicting, run)
        wanted = scenario.targets(name, [sides] * 3)
        assert len(wanted) >= len(TARGETS[kind].get(name, {})) and all(target.met == met for target in wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", throughput.SCENARIOS)
def test_pool_holds_as_many_full_requests_as_it_says(name, dtype):
    scenario = replace(throughput.SCENARIOS[name], dtype=dtype)
    blocks = scenario.kv_bytes() // (scenarios.BLOCK * scenarios.token_bytes(dtype))
    per_request = -(-(scenario.input_len + scenario.output_len) // scenarios.BLOCK)
    assert (blocks - 1) // per_request == scenario.pool  # vLLM keeps one block


def test_sides_differ_in_the_eviction_only(monkeypatch, tmp_path):
    monkeypatch.setattr(scenarios, "model", lambda *_, **sizes: tmp_path)
    scenario = replace(SCENARIOS["pool-bound"], tensor=2, dtype="float32", lookaheads=(0, 16))
    stock, evicting, later = (scenario.server(side, threads=1).command for side in scenario.sides)
    assert evicting[-4:] == ["--kv-eviction", "ada-snapkv", "--kv-budget", "0.2"]
    assert later[-2:] == ["--kv-eviction-config.lookahead", "16"]
    assert without_port(later)[:-2] == without_port(evicting)
    assert without_port(stock) == without_port(evicting)[:-4]
    per_rank = stock[stock.index("--kv-cache-memory-bytes") + 1]
    assert int(per_rank) * 2 == scenario.kv_bytes()
    assert stock[stock.index("--tensor-parallel-size") + 1] == "2"


def test_the_baseline_serves_each_budget_once_more(monkeypatch, tmp_path, at_level):
    at_level("avx512")
    monkeypatch.setattr(scenarios, "model", lambda *_, **sizes: tmp_path)
    scenario = replace(SCENARIOS["fits"], baseline=Baseline("other", {"vllm-kvevict": "0.1"}, "abc"))
    assert scenario.sides == ["stock", "budget 1", "budget 0.2", "budget 1, baseline", "budget 0.2, baseline"]
    _, _, served, _, other = (scenario.server(side, threads=None) for side in scenario.sides)
    assert Path(other.command[0]) == Path.cwd() / "other/bin/vllm" and other.command[0] != served.command[0]
    assert without_port(other.command)[1:] == without_port(served.command)[1:] and other.log != served.log
    walls = dict(zip(scenario.sides, (2.0, 1.0, 0.5, 3.0, 0.25), strict=True))
    rounds = [{side: run_of(wall) for side, wall in walls.items()}] * 3
    reached = scenario.ratios(rounds)
    assert [one[OVER_BASELINE].median for one in reached.values()] == [3.0, 0.5]
    assert OVER_BASELINE not in SCENARIOS["fits"].ratios(rounds)["budget 1"]
    # The scenario's own targets still hold.
    assert judged("fits", scenario, rounds)
    assert asdict(scenario)["baseline"]["commit"] == "abc"


def judged(name: str, scenario: Scenario, rounds) -> list[dict]:
    return summary(QUIET, name, scenario, SCENARIOS[name], rounds)["targets"]


def test_targets_hold_for_the_scenarios_own_sizes_and_enough_rounds(at_level):
    at_level("avx512")
    own = SCENARIOS["overhead"]
    rounds = rounds_of(own)
    assert [target["bound"] for target in judged("overhead", own, rounds)] == [0.92]
    others = replace(own, requests=1), replace(own, dtype="float32")
    assert [judged("overhead", other, rounds) for other in others] == [[], []]
    assert judged("overhead", own, rounds[:2]) == []
    at_level("avx2")
    assert judged("overhead", own, rounds) == []


@pytest.fixture
def saved(monkeypatch) -> dict[str, dict]:
    """Results by the names of their records; running takes no time, but somebody stops at the third value."""
    found = {}

    async def run(self, scenario, prefix=""):
        if prefix == "4, ":
            raise KeyboardInterrupt
        return rounds_of(scenario)

    monkeypatch.setattr(Bench, "run", run)
    monkeypatch.setattr(bench, "save", lambda name, content: found.update({name: content["results"]}))
    return found


@pytest.mark.parametrize(
    "level, options, name",
    [
        ("avx512", "overhead --dtype bfloat16", "throughput-overhead"),
        ("avx512", "overhead --dtype float32", "throughput-overhead-avx512-float32"),
        ("avx2", "overhead --name mine", "mine"),
        ("avx512", f"overhead --dtype bfloat16 --baseline {sys.prefix}", "throughput-overhead-over-baseline"),
        ("avx512", "--sweep pool --dtype bfloat16", "throughput-sweep-pool"),
    ],
)
def test_names_of_records_and_a_sweep_that_is_stopped(level, options, name, saved, at_level):
    at_level(level)
    arguments, chosen = parse_arguments(options.split())
    with pytest.raises(KeyboardInterrupt) if arguments.sweep else contextlib.nullcontext():
        asyncio.run(bench.measure("throughput", arguments, chosen, SCENARIOS, arguments.sweep))
    values = [one["value"] for one in saved[name].get("values", ())]
    assert list(saved) == [name] and values == (["2", "3"] if arguments.sweep else [])


# Latencies.


def at_rate(multiple: float, names=("ttft", "tpot", "itl", "e2e")) -> AtRate:
    def run(seconds: float) -> Run:
        of = {"mean": seconds, "p50": seconds, "p90": 2 * seconds, "p99": 3 * seconds}
        return replace(run_of(2.0), latency=dict.fromkeys(names, of))

    return AtRate(multiple, 2 * multiple, [{"stock": run(0.4), "budget 0.2": run(0.1)} for _ in range(3)])


def test_latencies_are_judged_and_shown(at_level):
    at_level("avx512")
    results = [at_rate(0.25), at_rate(0.5), at_rate(1.0)]
    reached = latency_targets(BASE, results)
    assert [target.bound for target in reached] == [1.0, 0.6, 1.05] and all(target.met for target in reached)
    swapped = [dict(zip(one, reversed(one.values()), strict=True)) for one in results[0].rounds]
    slower = [replace(at, rounds=swapped) for at in results]
    assert not any(target.met for target in latency_targets(BASE, slower))
    assert latency_targets(replace(BASE, requests=3), results) == []
    console = Console(file=io.StringIO(), width=130)
    show_latency(console, BASE, results[0])
    assert "0.400" in console.file.getvalue() and "tpot over stock's: p50 0.25" in console.file.getvalue()
    # An answer of one token has no time between tokens.
    short = at_rate(0.5, ("ttft", "e2e"))
    assert set(short.ratios("budget 0.2")) == {"ttft", "e2e"}
    assert [len(panels(BASE, [at])) for at in (results[0], short)] == [2, 1]


def test_rates_are_multiples_of_what_stock_completes(monkeypatch):
    loads, running = [], set(BASE.sides)

    class Paused(str):
        def signal(self, number):
            (running.discard if number == signal.SIGSTOP else running.add)(self)

    async def drive(server, load, kv_bytes, dtype):
        assert running == {server}
        loads.append((server, load))
        return replace(run_of(8.0 if server == "stock" else 4.0), completed=24)

    async def start(self, stack, scenario, prefix=""):
        return {side: Paused(side) for side in scenario.sides}

    monkeypatch.setattr(scenarios, "drive", drive)
    monkeypatch.setattr(Bench, "start", start)
    saturation, results = asyncio.run(run_rates(Bench(1, 10), replace(BASE, rounds=2), (0.5, 1.0)))
    assert saturation["stock"].requests_per_second == 3.0
    assert [(at.rate, len(at.rounds)) for at in results] == [(1.5, 2), (3.0, 2)]
    assert [server for server, _ in loads[::2]] == ["stock", "budget 0.2", "budget 0.2", "stock", "stock"]
    assert [load.rate for _, load in loads[::2]] == [None, 1.5, 3.0, 1.5, 3.0]
    for (_, stock), (_, evicting) in zip(loads[::2], loads[1::2], strict=True):
        assert stock == evicting  # the same prompts and arrivals
    assert len({load for _, load in loads}) == 5 and running == set(BASE.sides)
