"""Latency ratios, table and plot; no engine is started."""

import asyncio
import io
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.harness import bench
from benchmarks.harness.bench import Bench
from benchmarks.harness.load import Run
from benchmarks.latency import (
    BASE,
    RATES,
    AtRate,
    latency_table,
    parse_arguments,
    plot,
    run_rates,
    targets,
)


def run_of(seconds: float, wall: float = 2.0, names=("ttft", "tpot", "itl", "e2e")) -> Run:
    latency = {
        name: {"mean": seconds, "p50": seconds, "p90": 2 * seconds, "p99": 3 * seconds} for name in names
    }
    return Run(wall, 1.0, 24, 0, 1000, 100, latency, 4, 1.0, None, 0, 0, 0.0, 0.0)


def at_rate(multiple: float, **changes) -> AtRate:
    rounds = [{"stock": run_of(0.4, **changes), "budget 0.2": run_of(0.1, **changes)} for _ in range(3)]
    return AtRate(multiple, 2 * multiple, rounds)


def test_ratios_are_taken_over_stock():
    reached = at_rate(0.5).ratios("budget 0.2")
    assert set(reached) == {"ttft", "tpot", "itl", "e2e"} and set(reached["ttft"]) == {"p50", "p90", "p99"}
    assert reached["itl"]["p99"].median == pytest.approx(0.25)
    assert set(at_rate(0.5, names=("ttft", "e2e")).ratios("budget 0.2")) == {"ttft", "e2e"}


def test_targets_are_of_the_usual_kind_and_load(at_level):
    at_level("avx512")
    results = [at_rate(0.25), at_rate(0.5), at_rate(1.0)]
    reached = targets(BASE, results)
    assert [target.bound for target in reached] == [1.0, 0.6, 1.05] and all(target.met for target in reached)
    slower = [
        replace(at, rounds=[dict(zip(one, reversed(one.values()), strict=True)) for one in at.rounds])
        for at in results
    ]
    assert not any(target.met for target in targets(BASE, slower))
    assert len(targets(replace(BASE, requests=96, rounds=7), results)) == 3
    for other in (replace(BASE, requests=3), replace(BASE, rounds=1), replace(BASE, pool=8)):
        assert targets(other, results) == []
    assert targets(replace(BASE, dtype="float32"), results) == []
    at_level("avx2")
    assert targets(BASE, results) == []


def test_table_has_milliseconds_of_every_rate():
    console = Console(file=io.StringIO(), width=130)
    console.print(latency_table(BASE, [at_rate(0.25), at_rate(1.0)]))
    text = console.file.getvalue()
    assert "0.5 (0.25x)" in text and "2 (1x)" in text and "400.0" in text and "300.0" in text
    assert text.count("0.25 [0.25, 0.25]") == 16


@pytest.mark.parametrize("names", [("ttft", "tpot"), ("ttft",)])
def test_plot_is_written(tmp_path, names):
    path = plot(BASE, [at_rate(0.25, names=names), at_rate(1.0, names=names)], tmp_path / "latency.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_rates_are_multiples_of_what_stock_completes(monkeypatch):
    loads, running = [], set(BASE.sides)

    class Paused(str):
        def signal(self, number):
            (running.discard if number == signal.SIGSTOP else running.add)(self)

    async def drive(server, load, kv_bytes, dtype):
        loads.append((server, load))
        assert running == {server}
        return run_of(0.1, wall=8.0 if server == "stock" else 4.0)

    async def start(self, stack, scenario, prefix=""):
        return {side: Paused(side) for side in scenario.sides}

    monkeypatch.setattr(bench, "drive", drive)
    monkeypatch.setattr(Bench, "start", start)
    scenario = replace(BASE, rounds=2)
    saturation, results = asyncio.run(run_rates(Bench(1, 10), scenario, (0.5, 1.0)))
    assert saturation["stock"].requests_per_second == 3.0
    assert [(at.rate, len(at.rounds)) for at in results] == [(1.5, 2), (3.0, 2)]
    assert [server for server, _ in loads] == ["stock", "budget 0.2"] * 5
    assert [load.rate for _, load in loads[::2]] == [None, 1.5, 3.0, 1.5, 3.0]
    for (_, stock), (_, ours) in zip(loads[::2], loads[1::2], strict=True):
        assert stock == ours  # the same prompts and arrivals
    assert len({load for _, load in loads}) == 5
    assert running == set(BASE.sides)


def test_options(capsys):
    arguments, scenario = parse_arguments(["--requests", "3", "--rates", "0.5"])
    assert scenario == replace(BASE, requests=3, dtype=arguments.dtype) and arguments.rates == [0.5]
    assert parse_arguments([])[0].rates == RATES
    for line, message in (
        ("--rate 2", "--rates"),
        ("--rates 0", "--rates: must be above 0"),
        ("--pool 1", "--pool 1"),
    ):
        with pytest.raises(SystemExit):
            parse_arguments(line.split())
        assert message in capsys.readouterr().err
