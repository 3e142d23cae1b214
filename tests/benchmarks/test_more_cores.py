"""What more cores would make of a step; no engine is started."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks import breakdown
from benchmarks.harness.more_cores import CORES, DIVIDED, cores_table, on_cores
from vllm_kvevict.engine.worker import runtime

PARTS = {"attention": 8.0, "model without attention": 4.0, "scheduler": 1.0}


@pytest.fixture
def breakdown_parts(monkeypatch):
    """The parts that the benchmark watches on a side that evicts."""
    seen = set()
    runner = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=object()))
    worker = SimpleNamespace(model_runner=runner)
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    core = SimpleNamespace(model_executor=executor, scheduler=None)
    engine = SimpleNamespace(
        llm=SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)))
    )
    monkeypatch.setattr(breakdown.stopwatch, "watch", lambda owner, name, part: seen.add(part))
    monkeypatch.setattr(runtime, "get_runtime", lambda: SimpleNamespace(rank=SimpleNamespace(cache=None)))
    breakdown.install(engine)
    return seen


def test_threads_divide_some_parts_and_not_the_others():
    assert [on_cores(PARTS, cores) for cores in (1, 2, 4)] == [13.0, 7.0, 4.0]
    assert on_cores({"sampling": 3.0}, 16) == 3.0


def test_the_names_of_parts_are_those_that_are_timed(breakdown_parts):
    assert set(DIVIDED) <= breakdown_parts


def test_the_table_has_a_row_for_each_number_of_cores():
    console = Console(file=io.StringIO(), width=100)
    console.print(cores_table("at best", [("stock", PARTS), ("ours", {"sampling": 3.0})]))
    lines = console.file.getvalue().splitlines()
    assert sum("3.00" in line for line in lines) == len(CORES)
    assert any(line.split()[1:6:2] == ["4", "4.00", "3.00"] for line in lines)
