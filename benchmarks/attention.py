"""Decode attention over a ragged fifth of the KV beside all of it: ``python -m benchmarks.attention``.

The project's own cache and batch layout, 8 layers of 8 query and 4 KV heads of 64 in bf16, no engine.
One side holds the whole context and attends with vLLM's op. The others hold, in every layer and head, a random number
of entries whose mean is the given share; one attends with vLLM's op, one with our kernel. All sides decode in turn.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from benchmarks.measure import RESULTS, Estimate, estimate, paired_ratio, record, save
from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.batch import Call, lay_out
from vllm_kvevict.kernels.decode_attention import DecodeAttention, Rows

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 8, 4, 64, 32
GROUP = QUERY_HEADS // KV_HEADS
DTYPE = torch.bfloat16
TARGET = 4.0
OP, KERNEL = "vLLM's op", "our kernel"


class Holding:
    """A batch of requests that hold some share of a context, and their decode step by OP or KERNEL."""

    def __init__(self, batch: int, context: int, share: float, attention: str, seed: int):
        self.isa = _get_attn_isa(DTYPE, PAGE, HEAD_DIM)
        pages = LAYERS * KV_HEADS * batch * (-(-context // PAGE) + 2)
        storage = torch.randn(pages, 2 * PAGE * HEAD_DIM).to(DTYPE)
        self.cache = PagedKVCache(
            storage,
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            page_size=PAGE,
            max_requests=batch,
            write=self._write,
        )
        self.key_pages, self.value_pages = self._views(storage)
        self.kernel = DecodeAttention(storage, PAGE) if attention == KERNEL else None
        random = torch.Generator().manual_seed(seed)
        slots = [self.cache.open() for _ in range(batch)]
        for slot in slots:
            self.cache.extend([slot], [context])
            if share < 1:
                self._evict(slot, context, share, random)
        self.step = self.cache.extend(slots, [1] * batch)
        self.calls = lay_out(self.cache, self.step, kernel=False).calls
        self.query = torch.randn(batch, QUERY_HEADS, HEAD_DIM).to(DTYPE)
        self.entries = torch.randn(batch, KV_HEADS, HEAD_DIM).to(DTYPE)
        self.output = torch.empty_like(self.query)

    def _evict(self, slot: int, context: int, share: float, random: torch.Generator) -> None:
        for layer in range(LAYERS):
            weights = torch.rand(KV_HEADS, generator=random) + 0.25
            counts = (weights / weights.sum() * share * context * KV_HEADS).long().clamp(1, context)
            kept = [torch.randperm(context, generator=random)[:count].sort().values for count in counts]
            self.cache.compact(slot, layer, kept)
        self.cache.settle(slot)

    def _views(self, storage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = storage.view(storage.shape[0], 1, -1, HEAD_DIM).chunk(2, dim=2)
        return keys, values

    def _write(
        self, storage: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        ops.cpu_attn_reshape_and_cache(
            keys.unsqueeze(1), values.unsqueeze(1), *self._views(storage), slots, self.isa
        )

    def plan(self, call: Call, layer: int) -> torch.Tensor:
        """The op's own schedule of a call, which it needs anew in every layer."""
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=call.seq_lens.shape[1],
            num_heads=GROUP,
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            seq_lens=call.seq_lens[layer],
            dtype=DTYPE,
            query_start_loc=call.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )

    def attend(self, call: Call, layer: int, query: torch.Tensor, output: torch.Tensor) -> None:
        """Attention of one layer by vLLM's op; ``query`` and ``output`` are [rows, GROUP, HEAD_DIM] of the call."""
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=self.key_pages,
            value_cache=self.value_pages,
            output=output,
            query_start_loc=call.query_start_loc,
            seq_lens=call.seq_lens[layer],
            scale=HEAD_DIM**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=call.block_tables[layer],
            softcap=0.0,
            scheduler_metadata=self.plan(call, layer),
            s_aux=None,
        )

    def decode(self) -> None:
        """Attention of one step, all layers; the kernel stores the new entries, too."""
        if self.kernel:
            tables = self.cache.tables
            for layer in range(LAYERS):
                rows = Rows(tables.arena, tables.row_starts, tables.kv_len, self.step.slots, layer * KV_HEADS)
                self.kernel(self.query, self.entries, self.entries, self.output, rows, None, HEAD_DIM**-0.5)
            return
        (call,) = self.calls
        query, output = self.query.view(-1, GROUP, HEAD_DIM), self.output.view(-1, GROUP, HEAD_DIM)
        for layer in range(LAYERS):
            self.attend(call, layer, query, output)


