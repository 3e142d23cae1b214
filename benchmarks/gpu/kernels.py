"""Each Triton kernel compared with the least time that its memory traffic takes: ``python -m benchmarks.gpu.kernels``.

Shapes of Llama-3.1-8B. The floor of a kernel is the time that its bytes take at the speed of a copy on the same card:
operands and results once each, but the keys of the window's attention twice, and those of a radix search three times,
to count two digits and to copy aside what is left, as these algorithms have it. Results are compared with plain torch
first, and every timing starts with a cold cache. Kernels that move a few MB are bound by their launches instead, which
take microseconds.
"""

import argparse
import sys
from dataclasses import asdict
from importlib import import_module

import torch
from torch import Tensor

from benchmarks.gpu import attention, common
from benchmarks.gpu.common import ENTRY_BYTES, HEAD_DIM, KV_HEADS, PAGE, PAGE_ELEMENTS, QUERY_HEADS, Contender
from benchmarks.harness.measure import estimate
from benchmarks.harness.options import whole
from benchmarks.harness.scenarios import Target
from benchmarks.harness.tables import table
from benchmarks.micro import loop
from benchmarks.micro.loop import Found
from vllm_kvevict.kernels import append_pages, compact_rows, radix_select, window_attention, write_entries
from vllm_kvevict.kernels.paged_decode import PagedDecode

TARGET = 1.3
"""Times the floor that a kernel of ours may take."""
WINDOW, BUDGET = 32, 0.2
TOPK = "  the same by torch.topk"
COMMAND, HAS_DTYPE = "gpu.kernels", False
OPTIONS = (
    ("rounds", whole, 30, "timings of each contender"),
    ("context", whole, 32768, "tokens of each request"),
    ("layers", whole, common.LAYERS, "of the model"),
    ("append-batch", whole, 64, "requests of append_pages"),
    ("decode-batch", whole, 16, "requests of paged_decode"),
)


def refuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    wrong = arguments.context % PAGE or BUDGET * arguments.context <= WINDOW
    return f"--context must be a multiple of {PAGE} and above {WINDOW / BUDGET:g}" if wrong else None


