"""Decode attention over evicted KV beside FlashAttention over all of it: ``python -m benchmarks.gpu.attention``.

One layer of Llama-3.1-8B, one new token per request. FlashAttention over all of the KV is what stock vLLM runs,
over its own pages and with its schedule. Evicted KV has a page table per KV head: FlashAttention sees a sequence per
request and head, our kernel sees rows, and also stores the new token. Ragged KV is as large as uniform KV, but its
heads have different shares. Pages are scattered; every timing starts with a cold cache.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.gpu import common
from benchmarks.gpu.common import GROUP, HEAD_DIM, KV_HEADS, PAGE, PAGE_ELEMENTS, QUERY_HEADS, Contender
from benchmarks.harness.measure import Estimate, paired_ratio
from benchmarks.harness.options import budget, whole
from benchmarks.harness.scenarios import Target
from benchmarks.harness.tables import table
from benchmarks.micro import loop
from benchmarks.micro.loop import Found
from vllm_kvevict.engine.worker.batch import Sequences
from vllm_kvevict.kernels.decode_attention import BatchRows
from vllm_kvevict.kernels.paged_decode import PagedDecode

FULL, PER_HEAD = "FlashAttention, all KV", "FlashAttention per head"
OURS, RAGGED = "PagedDecode", "PagedDecode, ragged"
FIFTH_TARGET, LONG_TARGET, RAGGED_TARGET = 4.5, 20.0, 1.05
SPARE_BYTES = 4 << 30
"""Left for everything but the KV."""
COMMAND, HAS_DTYPE = "gpu.attention", False
OPTIONS = (
    ("rounds", whole, 20, "timings of each contender"),
    ("contexts", whole, [8192, 32768, 131072], "tokens of each request"),
    ("budgets", budget, [1.0, 0.2, 0.05, 1024.0], "share of the tokens kept, or tokens per KV head"),
    ("batches", whole, [1, 16, 64], "requests"),
)


def refuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    wrong = any(context % PAGE for context in arguments.contexts)
    return f"--contexts must be multiples of {PAGE}" if wrong else None


@dataclass
class Cell:
    """What was measured at one size.

    Attributes:
        context, batch: tokens of each request, and requests.
        budget: as of ``--kv-budget``.
        kept: entries per KV head, on average.
        times: of each contender.
    """

    context: int
    batch: int
    budget: float
    kept: int
    times: dict[str, common.Times]

    @property
    def name(self) -> str:
        """Context and batch."""
        return f"{self.context} x {self.batch}"

    def over_full(self, name: str) -> Estimate:
        """How many times faster than FlashAttention over all of the KV."""
        return paired_ratio(self.times[FULL].ms, self.times[name].ms)

    @property
    def ragged_over_uniform(self) -> Estimate | None:
        """Our time over ragged heads, relative to uniform ones."""
        ragged = self.times.get(RAGGED)
        return paired_ratio(ragged.ms, self.times[OURS].ms) if ragged else None

    def summary(self) -> dict[str, Any]:
        """For the record."""
        sides = {
            name: asdict(times) | {"us": asdict(times.us), "over_full": asdict(self.over_full(name))}
            for name, times in self.times.items()
        }
        ragged = self.ragged_over_uniform
        settings = {key: getattr(self, key) for key in ("context", "batch", "budget", "kept")}
        return settings | {"sides": sides, "ragged_over_uniform": asdict(ragged) if ragged else None}


def ragged_lengths(batch: int, kept: int, context: int, seed: int) -> Tensor:
    """Entries of each KV head, int64 [batch, KV_HEADS], as unlike as Ada-KV's: a fifth is each head's own.

    The heads of a request hold kept * KV_HEADS together, and none more than the context or fewer than one.
    """
    random = torch.Generator().manual_seed(seed)
    claims = torch.randn(batch, KV_HEADS, generator=random).exp()
    shares = 0.2 + 0.8 * claims / claims.mean(1, keepdim=True)
    lengths = (shares * kept).long().clamp(1, context)
    for row in lengths:
        for head in row.argsort():  # what rounding and the clamp left over goes to the shortest heads
            missing = kept * KV_HEADS - int(row.sum())
            row[head] = int((row[head] + missing).clamp(1, context))
    return lengths


class Kept:
    """Page tables of evicted requests.

    Args:
        memory: pages, [pages, PAGE_ELEMENTS].
        lengths: int64 [batch, KV_HEADS], on the host, the new token's entry included.

    Attributes:
        sequences: one for each request and KV head; their pages are scattered over the memory.
        rows: the same as our kernel reads them.
    """

    def __init__(self, memory: Tensor, lengths: Tensor):
        self.memory, device = memory, memory.device
        pages = -(-lengths.flatten() // PAGE)
        own = (torch.arange(int(pages.max())) < pages[:, None]).to(device)
        scattered = torch.randperm(len(memory), dtype=torch.int32, device=device)
        table = torch.zeros(own.shape, dtype=torch.int32, device=device)
        table[own] = scattered[: int(pages.sum())]
        places = torch.arange(len(table) + 1, dtype=torch.int32, device=device)
        on_device = lengths.to(device, torch.int32)
        self.sequences = Sequences(on_device.flatten(), table, places, int(lengths.max()), 1)
        starts = (places[:-1] * table.shape[1]).view(lengths.shape)
        slots = torch.arange(len(lengths), device=device)
        self.rows = BatchRows(table.flatten(), starts, on_device, slots, 0)

    def pages(self) -> tuple[Tensor, Tensor]:
        """Keys and values as pages of one head, as the engine hands them to FlashAttention."""
        pages = self.memory.view(len(self.memory), 2, PAGE, 1, HEAD_DIM)
        return pages[:, 0], pages[:, 1]

    def expected(self, query: Tensor) -> Tensor:
        """Attention in plain torch of [batch, QUERY_HEADS, HEAD_DIM], in the same shape."""
        table, lengths = self.sequences.block_table, self.sequences.seq_lens.tolist()
        return common.expected(query.view(-1, GROUP, HEAD_DIM), self.pages(), table, lengths).view_as(query)


class Bench:
    """The contenders of one context and batch, over the same memory."""

    def __init__(self, context: int, batch: int, attend: common.FlashAttention):
        self.context, self.batch, self.attend = context, batch, attend
        # The rows of our kernel hold the new token's entry as one of theirs.
        self.memory = common.random_numbers(batch * KV_HEADS * -(-context // PAGE), PAGE_ELEMENTS)
        self.query = common.random_numbers(batch, QUERY_HEADS, HEAD_DIM)
        self.key, self.value = common.random_numbers(2, batch, KV_HEADS, HEAD_DIM)
        self.output = torch.empty_like(self.query)
        self.all = common.stock_sequences(batch, context, 1)
        self.plan = attend.plan(self.all)

    def full(self) -> None:
        """What stock vLLM runs."""
        self.attend(self.query, common.stock_pages(self.memory), self.all, self.output, self.plan)

    def check_full(self) -> None:
        """Compare it with plain torch."""
        self.output.fill_(torch.nan)
        self.full()
        lengths = [self.context] * self.batch
        wanted = common.expected(self.query, common.stock_pages(self.memory), self.all.block_table, lengths)
        common.check(FULL, self.output, wanted)

    def evicted(self, lengths: Tensor) -> dict[str, Callable[[], None]]:
        """FlashAttention and our kernel over rows of these lengths, compared with plain torch."""
        kept = Kept(self.memory, lengths)
        kernel = PagedDecode(self.memory, PAGE, self.batch, KV_HEADS, GROUP, num_sms=common.multiprocessors())
        by_head = self.query.view(-1, GROUP, HEAD_DIM), kept.pages(), kept.sequences
        found = self.output.view(-1, GROUP, HEAD_DIM)

        def ours() -> None:
            kernel(self.query, self.key, self.value, self.output, kept.rows, None, common.SCALE)

        ours()  # stores the new entries
        wanted = kept.expected(self.query)
        runs = {PER_HEAD: lambda: self.attend(*by_head, found), OURS: ours}
        for name, run in runs.items():
            self.output.fill_(torch.nan)
            run()
            common.check(name, self.output, wanted)
        return runs

    def cell(self, budget: float, rounds: int, timer: common.Timer) -> Cell:
        """Measure one budget."""
        kept = min(self.context, round(budget * self.context) if budget <= 1 else int(budget))
        self.check_full()
        runs = {FULL: self.full, **self.evicted(torch.full((self.batch, KV_HEADS), kept))}
        if kept < self.context:
            runs[RAGGED] = self.evicted(ragged_lengths(self.batch, kept, self.context, seed=0))[OURS]
        contenders = [Contender(name, run) for name, run in runs.items()]
        times = common.take_turns(contenders, rounds, timer)
        return Cell(self.context, self.batch, budget, kept, times)


def targets(cells: Sequence[Cell]) -> list[Target]:
    """What the cells with a target should reach, the worst of each kind."""
    fifth = [(cell.over_full(OURS), cell) for cell in cells if cell.budget == 0.2]
    long = [(cell.over_full(OURS), cell) for cell in cells if (cell.budget, cell.context) == (1024, 131072)]
    ragged = [(ratio, cell) for cell in cells if (ratio := cell.ragged_over_uniform)]
    found = []
    for what, bound, values in (
        ("budget 0.2", FIFTH_TARGET, fifth),
        ("1024 tokens of 131072", LONG_TARGET, long),
    ):
        if values:
            worst, cell = min(values, key=lambda pair: pair[0].low)
            text = f"{OURS}, {what}, over {FULL}, worst of {len(values)} ({cell.name})"
            found.append(Target(text, worst, bound))
    if ragged:
        worst, cell = max(ragged, key=lambda pair: pair[0].high)
        text = f"{OURS}, ragged over uniform heads, worst of {len(ragged)} ({cell.name}, {cell.budget:g})"
        found.append(Target(text, worst, RAGGED_TARGET, at_most=True))
    return found


def show(cells: Sequence[Cell]) -> Table:
    """One row per cell; medians, and 95 % intervals of ratios."""
    columns = ["budget", "FA all us", "FA per head us", "ours us", "x FA all [95 %]", "ragged over uniform"]
    rows = table("decode attention of one layer", ["context x batch"], columns)
    for cell in cells:
        us = (f"{cell.times[name].us.median:.1f}" for name in (FULL, PER_HEAD, OURS))
        ragged = cell.ragged_over_uniform
        ratios = str(cell.over_full(OURS)), str(ragged or "-")
        rows.add_row(cell.name, f"{cell.budget:g}", *us, *ratios)
    return rows


def measure(arguments: argparse.Namespace) -> Found:
    """Every size that fits into the device's memory."""
    cells, skipped = [], []
    sizes = [(context, batch) for context in arguments.contexts for batch in arguments.batches]
    with common.device() as timer:
        attend = common.FlashAttention()
        for context, batch in track(sizes, "sizes"):
            needed = batch * KV_HEADS * context * common.ENTRY_BYTES + SPARE_BYTES
            if needed > common.free_bytes():
                skipped.append(f"{context} x {batch}: {needed / 2**30:.0f} GiB needed")
                continue
            bench = Bench(context, batch, attend)
            cells += [bench.cell(kept, arguments.rounds, timer) for kept in arguments.budgets]
            del bench
    results = {
        "flash_attention_version": attend.version,
        "cells": [cell.summary() for cell in cells],
        "skipped": skipped,
    }
    notes = [f"skipped {text}, more than the device has" for text in skipped]
    notes += common.late_notes([times for cell in cells for times in cell.times.values()])
    return Found(results, [show(cells)], targets=targets(cells), notes=notes, card=common.card())


if __name__ == "__main__":
    sys.exit(loop.run("gpu/attention", import_module("benchmarks.gpu.attention")))
