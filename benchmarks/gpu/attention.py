"""Decode attention over evicted KV beside FlashAttention over all of it: ``python -m benchmarks.gpu.attention``.

One layer of Llama-3.1-8B, one new token per request. FlashAttention over all of the KV is what stock vLLM runs,
over its own pages and with its schedule. Evicted KV has a page table per KV head: FlashAttention sees a sequence per
request and head, our kernel sees rows, and also stores the new token. Ragged KV is as large as uniform KV, but its
heads have different shares. Pages are scattered; every timing starts with a cold cache. The floor is the time to move
the KV at the speed of a copy on the same card.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.gpu import common
from benchmarks.gpu.common import (
    ENTRY_BYTES,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    PAGE,
    PAGE_ELEMENTS,
    QUERY_HEADS,
    SCALE,
    STOCK_PAGE,
    Contender,
    FlashAttention,
    Timer,
    Times,
)
from benchmarks.harness.measure import Estimate, paired_ratio, shown
from benchmarks.harness.options import add, budget, whole
from benchmarks.harness.scenarios import Target
from benchmarks.harness.tables import table
from vllm_kvevict.kernels.decode_attention import Rows
from vllm_kvevict.kernels.paged_decode import PagedDecode

FULL, PER_HEAD, OURS = "FlashAttention, all KV", "FlashAttention per head", "PagedDecode"
RAGGED = ", ragged"
FIFTH_TARGET, LONG_TARGET, RAGGED_TARGET = 4.5, 20.0, 1.05
SPARE_BYTES = 4 << 30
"""Left for everything but the KV."""


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
    times: dict[str, Times]

    @property
    def name(self) -> str:
        """Context and batch."""
        return f"{self.context} x {self.batch}"

    def over_full(self, name: str) -> Estimate:
        """How many times faster than FlashAttention over all of the KV."""
        return paired_ratio(self.times[FULL].ms, self.times[name].ms)

    def ragged_over_uniform(self, name: str) -> Estimate | None:
        """Time over ragged heads, relative to uniform ones."""
        if name + RAGGED not in self.times:
            return None
        return paired_ratio(self.times[name + RAGGED].ms, self.times[name].ms)

    def bytes_per_second(self, name: str) -> float:
        """Keys and values read, over time."""
        entries = self.context if name == FULL else self.kept
        return entries * self.batch * KV_HEADS * ENTRY_BYTES / (self.times[name].us.median * 1e-6)

    def summary(self, bandwidth: float) -> dict[str, Any]:
        """For the record."""
        sides = {}
        for name, times in self.times.items():
            speed = self.bytes_per_second(name)
            sides[name] = asdict(times) | {
                "us": asdict(times.us),
                "GB_per_s": speed / 1e9,
                "of_bandwidth_floor": speed / bandwidth,
                "over_full": asdict(self.over_full(name)),
            }
        ragged = {name: asdict(r) for name in (PER_HEAD, OURS) if (r := self.ragged_over_uniform(name))}
        settings = {key: getattr(self, key) for key in ("context", "batch", "budget", "kept")}
        return settings | {"sides": sides, "ragged_over_uniform": ragged}


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
        table: int32 [batch * KV_HEADS, width], pages of each row, scattered over the memory.
        lengths: int32 [batch, KV_HEADS].
        starts: int32 [batch * KV_HEADS + 1], where the queries of each row start.
    """

    def __init__(self, memory: Tensor, lengths: Tensor):
        self.memory, self.on_host = memory, lengths
        pages = -(-lengths.flatten() // PAGE)
        own = (torch.arange(int(pages.max())) < pages[:, None]).to(memory.device)
        scattered = torch.randperm(len(memory), dtype=torch.int32, device=memory.device)
        self.table = torch.zeros(own.shape, dtype=torch.int32, device=memory.device)
        self.table[own] = scattered[: int(pages.sum())]
        self.lengths = lengths.to(memory.device, torch.int32)
        self.starts = torch.arange(len(self.table) + 1, dtype=torch.int32, device=memory.device)

    def pages(self) -> tuple[Tensor, Tensor]:
        """Keys and values as pages of one head, as the engine hands them to FlashAttention."""
        pages = self.memory.view(len(self.memory), 2, PAGE, 1, HEAD_DIM)
        return pages[:, 0], pages[:, 1]

    def by_flash_attention(self, attend: FlashAttention, query: Tensor, output: Tensor) -> None:
        """The engine's call without our kernel."""
        rows = len(self.table)
        keys, values = self.pages()
        attend(
            q=query.view(rows, GROUP, HEAD_DIM),
            k=keys,
            v=values,
            out=output.view(rows, GROUP, HEAD_DIM),
            cu_seqlens_q=self.starts,
            max_seqlen_q=1,
            seqused_k=self.lengths.flatten(),
            max_seqlen_k=int(self.on_host.max()),
            block_table=self.table,
            softcap=0.0,
        )

    def rows(self) -> Rows:
        """The tables as our kernel reads them."""
        batch, heads = self.on_host.shape
        starts = torch.arange(batch * heads, dtype=torch.int32, device=self.memory.device)
        starts = (starts * self.table.shape[1]).view(batch, heads)
        slots = torch.arange(batch, device=self.memory.device)
        return Rows(self.table.flatten(), starts, self.lengths, slots, 0)


def expected(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attention in plain torch and fp32, of one query token per sequence.

    Args:
        query: [S, H * G, D] for keys and values of H heads, [pages, page, H, D].
        table, lengths: of the S sequences, [S, width].
    """
    results = []
    for one, pages, length in zip(query, table.long(), lengths, strict=True):
        used = pages[: -(-length // keys.shape[1])]
        k, v = (x[used].flatten(0, 1)[:length].float() for x in (keys, values))
        grouped = one.float().unflatten(0, (k.shape[1], -1))
        weights = (SCALE * torch.einsum("hgd,nhd->hgn", grouped, k)).softmax(-1)
        results.append(torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1))
    return torch.stack(results)


class Bench:
    """The contenders of one context and batch, over the same memory."""

    def __init__(self, context: int, batch: int, attend: FlashAttention):
        self.context, self.batch, self.attend = context, batch, attend
        # The rows of our kernel hold the new token's entry as one of theirs.
        pages = batch * KV_HEADS * -(-context // PAGE)
        self.memory = common.random_numbers(pages, PAGE_ELEMENTS)
        self.query = common.random_numbers(batch, QUERY_HEADS, HEAD_DIM)
        self.key, self.value = common.random_numbers(2, batch, KV_HEADS, HEAD_DIM)
        self.output = torch.empty_like(self.query)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=self.memory.device)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=self.memory.device)
        blocks = self.memory.numel() // (2 * STOCK_PAGE * KV_HEADS * HEAD_DIM)
        width = -(-context // STOCK_PAGE)
        scattered = torch.randperm(blocks, dtype=torch.int32, device=self.memory.device)
        self.table = scattered[: batch * width].view(batch, width)
        self.plan = attend.plan(batch, 1, context, self.lengths, self.starts)

    def full(self) -> None:
        """What stock vLLM runs."""
        keys, values = common.stock_pages(self.memory)
        self.attend(
            q=self.query,
            k=keys,
            v=values,
            out=self.output,
            cu_seqlens_q=self.starts,
            max_seqlen_q=1,
            seqused_k=self.lengths,
            max_seqlen_k=self.context,
            block_table=self.table,
            softcap=0.0,
            scheduler_metadata=self.plan,
        )

    def check_full(self) -> None:
        """Compare it with plain torch."""
        self.output.fill_(torch.nan)
        self.full()
        lengths = [self.context] * self.batch
        wanted = expected(self.query, *common.stock_pages(self.memory), self.table, lengths)
        common.check(FULL, self.output, wanted)

    def evicted(self, lengths: Tensor, suffix: str) -> list[Contender]:
        """FlashAttention and our kernel over rows of these lengths, compared with plain torch."""
        kept = Kept(self.memory, lengths)
        rows = kept.rows()
        kernel = PagedDecode(self.memory, PAGE, self.batch, KV_HEADS, GROUP, num_sms=common.multiprocessors())
        contenders = [
            Contender(
                OURS + suffix,
                lambda: kernel(self.query, self.key, self.value, self.output, rows, None, SCALE),
            ),
            Contender(
                PER_HEAD + suffix, lambda: kept.by_flash_attention(self.attend, self.query, self.output)
            ),
        ]
        wanted = None
        for contender in contenders:
            self.output.fill_(torch.nan)
            contender.run()
            if wanted is None:  # our kernel has stored the new entries
                queries = self.query.view(-1, GROUP, HEAD_DIM)
                wanted = expected(queries, *kept.pages(), kept.table, lengths.flatten().tolist())
            common.check(contender.name, self.output.view_as(wanted), wanted)
        self._check_stored(kept)
        return contenders[::-1]

    def _check_stored(self, kept: Kept) -> None:
        last = kept.on_host.flatten().to(kept.table.device) - 1
        pages = kept.table.gather(1, (last // PAGE)[:, None])[:, 0].long()
        for stored, new in zip(kept.pages(), (self.key, self.value), strict=True):
            common.check("the new entries", stored[pages, last % PAGE, 0], new.flatten(0, 1), tolerance=0)

    def cell(self, budget: float, rounds: int, timer: Timer) -> Cell:
        """Measure one budget."""
        kept = min(self.context, round(budget * self.context) if budget <= 1 else int(budget))
        self.check_full()
        contenders = [Contender(FULL, self.full)]
        contenders += self.evicted(torch.full((self.batch, KV_HEADS), kept), "")
        if kept < self.context:
            contenders += self.evicted(ragged_lengths(self.batch, kept, self.context, seed=0), RAGGED)
        times = common.take_turns(contenders, rounds, timer)
        return Cell(self.context, self.batch, budget, kept, times)


def targets(cells: Sequence[Cell]) -> list[Target]:
    """What the cells with a target should reach, the worst of each kind."""
    kinds: list[tuple[str, float, list[tuple[Estimate, Cell]]]] = [
        ("budget 0.2", FIFTH_TARGET, [(cell.over_full(OURS), cell) for cell in cells if cell.budget == 0.2]),
        (
            "1024 tokens of 131072",
            LONG_TARGET,
            [(c.over_full(OURS), c) for c in cells if (c.budget, c.context) == (1024, 131072)],
        ),
    ]
    found = []
    for name, bound, values in kinds:
        if values:
            worst, cell = min(values, key=lambda pair: pair[0].low)
            text = f"{OURS}, {name}, over {FULL}, worst of {len(values)} ({cell.name})"
            found.append(Target(text, worst, bound))
    ragged = [(ratio, cell) for cell in cells if (ratio := cell.ragged_over_uniform(OURS))]
    if ragged:
        worst, cell = max(ragged, key=lambda pair: pair[0].high)
        text = f"{OURS}, ragged over uniform heads, worst of {len(ragged)} ({cell.name}, {cell.budget:g})"
        found.append(Target(text, worst, RAGGED_TARGET, at_most=True))
    return found


def show(cells: Sequence[Cell], bandwidth: float) -> Table:
    """One row per cell; medians, and 95 % intervals of ratios."""
    columns = ["budget", "FA all us", "FA per head us", "x FA all", "ours us", "GB/s", "of floor"]
    columns += ["x FA all [95 %]", "ragged: FA", "ours, over uniform"]
    title = f"decode attention of one layer; copies move {bandwidth / 1e9:,.0f} GB/s"
    rows = table(title, ["context x batch"], columns)
    for cell in cells:
        us = {name: f"{times.us.median:.1f}" for name, times in cell.times.items()}
        speed = cell.bytes_per_second(OURS)
        theirs, ours = cell.ragged_over_uniform(PER_HEAD), cell.ragged_over_uniform(OURS)
        rows.add_row(
            cell.name,
            f"{cell.budget:g}",
            us[FULL],
            us[PER_HEAD],
            f"{cell.over_full(PER_HEAD).median:.3g}",
            us[OURS],
            f"{speed / 1e9:,.0f}",
            f"{speed / bandwidth:.0%}",
            shown(cell.over_full(OURS)),
            f"{theirs.median:.3g}" if theirs else "-",
            shown(ours) if ours else "-",
        )
    return rows


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = common.parser("attention", __doc__, rounds=20)
    add(
        parser,
        ("contexts", whole, [8192, 32768, 131072], "tokens of each request"),
        ("budgets", budget, [1.0, 0.2, 0.05, 1024.0], "share of the tokens kept, or tokens per KV head"),
        ("batches", whole, [1, 16, 64], "requests"),
    )
    arguments = parser.parse_args(argv)
    if any(context % PAGE for context in arguments.contexts):
        parser.error(f"--contexts must be multiples of {PAGE}")
    return arguments


def measure(arguments: argparse.Namespace, timer: Timer) -> common.Found:
    """Every size that fits into the device's memory."""
    attend = common.FlashAttention()
    cells, skipped = [], []
    bandwidth = common.copy_bandwidth(arguments.rounds, timer)
    sizes = [(context, batch) for context in arguments.contexts for batch in arguments.batches]
    for context, batch in common.show_progress(sizes, "sizes"):
        needed = batch * KV_HEADS * context * ENTRY_BYTES + SPARE_BYTES
        if needed > common.free_bytes():
            skipped.append(f"{context} x {batch}: {needed / 2**30:.0f} GiB needed")
            continue
        bench = Bench(context, batch, attend)
        cells += [bench.cell(kept, arguments.rounds, timer) for kept in arguments.budgets]
        del bench
    results = {
        "bandwidth_GB_per_s": bandwidth / 1e9,
        "flash_attention_version": attend.version,
        "cells": [cell.summary(bandwidth) for cell in cells],
        "skipped": skipped,
    }
    times = [times for cell in cells for times in cell.times.values()]
    notes = [f"skipped {text}, more than the device has" for text in skipped]
    return common.Found(results, times, targets(cells), show(cells, bandwidth), notes)


def main(argv: Sequence[str] | None = None) -> None:
    common.run("attention", parse_arguments(argv), measure)


if __name__ == "__main__":
    main()
