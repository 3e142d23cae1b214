"""Exclusive times, medians, tables and options; no engine is started."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks import breakdown
from benchmarks.breakdown import DECODE, PREFILL, Cell, parse_arguments
from benchmarks.harness import steps
from benchmarks.harness.steps import REST, Stopwatch


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when it is told to."""
    now = SimpleNamespace(time=100.0)
    monkeypatch.setattr(steps.time, "perf_counter", lambda: now.time)
    return now


def test_the_time_of_what_a_function_calls_is_not_its_own(clock):
    stopwatch = Stopwatch()

    class Work:
        def inner(self, seconds):
            clock.time += seconds
            return seconds

        def outer(self):
            clock.time += 1
            result = self.inner(2) + self.inner(4)
            clock.time += 8
            return result

    stopwatch.watch(Work, "inner", "inside")
    work = Work()
    stopwatch.watch(work, "outer", "outside")

    def step():
        clock.time += 16
        assert work.outer() == 6

    assert stopwatch.run(step) == {REST: 16, "outside": 9, "inside": 6}
    assert stopwatch.run(lambda: None) == {REST: 0}


def test_an_error_ends_the_part_it_came_from(clock):
    stopwatch = Stopwatch()
    work = SimpleNamespace(fail=lambda: 1 / 0)
    stopwatch.watch(work, "fail", "failing")

    def step():
        with pytest.raises(ZeroDivisionError):
            work.fail()
        clock.time += 3

    assert stopwatch.run(step)[REST] == 3


def cells():
    steps = [{REST: 0.001, "attention": seconds} for seconds in (0.002, 0.004, 0.010)]
    return [
        Cell(layers, side, kind, steps if side == "stock" else [*steps[:2], {REST: 0.003}])
        for layers in (4, 16)
        for side in ("stock", "snapkv")
        for kind in (DECODE, PREFILL)
    ]


def test_medians_of_parts_and_of_steps():
    first, _, ours, _ = cells()[:4]
    assert first.milliseconds == pytest.approx({REST: 1, "attention": 4}) and first.total == pytest.approx(5)
    # A part that a step did not have took no time.
    assert ours.milliseconds == pytest.approx({REST: 1, "attention": 2}) and ours.total == pytest.approx(3)


def test_table_and_plot_have_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr(breakdown, "RESULTS", tmp_path)
    console = Console(file=io.StringIO(), width=130)
    some = [cell for cell in cells() if cell.kind == DECODE]
    console.print(breakdown.show(parse_arguments([]), DECODE, some))
    text = console.file.getvalue()
    assert "16 layers, snapkv" in text and re.search(r"whole step .* 5\.00", text)
    assert breakdown.plot(cells(), "breakdown-x") == str(tmp_path / "breakdown-x.png")
    assert (tmp_path / "breakdown-x.png").exists()


@pytest.mark.parametrize("arguments", ["--batch 0", "--context 100", "--threads 1000", "--budget 1.5"])
def test_bad_arguments_name_the_flag(arguments, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments.split())
    assert re.search(f"{arguments.split()[0]}:? must be", capsys.readouterr().err)
