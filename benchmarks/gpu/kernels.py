"""Each Triton kernel compared with the least time that its memory traffic takes: ``python -m benchmarks.gpu.kernels``.

Shapes of Llama-3.1-8B. The floor of a kernel is the time that its bytes take at the speed of a copy on the same card:
operands and results once each, but the keys of the window's attention twice, and those of a radix search three times,
to count two digits and to copy aside what is left, as these algorithms have it. Results are compared with plain torch
first, and every timing starts with a cold cache. Kernels that move a few MB are bound by their launches instead, which
take microseconds.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.gpu import attention, common
from benchmarks.gpu.common import (
    ENTRY_BYTES,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    PAGE,
    PAGE_ELEMENTS,
    QUERY_HEADS,
    SCALE,
    Contender,
    Times,
)
from benchmarks.harness.measure import Estimate, estimate, shown
from benchmarks.harness.options import add, whole
from benchmarks.harness.scenarios import Target
from benchmarks.harness.tables import table
from vllm_kvevict.kernels import append_pages, compact_rows, radix_select, window_attention, write_entries
from vllm_kvevict.kernels.paged_decode import PagedDecode

TARGET = 1.3
"""Times the floor that a kernel may take."""
WINDOW, BUDGET = 32, 0.2


@dataclass(frozen=True)
class Operation:
    """A kernel, or what it is compared with.

    Attributes:
        contender: what is timed.
        moved: bytes that it reads and writes.
        has_target: whether it is one of ours.
    """

    contender: Contender
    moved: int
    has_target: bool = True

    def times_floor(self, times: Times, bandwidth: float) -> Estimate:
        """Time over the floor."""
        floor = self.moved / bandwidth
        return estimate([ms * 1e-3 / floor for ms in times.ms])


def operation(
    name: str, run: Callable[[], object], moved: int, prepare: Callable[[], object] = lambda: None
) -> Operation:
    """A kernel of ours."""
    return Operation(Contender(name, run, prepare), moved)


def nbytes(*tensors: Tensor) -> int:
    """Bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def scattered_pages(rows: int, context: int) -> tuple[Tensor, Tensor]:
    """Random pages for some rows of a context, and their table, int32 [rows, pages of a row]."""
    columns = -(-context // PAGE)
    storage = common.random_numbers(rows * columns, PAGE_ELEMENTS)
    table = torch.randperm(rows * columns, dtype=torch.int32, device=storage.device)
    return storage, table.view(rows, columns)


def writing(context: int) -> Operation:
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
    return operation("write_entries, one layer", run, 2 * nbytes(keys, values) + nbytes(slots))


def window(context: int, rows: str) -> Operation:
    """Attention of the last tokens to all others in one layer, the mean or the maximum over them."""
    storage, table = scattered_pages(KV_HEADS, context)
    query = common.random_numbers(WINDOW, QUERY_HEADS, HEAD_DIM)
    arguments = query, storage, PAGE, table, context, SCALE, 0.0, rows

    def run() -> Tensor:
        return window_attention.window_attention(*arguments)

    result = run()
    common.check("window_attention", result, window_attention.reference(*arguments), 1e-4)
    moved = KV_HEADS * context * ENTRY_BYTES + nbytes(
        query, table, result
    )  # half of an entry is its key, read twice
    return operation(f"window_attention, {rows}, one layer", run, moved)


def searches(context: int, layers: int) -> list[Operation]:
    """Order keys of scores, and the cuts of layers whose heads compete and of heads on their own."""
    m = context - WINDOW
    kept = round(BUDGET * context) - WINDOW
    scores = torch.rand(layers * KV_HEADS, m, device=common.DEVICE).pow_(4)
    keys = radix_select.order_keys(scores)
    common.check("order_keys", keys, radix_select.reference_order_keys(scores), tolerance=0)
    passes = radix_select.EARLY + 1
    found = [
        operation("order_keys, all layers", lambda: radix_select.order_keys(scores), nbytes(scores, keys))
    ]
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
        found.append(operation(f"cuts, all layers, {name}", cut, passes * nbytes(keys)))
        instead = Contender(f"  the same by torch.topk, {name}", top)
        found.append(Operation(instead, nbytes(keys), has_target=False))
    return found


def compactions(context: int, layers: int) -> list[Operation]:
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
        found.append(operation(f"compact_rows to {BUDGET:.0%}, all layers, {name}", run, moved_bytes))
    return found


def appending(batch: int, context: int, layers: int) -> Operation:
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
    return operation(f"append_pages, {batch} requests, all layers", run, moved, lambda: lengths.copy_(before))


def decoding(batch: int, context: int) -> Operation:
    """Attention of one new token per request in one layer, over all of a context."""
    storage, _ = scattered_pages(batch * KV_HEADS, context)
    lengths = torch.full((batch, KV_HEADS), context)
    kept = attention.Kept(storage, lengths)
    rows = kept.rows()
    query = common.random_numbers(batch, QUERY_HEADS, HEAD_DIM)
    key, value = common.random_numbers(2, batch, KV_HEADS, HEAD_DIM)
    output = torch.full_like(query, torch.nan)
    sms = common.multiprocessors()
    kernel = PagedDecode(storage, PAGE, batch, KV_HEADS, GROUP, num_sms=sms)

    def run() -> None:
        kernel(query, key, value, output, rows, None, SCALE)

    run()
    wanted = attention.expected(
        query.view(-1, GROUP, HEAD_DIM), *kept.pages(), kept.table, lengths.flatten().tolist()
    )
    common.check("paged_decode", output.view_as(wanted), wanted)
    moved = int(lengths.sum()) * ENTRY_BYTES + nbytes(query, key, value, output, kept.table)
    return operation(f"paged_decode, {batch} requests, one layer", run, moved)


def show(
    operations: Sequence[Operation], times: dict[str, Times], bandwidth: float, context: int
) -> tuple[Table, list[Target]]:
    """A row per kernel, and the targets."""
    title = f"Triton kernels at {context} tokens; copies move {bandwidth / 1e9:,.0f} GB/s"
    columns = ("us [95 %]", "MB", "floor us", "times the floor [95 %]", "target")
    rows = table(title, ["kernel"], columns)
    targets = []
    for one in operations:
        name = one.contender.name
        ratio = one.times_floor(times[name], bandwidth)
        target = Target(name, ratio, TARGET, at_most=True)
        verdict = ("met" if target.met else "MISSED") if one.has_target else "-"
        if one.has_target:
            targets.append(target)
        moved = f"{one.moved / 1e6:,.1f}"
        rows.add_row(
            name, shown(times[name].us), moved, f"{1e6 * one.moved / bandwidth:.3g}", shown(ratio), verdict
        )
    return rows, targets


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = common.parser("kernels", __doc__, rounds=30)
    add(
        parser,
        ("context", whole, 32768, "tokens of each request"),
        ("layers", whole, LAYERS, "of the model"),
        ("append-batch", whole, 64, "requests of append_pages"),
        ("decode-batch", whole, 16, "requests of paged_decode"),
    )
    arguments = parser.parse_args(argv)
    if arguments.context % PAGE or BUDGET * arguments.context <= WINDOW:
        parser.error(f"--context must be a multiple of {PAGE} and above {WINDOW / BUDGET:g}")
    return arguments


def measure(arguments: argparse.Namespace, timer: common.Timer) -> common.Found:
    """All kernels in turns."""
    context, layers = arguments.context, arguments.layers
    bandwidth = common.copy_bandwidth(arguments.rounds, timer)
    operations = [
        writing(context),
        window(context, "mean"),
        window(context, "max"),
        window(context, "recent"),
        *searches(context, layers),
        *compactions(context, layers),
        appending(arguments.append_batch, context, layers),
        decoding(arguments.decode_batch, context),
    ]
    times = common.take_turns([one.contender for one in operations], arguments.rounds, timer)
    shown, targets = show(operations, times, bandwidth, context)
    kernels = [
        {
            "name": one.contender.name,
            "bytes": one.moved,
            "us": asdict(times[one.contender.name].us),
            "times_floor": asdict(one.times_floor(times[one.contender.name], bandwidth)),
            **asdict(times[one.contender.name]),
        }
        for one in operations
    ]
    results = {"bandwidth_GB_per_s": bandwidth / 1e9, "kernels": kernels}
    return common.Found(results, list(times.values()), targets, shown)


def main(argv: Sequence[str] | None = None) -> None:
    common.run("kernels", parse_arguments(argv), measure)


if __name__ == "__main__":
    main()
