"""Floors, their arithmetic, and every operation once at a small size; no engine is started."""

import re

import pytest
import torch
from vllm.platforms import current_platform

from benchmarks import micro
from benchmarks.harness import floors
from benchmarks.harness.floors import Operation, Rates, Timing, Work
from benchmarks.harness.measure import Estimate

RATES = Rates(memory=100.0, arithmetic=1000.0)


class FakeMachine:
    def measure(self) -> Rates:
        return RATES


def test_floor_is_the_longer_of_moving_and_computing():
    assert Work(moved=200).floor(RATES) == 2 and Work(moved=200).bound(RATES) == "memory"
    assert Work(200, 3000).floor(RATES) == 3 and Work(200, 3000).bound(RATES) == "arithmetic"
    assert Work(400, 3000).floor(RATES) == 4 and Work(400, 3000).bound(RATES) == "memory"


def test_every_round_is_held_against_its_own_rates():
    rates = [Rates(100.0, 1.0), Rates(50.0, 1.0), Rates(25.0, 1.0)]
    timing = floors.summarise("copy", Work(100), [3.0, 6.0, 12.0], rates)
    assert timing.times_floor == Estimate(3.0, 3.0, 3.0)  # the machine slowed down, not the operation
    assert timing.floor_ms == pytest.approx(2000) and timing.raw == [3000, 6000, 12000]


def test_without_tensors_there_is_no_floor():
    timing = floors.summarise("ledger", None, [1.0, 2.0, 3.0], [RATES] * 3)
    assert timing.floor_ms is None and timing.times_floor is None and timing.ms.median == 2000


def test_operations_take_turns_and_the_first_round_does_not_count():
    calls: list[str] = []
    operations = [
        Operation("a", lambda: calls.append("a"), Work(1), lambda: calls.append("before a"), repeats=2),
        Operation("b", lambda: calls.append("b") or 0.25, Work(1), times_itself=True),
    ]
    timings, rates = floors.measure(operations, FakeMachine(), rounds=2)
    assert calls == ["before a", "a", "a", "b"] * 3
    assert [len(timing.raw) for timing in timings] == [2, 2] and len(rates) == 2
    assert timings[1].raw == [250, 250]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_machine_measures_positive_rates(monkeypatch, dtype):
    monkeypatch.setattr(floors, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(floors, "MATMUL_SIZE", 32)
    machine = floors.Machine(dtype)
    rates = machine.measure()
    assert rates.memory > 0 and rates.arithmetic > 0 and machine._factors.dtype == dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_operations_run_again_and_again(dtype):
    current_platform.import_kernels()
    torch.manual_seed(0)
    with torch.inference_mode():
        operations = [
            *micro.step_operations(batch=2, context=256, share=0.2, dtype=dtype),
            *micro.prompt_operations(context=256, chunk=64, share=0.2, dtype=dtype),
            micro.ledger_operation(batch=2),
        ]
        timings, _ = floors.measure(operations, FakeMachine(), rounds=3)
    assert len({timing.name for timing in timings}) == len(timings) == 15
    assert all(timing.ms.low > 0 for timing in timings)
    assert [timing.name for timing in timings if timing.floor_ms is None] == ["ledger, one request and step"]


@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("float32", 4)])
def test_attention_of_a_share_has_that_share_of_the_floor(dtype, size):
    whole, part = (operation.work for operation in micro.step_operations(2, 512, 0.25, dtype)[:4:2])
    assert whole is not None and part is not None
    assert part.moved / whole.moved == pytest.approx(0.25, abs=0.02)
    # Nothing else than keys and values, queries and outputs.
    entries, tokens = 2 * 513 * micro.LAYERS * micro.KV_HEADS, 2 * micro.LAYERS
    assert whole.moved == (entries * 2 * 64 + 2 * tokens * micro.QUERY_HEADS * 64) * size
    assert whole.flops == entries * micro.GROUP * 4 * 64


def test_plot_leaves_out_what_has_no_floor(tmp_path, monkeypatch):
    monkeypatch.setattr(micro, "RESULTS", tmp_path)
    one = Estimate(2.0, 1.0, 3.0)
    timings = [
        Timing("a", one, 1.0, one, "memory", [2.0]),
        Timing("b", one, None, None, "interpreter", [2.0]),
    ]
    assert micro.plot(timings, 1, "micro-x") == str(tmp_path / "micro-x.png")
    assert (tmp_path / "micro-x.png").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "--batch 0",
        "--rounds 0",
        "--rounds 1000",
        "--threads 0",
        "--context 100",
        "--chunk 8192",
        "--share 0.6",
    ],
)
def test_bad_arguments_name_the_flag(arguments, capsys):
    with pytest.raises(SystemExit):
        micro.parse_arguments(arguments.split())
    assert re.search(f"{arguments.split()[0]}:? must be", capsys.readouterr().err)
