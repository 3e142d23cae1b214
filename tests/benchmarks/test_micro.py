"""What all names of `micro` share, and floors; no engine is started."""

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform

from benchmarks.harness.measure import Estimate
from benchmarks.harness.options import whole
from benchmarks.harness.plots import Panel
from benchmarks.harness.scenarios import Target
from benchmarks.micro import attention, floors, loop, steps
from benchmarks.micro.floors import Rates, Work
from benchmarks.micro.holding import KERNEL, OP, Holding
from benchmarks.micro.loop import Cell, Found, in_turns
from benchmarks.micro.prompts import Prompt

RATES = Rates(memory=100.0, arithmetic=1000.0)
MACHINE = SimpleNamespace(measure=lambda: RATES)


def test_sides_take_turns_and_the_first_round_does_not_count():
    calls: list[str] = []
    found = in_turns({name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}, 2)
    assert "".join(calls) == "cba" + "abc" + "cba"
    assert found == {"a": [4, 9], "b": [5, 8], "c": [6, 7]}


def test_ratios_are_paired():
    pairs = [((2.0, 6.0), (1.0, 2.0)), ((30.0, 6.0), (10.0, 2.0))]
    cell = Cell({"context": 1}, pairs)
    assert cell.ratio(0) == Estimate(2.5, 2.0, 3.0) and cell.ratio(1).median == 3.0
    assert Cell({}, pairs, over=(1, 0)).ratio(1).median == pytest.approx(1 / 3)
    assert cell.summary().keys() == {"context", "pairs", "wall", "cpu"}


def test_what_was_found_is_printed_drawn_and_saved(monkeypatch, tmp_path, capsys, at_level):
    at_level("avx2")
    saved = {}
    monkeypatch.setattr(loop, "RESULTS", tmp_path)
    monkeypatch.setattr(loop, "save", lambda name, content: saved.update({name: content}))
    cells = [Cell({"context": 512}, [((2.0, 6.0), (1.0, 2.0))] * 3)]
    found = Found(
        {"cells": [7]},
        [loop.compared("heading", cells, ("stock", "ours"))],
        [Panel("x", "y", {"a": [(1, Estimate(1.0, 0.5, 2.0)), (2, 3.0)]}, 1)],
        [Target("speed", Estimate(1.0, 0.5, 2.0), 1.0)],
        ["a note"],
    )
    module = SimpleNamespace(OPTIONS=[("rounds", whole, 3, "runs")], measure=lambda _: found)
    assert loop.run("decode", module, ["--rounds", "5"]) == 0
    ((name, content),) = saved.items()
    assert name == "decode-avx2-float32" and (tmp_path / f"{name}.png").exists()
    results = content["results"]
    assert results["settings"] == {"rounds": 5, "dtype": "float32"} and results["cells"] == [7]
    assert [target["met"] for target in results["targets"]] == [False]
    printed = " ".join(capsys.readouterr().out.split())
    assert all(text in printed for text in ("heading", "512", "2,000 [2,000, 2,000]", "MISSED", "a note"))


# Floors.


def test_every_round_is_held_against_its_own_rates():
    rates = [Rates(100.0, 1.0), Rates(50.0, 1.0), Rates(25.0, 1.0)]
    timing = floors.summarise("copy", Work(100), [3.0, 6.0, 12.0], rates)
    assert timing.times_floor == Estimate(3.0, 3.0, 3.0)  # the machine slowed down, not the operation
    assert timing.floor_ms == pytest.approx(2000) and timing.bound == "memory"
    assert floors.summarise("matrix product", Work(100, 300), [3.0], rates[:1]).floor_ms == 300_000


def test_operations_run_again_and_again():
    current_platform.import_kernels()
    torch.manual_seed(0)
    with torch.inference_mode():
        operations = [
            *steps.step_operations(batch=2, context=256, share=0.2, dtype="float32"),
            *steps.prompt_operations(context=256, chunk=64, share=0.2, dtype="float32"),
        ]
        timings, _ = floors.measure(operations, MACHINE, rounds=3)
    assert len({timing.name for timing in timings}) == 14 and all(timing.ms.low > 0 for timing in timings)


@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("float32", 4)])
def test_attention_of_a_share_has_that_share_of_the_floor(dtype, size):
    whole, part = (operation.work for operation in steps.step_operations(2, 512, 0.25, dtype)[:4:2])
    assert part.moved / whole.moved == pytest.approx(0.25, abs=0.02)
    # Nothing else than keys and values, queries and outputs.
    entries, tokens = 2 * 513 * steps.LAYERS * steps.KV_HEADS, 2 * steps.LAYERS
    assert whole.moved == (entries * 2 * 64 + 2 * tokens * steps.QUERY_HEADS * 64) * size
    assert whole.flops == entries * steps.GROUP * 4 * 64


# Attention.


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_ways_to_attend_compute_the_same(dtype):
    current_platform.import_kernels()
    torch.manual_seed(0)
    with torch.inference_mode():
        cells = attention.compare(2, 64, 0.5, 2, dtype)
        holding = Holding(2, 64, 0.5, KERNEL, 1, dtype)
        holding.by_kernel()  # stores the new entries as well, so that the op finds them
        ours = holding.output.clone()
        holding.by_op()
        prompt = Prompt(300, getattr(torch, dtype))
        prompt.by_op()
        by_op = prompt.output.clone()
        prompt.output.zero_()
        prompt.by_kernel()
    assert [(cell.of["attention"], len(cell.pairs)) for cell in cells] == [(OP, 2), (KERNEL, 2)]
    torch.testing.assert_close(holding.output, ours, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(prompt.output, by_op, atol=2e-2, rtol=2e-2)
