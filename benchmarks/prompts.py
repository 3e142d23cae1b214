"""Attention of a prompt that is read in one step, by vLLM's op and by our kernel: ``python -m benchmarks.prompts``.

One layer of 8 query and 4 KV heads of 64, no engine, behind nothing. The op reads blocks of 128 tokens of all heads, as
stock vLLM does. Both attend in turns, by each number of threads.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from benchmarks.harness.holding import HEAD_DIM, KERNEL, KV_HEADS, OP, QUERY_HEADS
from benchmarks.harness.measure import (
    USUAL,
    Estimate,
    Times,
    estimate,
    full_name,
    kind,
    paired_ratio,
    record,
    save,
    timed,
    warn_if_busy,
)
from benchmarks.harness.options import add_counts, add_dtype, whole
from benchmarks.harness.scenarios import Target, show_targets
from vllm_kvevict.kernels.prefill_attention import PrefillAttention

BLOCK = 128
TARGET_TOKENS = 2048
TARGETS = {USUAL: 0.68, ("avx512", "float32"): 1.0}
"""CPU time of our kernel over the op's at most, on one thread, by level and dtype: the high end of the interval."""


class Prompt:
    """Queries, keys and values of a prompt, views of one projection's output, and both ways to attend."""

    def __init__(self, tokens: int, dtype: torch.dtype):
        whole = torch.randn(tokens, QUERY_HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
        self.query, self.key, self.value = whole.split([QUERY_HEADS, KV_HEADS, KV_HEADS], 1)
        self.tokens = tokens
        self.output = torch.empty(tokens, QUERY_HEADS, HEAD_DIM, dtype=dtype)
        self._kernel = PrefillAttention(dtype)
        self._new_tokens = torch.tensor([tokens], dtype=torch.int32)
        self._isa = _get_attn_isa(dtype, BLOCK, HEAD_DIM)
        torch.cpu._init_amx()  # a process that multiplies no matrices has not asked for it yet
        self._pages = self._store()

    def _store(self) -> tuple[Tensor, Tensor]:
        """Keys and values in the op's blocks."""
        blocks = -(-self.tokens // BLOCK)
        pages = torch.zeros(blocks, KV_HEADS, 2 * BLOCK, HEAD_DIM, dtype=self.key.dtype)
        keys, values = pages.chunk(2, dim=2)
        places = torch.arange(self.tokens)
        ops.cpu_attn_reshape_and_cache(self.key, self.value, keys, values, places, self._isa)
        return keys, values

    def by_op(self) -> None:
        """Attend by vLLM's op; its plan of the step, which serves all layers, is made anew each time."""
        starts, lengths = torch.tensor([0, self.tokens], dtype=torch.int32), self._new_tokens
        keys, values = self._pages
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=QUERY_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            seq_lens=lengths,
            dtype=self.query.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self._isa,
            enable_kv_split=True,
        )
        ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=keys,
            value_cache=values,
            output=self.output,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=HEAD_DIM**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=torch.arange(len(keys), dtype=torch.int32).unsqueeze(0),
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )

    def by_kernel(self) -> None:
        """Attend by our kernel."""
        matrices = self.query, self.key, self.value, self.output
        self._kernel(*matrices, self._new_tokens, None, None, HEAD_DIM**-0.5)


@dataclass
class Cell:
    """One length on some threads.

    Attributes:
        tokens, threads: of the prompt; of both sides.
        pairs: times of the op and of our kernel, in each round.
    """

    tokens: int
    threads: int
    pairs: list[tuple[Times, Times]]

    def milliseconds(self, side: int, what: int) -> float:
        """Median of the op (0) or our kernel (1): 0 wall, 1 CPU."""
        return estimate([1e3 * pair[side][what] for pair in self.pairs]).median

    def ratio(self, what: int) -> Estimate:
        """Our kernel's time over the op's: 0 wall, 1 CPU."""
        return paired_ratio([ours[what] for _, ours in self.pairs], [op[what] for op, _ in self.pairs])

    def summary(self) -> dict[str, Any]:
        """For the record."""
        return {**asdict(self), "wall": asdict(self.ratio(0)), "cpu": asdict(self.ratio(1))}


def compare(tokens: int, threads: int, rounds: int, dtype: str) -> Cell:
    """Both ways in turns; the first, uncounted round warms up."""
    torch.set_num_threads(threads)
    prompt = Prompt(tokens, getattr(torch, dtype))
    repeats = max(1, TARGET_TOKENS // tokens)
    sides: tuple[Callable[[], None], ...] = (prompt.by_op, prompt.by_kernel)
    rounds_seen = [tuple(timed(side, repeats) for side in sides) for _ in range(rounds + 1)]
    return Cell(tokens, threads, [(op, ours) for op, ours in rounds_seen[1:]])


def targets(arguments: argparse.Namespace, cells: Sequence[Cell]) -> list[Target]:
    """What our kernel should reach on this processor and in this dtype."""
    bound = TARGETS.get(kind(arguments.dtype))
    if bound is None:
        return []
    name = f"attention of a prompt of {TARGET_TOKENS} tokens: CPU time of {KERNEL} over that of {OP}"
    usual = [cell for cell in cells if (cell.tokens, cell.threads) == (TARGET_TOKENS, 1)]
    return [Target(name, cell.ratio(1), bound, at_most=True) for cell in usual]


def show(arguments: argparse.Namespace, cells: Sequence[Cell]) -> Table:
    """The results as a table."""
    table = Table(title=f"attention of a prompt, {' '.join(kind(arguments.dtype))}: {KERNEL} over {OP}")
    for column in ("tokens", "threads", "op ms", "kernel ms", "wall [95 %]", "CPU [95 %]"):
        table.add_column(column, no_wrap=True, justify="right")
    for cell in cells:
        times = (f"{cell.milliseconds(side, 0):.4g}" for side in (0, 1))
        table.add_row(
            str(cell.tokens), str(cell.threads), *times, *(str(cell.ratio(what)) for what in (0, 1))
        )
    return table


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prompts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_counts(parser, ("rounds", 9, "runs of each side"))
    cores = len(os.sched_getaffinity(0))
    for name, default, text in (
        ("tokens", [256, 1024, TARGET_TOKENS, 8192], "lengths of the prompt"),
        ("threads", list(range(1, min(2, cores) + 1)), "numbers of threads"),
    ):
        about = f"{text} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=whole, nargs="+", default=default, metavar="N", help=about)
    add_dtype(parser)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    console = Console(width=110)
    load = warn_if_busy(console)
    current_platform.import_kernels()
    torch.manual_seed(0)
    sizes = [(tokens, threads) for threads in arguments.threads for tokens in arguments.tokens]
    with torch.inference_mode():
        cells = [compare(*size, arguments.rounds, arguments.dtype) for size in track(sizes, "cells")]
    console.print(show(arguments, cells))
    content = {
        "settings": vars(arguments),
        "load_average_at_start": load,
        "cells": [cell.summary() for cell in cells],
        "targets": show_targets(console, targets(arguments, cells)),
    }
    print(f"written to {save(full_name('prompts', arguments.dtype), record('prompts', content))}")


if __name__ == "__main__":
    main()