def nbytes(*tensors: Tensor) -> int:
    """Bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def scattered_pages(rows: int, context: int) -> tuple[Tensor, Tensor]:
    """Random pages for some rows of a context, and their table, int32 [rows, pages of a row]."""
    columns = -(-context // PAGE)
    storage = common.random_numbers(rows * columns, PAGE_ELEMENTS)
    table = torch.randperm(rows * columns, dtype=torch.int32, device=storage.device)
    return storage, table.view(rows, columns)


def writing(context: int) -> Contender:
    """Entries of a prompt into pages of one layer; keys and values are parts of a fused projection's result."""
    storage, table = scattered_pages(KV_HEADS, context)
    fused = common.random_numbers(context, QUERY_HEADS + 2 * KV_HEADS, HEAD_DIM)
    keys, values = fused[:, QUERY_HEADS:].split(KV_HEADS, 1)
    token = torch.arange(context, device=storage.device)
    slots = (table[:, token // PAGE].long() * PAGE + token % PAGE).t().flatten()
    wanted = storage.clone()
    write_entries.reference(wanted, PAGE, keys, values, slots)

    def run() -> None:
        write_entries.write_entries(storage, PAGE, keys, values, slots)

    run()
    common.check("write_entries", storage, wanted, tolerance=0)
    return Contender("write_entries, one layer", run, 2 * nbytes(keys, values) + nbytes(slots))


def window(context: int, rows: str) -> Contender:
    """Attention of the last tokens to all others in one layer, the mean or the maximum over them."""
    storage, table = scattered_pages(KV_HEADS, context)
    query = common.random_numbers(WINDOW, QUERY_HEADS, HEAD_DIM)
    arguments = query, storage, PAGE, table, context, common.SCALE, 0.0, rows

    def run() -> Tensor:
        return window_attention.window_attention(*arguments)

    result = run()
    common.check("window_attention", result, window_attention.reference(*arguments), 1e-4)
    # Half of an entry is its key, which is read twice.
    moved = KV_HEADS * context * ENTRY_BYTES + nbytes(query, table, result)
    return Contender(f"window_attention, {rows}, one layer", run, moved)


def searches(context: int, layers: int) -> list[Contender]:
    """Order keys of scores, and the cuts of layers whose heads compete and of heads on their own."""
    m = context - WINDOW
    kept = round(BUDGET * context) - WINDOW
    scores = torch.rand(layers * KV_HEADS, m, device=common.DEVICE).pow_(4)
    keys = radix_select.order_keys(scores)
    common.check("order_keys", keys, radix_select.reference_order_keys(scores), tolerance=0)
    passes = radix_select.EARLY + 1
    moved = nbytes(scores, keys)
    found = [Contender("order_keys, all layers", lambda: radix_select.order_keys(scores), moved)]
    for name, rows, count in (
        ("heads compete", keys.view(layers, -1), KV_HEADS * kept),
        ("head by head", keys, kept),
    ):
        counts = torch.full((len(rows),), count, dtype=torch.int64, device=keys.device)

        def cut(rows: Tensor = rows, counts: Tensor = counts) -> Tensor:
            return radix_select.cuts(rows, counts)

        def top(rows: Tensor = rows, count: int = count) -> Tensor:
            return rows.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)

        wanted = radix_select.reference_cuts(rows, counts)
        common.check("cuts", cut(), wanted, tolerance=0)
        common.check("torch.topk", top(), wanted, tolerance=0)
        found.append(Contender(f"cuts, all layers, {name}", cut, passes * nbytes(keys)))
        found.append(Contender(f"{TOPK}, {name}", top, nbytes(keys)))
    return found


def compactions(context: int, layers: int) -> list[Contender]:
    """Survivors of one request to the front of its rows, all layers, in place; a repetition moves as many bytes."""
    rows = layers * KV_HEADS
    storage, table = scattered_pages(rows, context)
    pages = storage.view(-1, 2, PAGE, HEAD_DIM)
    kept = round(BUDGET * context)
    uniform = torch.full((layers, KV_HEADS), kept)
    ragged = attention.ragged_lengths(layers, kept, context, seed=1)
    found = []
    for name, counts in (("uniform heads", uniform), ("ragged heads", ragged)):
        chosen = [
            torch.randperm(context, device=storage.device)[:count].sort().values
            for count in counts.flatten().tolist()
        ]
        starts = torch.tensor([0, *counts.flatten().cumsum(0).tolist()], device=storage.device)
        survivors = torch.cat(chosen)

        def run(survivors: Tensor = survivors, starts: Tensor = starts) -> None:
            compact_rows.compact_rows(storage, PAGE, table, survivors, starts)

        before = [pages[table[row, own // PAGE].long(), :, own % PAGE] for row, own in enumerate(chosen)]
        run()
        for row, wanted in enumerate(before):
            entry = torch.arange(len(wanted), device=storage.device)
            moved = pages[table[row, entry // PAGE].long(), :, entry % PAGE]
            common.check("compact_rows", moved, wanted, tolerance=0)
        moved_bytes = 2 * len(survivors) * ENTRY_BYTES + nbytes(survivors, table)
        found.append(Contender(f"compact_rows to {BUDGET:.0%}, all layers, {name}", run, moved_bytes))
    return found


def appending(batch: int, context: int, layers: int) -> Contender:
    """Room for one more token in all rows of a batch."""
    rows, device = layers * KV_HEADS, common.DEVICE
    longest = round(BUDGET * context)
    columns = -(-(longest + 1) // PAGE)
    before = torch.randint(longest // 2, longest, (batch, rows), dtype=torch.int32, device=device)
    lengths = before.clone()
    arena = torch.zeros(batch * rows * columns, dtype=torch.int32, device=device)
    starts = torch.arange(batch * rows, dtype=torch.int32, device=device).mul_(columns).view(batch, rows)
    full = (before % PAGE == 0).sum(1)
    pages = torch.randperm(int(full.sum()), dtype=torch.int32, device=device)
    storage = common.random_numbers(max(1, len(pages)), PAGE_ELEMENTS)
    slots, first = torch.arange(batch, device=device), full.cumsum(0) - full
    wanted = [tensor.clone() for tensor in (arena, lengths, storage)]
    append_pages.reference(wanted[0], starts, wanted[1], slots, pages, first, PAGE, wanted[2])

    def run() -> None:
        append_pages.append_pages(arena, starts, lengths, slots, pages, first, PAGE, storage)

    run()
    for tensor, expected in zip((arena, lengths, storage), wanted, strict=True):
        common.check("append_pages", tensor, expected, tolerance=0)
    moved = nbytes(pages) * 2 + nbytes(lengths) * 2 + len(pages) * PAGE * ENTRY_BYTES
    return Contender(f"append_pages, {batch} requests, all layers", run, moved, lambda: lengths.copy_(before))


def decoding(batch: int, context: int) -> Contender:
    """Attention of one new token per request in one layer, over all of a context."""
    storage, _ = scattered_pages(batch * KV_HEADS, context)
    kept = attention.Kept(storage, torch.full((batch, KV_HEADS), context))
    query = common.random_numbers(batch, QUERY_HEADS, HEAD_DIM)
    key, value = common.random_numbers(2, batch, KV_HEADS, HEAD_DIM)
    output = torch.full_like(query, torch.nan)
    kernel = PagedDecode(storage, PAGE, batch, KV_HEADS, common.GROUP, num_sms=common.multiprocessors())

    def run() -> None:
        kernel(query, key, value, output, kept.rows, None, common.SCALE)

    run()
    common.check("paged_decode", output, kept.expected(query))
    entries = batch * KV_HEADS * context * ENTRY_BYTES
    moved = entries + nbytes(query, key, value, output, kept.sequences.block_table)
    return Contender(f"paged_decode, {batch} requests, one layer", run, moved)


def measure(arguments: argparse.Namespace) -> Found:
    """All kernels in turns."""
    context, layers, rounds = arguments.context, arguments.layers, arguments.rounds
    with common.device() as timer:
        bandwidth = common.copy_bandwidth(rounds, timer)
        contenders = [
            writing(context),
            window(context, "mean"),
            window(context, "max"),
            window(context, "recent"),
            *searches(context, layers),
            *compactions(context, layers),
            appending(arguments.append_batch, context, layers),
            decoding(arguments.decode_batch, context),
        ]
        times = common.take_turns(contenders, rounds, timer)
    title = f"Triton kernels at {context} tokens; copies move {bandwidth / 1e9:,.0f} GB/s"
    rows = table(title, ["kernel"], ("us [95 %]", "MB", "floor us", "times the floor [95 %]"))
    kernels, targets = [], []
    for one in contenders:
        of, floor = times[one.name], 1e6 * one.moved / bandwidth
        ratio = estimate([1e3 * ms / floor for ms in of.ms])
        rows.add_row(one.name, str(of.us), f"{one.moved / 1e6:,.1f}", f"{floor:.3g}", str(ratio))
        about = {"name": one.name, "bytes": one.moved, "us": asdict(of.us), "times_floor": asdict(ratio)}
        kernels.append(about | asdict(of))
        if not one.name.startswith(TOPK):
            targets.append(Target(one.name, ratio, TARGET, at_most=True))
    results = {"bandwidth_GB_per_s": bandwidth / 1e9, "kernels": kernels}
    notes = common.late_notes([*times.values()])
    return Found(results, [rows], targets=targets, notes=notes, card=common.card())


if __name__ == "__main__":
    sys.exit(loop.run("gpu/kernels", import_module("benchmarks.gpu.kernels")))
