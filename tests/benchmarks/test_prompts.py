"""Attention of a prompt in both dtypes at a small size, its targets and its table; no engine is started."""

import re

import pytest
import torch
from vllm.platforms import current_platform

from benchmarks.prompts import Cell, Prompt, compare, parse_arguments, show, targets


def cell(ratios=(0.5, 0.5, 0.5), tokens: int = 2048, threads: int = 1) -> Cell:
    """A cell in which our kernel takes this part of the op's time."""
    return Cell(tokens, threads, [((1.0, 1.0), (ratio, ratio)) for ratio in ratios])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_ways_compute_the_same(dtype):
    current_platform.import_kernels()
    torch.manual_seed(0)
    with torch.inference_mode():
        prompt = Prompt(300, getattr(torch, dtype))
        prompt.by_op()
        by_op = prompt.output.clone()
        prompt.output.zero_()
        prompt.by_kernel()
    torch.testing.assert_close(prompt.output, by_op, atol=2e-2, rtol=2e-2)


def test_sides_are_timed_in_turns():
    current_platform.import_kernels()
    threads = torch.get_num_threads()
    try:
        with torch.inference_mode():
            found = compare(64, 1, 2, "float32")
    finally:
        torch.set_num_threads(threads)
    assert (found.tokens, found.threads, len(found.pairs)) == (64, 1, 2)
    assert all(seconds > 0 for pair in found.pairs for side in pair for seconds in side)


@pytest.mark.parametrize(
    "level, dtype, bounds",
    [("avx512", "bfloat16", [0.68]), ("avx512", "float32", [1.0]), ("avx2", "bfloat16", [])],
)
def test_targets_are_those_of_level_and_dtype(at_level, level, dtype, bounds):
    at_level(level)
    cells = [cell(), cell(tokens=8192), cell(threads=2)]
    found = targets(parse_arguments(["--dtype", dtype]), cells)
    assert [target.bound for target in found] == bounds and all(target.met for target in found)


def test_the_high_end_of_the_interval_counts(at_level):
    at_level("avx512")
    (target,) = targets(parse_arguments(["--dtype", "bfloat16"]), [cell((0.5, 0.5, 0.7))])
    assert not target.met


def test_the_table_has_every_cell():
    assert show(parse_arguments([]), [cell(), cell(tokens=256)]).row_count == 2


@pytest.mark.parametrize("arguments", ["--rounds 0", "--tokens 256 0", "--threads 0"])
def test_bad_arguments_name_the_flag(arguments, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments.split())
    assert re.search(f"{arguments.split()[0]}:? must be", capsys.readouterr().err)