Times = tuple[float, float]
"""Wall and CPU seconds."""


def timed(work: Callable[[], None], repeats: int) -> Times:
    """Wall and CPU seconds of one call, over some repeats."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - wall) / repeats, (time.process_time() - cpu) / repeats


def compare(batch: int, context: int, share: float, pairs: int) -> dict[str, list[Times]]:
    """Times of all KV with vLLM's op, named "all", and of a share with OP and with KERNEL, in turns."""
    sides = {
        "all": Holding(batch, context, 1.0, OP, seed=0),
        **{attention: Holding(batch, context, share, attention, seed=1) for attention in (OP, KERNEL)},
    }
    repeats = max(1, 65536 // context)
    for side in sides.values():
        timed(side.decode, repeats)
    raw: dict[str, list[Times]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in list(sides)[:: 1 if pair % 2 == 0 else -1]:
            raw[name].append(timed(sides[name].decode, repeats))
    return raw


def plot(rows: list[dict]) -> str:
    """Speed-up over context, one line per share."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for share, attention in sorted({(row["share"], row["attention"]) for row in rows}):
        line = sorted(
            (row["context"], row["wall"]["median"])
            for row in rows
            if (row["share"], row["attention"]) == (share, attention)
        )
        style = "o-" if attention == KERNEL else "o--"
        axes.plot(*zip(*line, strict=True), style, label=f"{share:.0%} of the KV, {attention}")
    axes.set(xscale="log", xlabel="context, tokens", ylabel="speed-up over all KV with vLLM's op")
    axes.set_xticks(contexts := sorted({row["context"] for row in rows}), [str(c) for c in contexts])
    axes.minorticks_off()
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.legend()
    figure.tight_layout()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "attention.png"
    figure.savefig(path, dpi=120)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8, help="requests (default: %(default)s)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.2, 0.4], help="of the KV held")
    parser.add_argument("--pairs", type=int, default=9, help="runs of each side (default: %(default)s)")
    args = parser.parse_args()
    current_platform.import_kernels()
    table = Table(title=f"decode attention, {args.batch} requests: speed-up over all KV with vLLM's op")
    for column in ("context", "share", "attention", "wall [95 %]", "CPU [95 %]", "ms per step, all KV"):
        table.add_column(column, no_wrap=True, justify="right")
    rows = []
    cells = [(context, share) for context in args.contexts for share in args.shares]
    for context, share in track(cells, "cells"):
        raw = compare(args.batch, context, share, args.pairs)
        whole = estimate([wall * 1e3 for wall, _ in raw["all"]])
        for attention in (OP, KERNEL):
            speed: list[Estimate] = [
                paired_ratio([w[i] for w in raw["all"]], [p[i] for p in raw[attention]]) for i in (0, 1)
            ]
            table.add_row(
                str(context), f"{share:g}", attention, str(speed[0]), str(speed[1]), f"{whole.median:.1f}"
            )
            rows.append(
                {
                    "context": context,
                    "share": share,
                    "attention": attention,
                    "wall": asdict(speed[0]),
                    "cpu": asdict(speed[1]),
                    "pairs": list(zip(raw["all"], raw[attention], strict=True)),
                }
            )
    Console(width=100).print(table)
    for row in rows:
        if row["context"] == 16384 and row["share"] == 0.2:
            met = "met" if row["wall"]["median"] >= TARGET else "MISSED"
            print(f"target: {TARGET:g} x at 16384 tokens and a fifth of the KV, {row['attention']}: {met}")
    content = {"batch": args.batch, "threads": torch.get_num_threads(), "cells": rows}
    print(f"written to {save('attention', record('attention', content))} and {plot(rows)}")


if __name__ == "__main__":
    main()
