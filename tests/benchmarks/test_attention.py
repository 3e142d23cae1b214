"""Decode attention in both dtypes at a small size, its targets and its plot; no engine is started."""

import re

import pytest
import torch
from vllm.platforms import current_platform

from benchmarks import attention
from benchmarks.attention import Cell, compare, parse_arguments, plot, show, targets
from benchmarks.harness.holding import KERNEL, OP
from benchmarks.harness.measure import USUAL


def cell(share: float, ratios=(9.0, 9.0, 9.0), context: int = 8192, way: str = KERNEL) -> Cell:
    """A cell in which all KV takes this many times as long."""
    return Cell(context, share, way, [((ratio, ratio), (1.0, 1.0)) for ratio in ratios])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_ways_compute_the_same(dtype):
    current_platform.import_kernels()
    torch.manual_seed(0)
    with torch.inference_mode():
        cells = compare(2, 64, 0.5, 2, dtype)
        assert [(one.attention, len(one.pairs)) for one in cells] == [(OP, 2), (KERNEL, 2)]
        holding = attention.Holding(2, 64, 0.5, KERNEL, 1, dtype)
        assert holding.key_pages.dtype == holding.output.dtype == getattr(torch, dtype)
        holding.decode()  # stores the new entries as well, so that the op finds them
        ours = holding.output.clone()
        holding.kernel = None
        holding.decode()
    torch.testing.assert_close(holding.output, ours, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "level, dtype, bounds",
    [
        ("avx512", "bfloat16", [8.5, 1.7]),
        ("avx2", "bfloat16", [6.0, 1.2]),
        ("avx2", "float32", [5.0, 1.2]),
        ("avx512", "float32", []),
        ("sse", "float32", []),
    ],
)
def test_targets_are_those_of_level_and_dtype(at_level, level, dtype, bounds):
    at_level(level)
    cells = [cell(0.2), cell(0.2, way=OP), cell(1.0), cell(0.4), cell(0.2, context=4096)]
    found = targets(parse_arguments(["--dtype", dtype]), cells)
    assert [target.bound for target in found] == bounds and all(target.met for target in found)
    assert not targets(parse_arguments(["--dtype", dtype, "--batch", "4"]), cells)


def test_the_low_end_of_the_interval_counts(at_level):
    at_level("avx512")
    arguments = parse_arguments(["--dtype", "bfloat16"])
    (target,) = targets(arguments, [cell(0.2, (9.0, 9.0, 8.4))])
    assert not target.met and target.bound == attention.TARGETS[USUAL][0.2]


def test_table_and_plot_have_every_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "RESULTS", tmp_path)
    cells = [cell(share, context=context) for share in (0.2, 1.0) for context in (4096, 8192)]
    assert show(parse_arguments([]), cells).row_count == 4
    assert plot(cells, "attention-x") == str(tmp_path / "attention-x.png")
    assert (tmp_path / "attention-x.png").exists()


def test_all_of_the_kv_is_among_the_default_shares():
    assert 1.0 in parse_arguments([]).shares and attention.TARGET_CONTEXT in parse_arguments([]).contexts


@pytest.mark.parametrize("arguments", ["--batch 0", "--pairs 0", "--contexts 512 0", "--shares 0.2 1.5"])
def test_bad_arguments_name_the_flag(arguments, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments.split())
    assert re.search(f"{arguments.split()[0]}:? must be", capsys.readouterr().err)
