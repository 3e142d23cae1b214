"""Find the largest keys of rows by a radix search, on a GPU: histograms of digits instead of a sort.

A key is compared digit by digit from the top, and a negative key's digits are those of an unsigned number whose sign
bit is flipped: larger digit, larger key. After a few digits only some keys of a row may still be its cut. They are
copied aside, and the search goes on among them. Where they are too many, as where most scores are equal, it goes on
among all keys.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FIRST = torch.iinfo(torch.int64).max  # a cut that no key of a score reaches
SHIFTS = (
    56,
    48,
    40,
    32,
    24,
    16,
    8,
    0,
)  # of the digits, one byte each, in the order in which they are compared
EARLY = 2  # digits counted among all keys: the sign and exponent of a score, and 7 bits of its mantissa
_PART = 16  # there is room aside for one key of so many
_BLOCK, _WARPS = 2048, 8  # keys that a program counts, and its warps
_GATHER_BLOCK, _GATHER_WARPS = 1024, 4


class Candidates(NamedTuple):
    """Of each row the keys that share the first digits with its cut.

    Attributes:
        keys: int64 [R, capacity], contiguous, in any order.
        sizes: int32 [R], how many there are. Where that exceeds the capacity, `keys` is of no use.
    """

    keys: Tensor
    sizes: Tensor


def order_keys(scores: Tensor, first: int = 0, total: int | None = None) -> Tensor:
    """Scores [H, m] of any floating dtype -> distinct int64 keys [H, m]; a larger key comes earlier in the order.

    The order is that of `vllm_kvevict.policies.select`, and so is every bit: the upper half of a key holds the
    score's fp32 bits, made monotonic, where -0.0 equals 0.0 and NaN equals -inf; the lower half counts down in
    position-major order. Row h is head first + h of `total` heads (default: H).
    """
    rows, m = scores.shape
    keys = torch.empty(rows, m, dtype=torch.int64, device=scores.device)
    if keys.numel():
        _order_keys[(triton.cdiv(m, 1024), rows)](
            scores, keys, m, scores.stride(0), scores.stride(1), first, total or rows, BLOCK=1024
        )
    return keys


def digit_counts(keys: Tensor, prefix: Tensor, shift: int, candidates: Candidates | None = None) -> Tensor:
    """How often each value of a digit occurs among the keys that share all higher digits with their row's prefix.

    Args:
        keys: int64 [R, N], the keys of a row side by side.
        prefix: int64 [R, 1], contiguous: the 56 - shift bits above the digit as a number, i.e. what `descend` gave for
            the previous shift. Only that many bits of it count, so none for the first digit.
        shift: place of the digit's lowest bit, one of `SHIFTS`.
        candidates: of `gather` for a higher digit; where they are of use they are counted instead of the keys.

    Returns:
        int64 [R, 256]. Of the first digit the highest bit is flipped, so that negative keys come last.
    """
    rows, n = keys.shape
    counts = torch.zeros(rows, 256, dtype=torch.int64, device=keys.device)
    if keys.numel():
        aside = (None, None, 0) if candidates is None else (*candidates, candidates.keys.shape[1])
        _digit_counts[(triton.cdiv(n, _BLOCK), rows)](
            keys, prefix, counts, n, keys.stride(0), *aside, shift, BLOCK=_BLOCK, num_warps=_WARPS
        )
    return counts


def descend(counts: Tensor, prefix: Tensor, missing: Tensor, shift: int) -> None:
    """Choose the digit in which each row's cut lies, in place.

    Args:
        counts: int64 [R, 256], contiguous: of `digit_counts` for the shift, over all ranks.
        prefix: int64 [R, 1], contiguous: gets the digit as its lowest bits, the others move up.
        missing: int64 [R, 1], contiguous: how many keys the row still wants of those that share the prefix; what
            larger digits hold is taken off.
        shift: as above.
    """
    if counts.numel():
        _descend[(counts.shape[0],)](counts, prefix, missing, shift, num_warps=4)


def gather(keys: Tensor, prefix: Tensor, shift: int) -> Candidates:
    """The keys that share all digits down to that of `shift` with their row's prefix, as `descend` left it."""
    rows, n = keys.shape
    capacity = max(n // _PART, 1024)
    found = Candidates(keys.new_empty(rows, capacity), keys.new_zeros(rows, dtype=torch.int32))
    if keys.numel():
        sizes = {"BLOCK": _GATHER_BLOCK, "num_warps": _GATHER_WARPS}
        _gather[(triton.cdiv(n, _GATHER_BLOCK), rows)](
            keys, prefix, *found, n, keys.stride(0), capacity, shift, **sizes
        )
    return found


def cuts(
    keys: Tensor,
    counts: Tensor | Sequence[int],
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The counts[r]-th largest key of each row: `keys >= cut` marks the counts[r] best.

    Args:
        keys: int64 [R, N]; equal keys count one by one.
        counts: R counts from 0 to N, on the host, or int64 on the device, which is then not waited for.
        sum_over_ranks: where every rank holds a part of each row: sums int64 [R, 256] over them. The counts refer to
            whole rows, and the cuts are the same on every rank.

    Returns:
        int64 [R, 1]; the largest int64 where the count is 0.
    """
    if not isinstance(counts, Tensor):
        counts = torch.tensor(counts, dtype=torch.int64)
    if keys.stride(1) != 1:
        keys = keys.contiguous()
    wanted = counts.to(keys.device, non_blocking=True)[:, None]
    missing = wanted.clone(memory_format=torch.contiguous_format)
    prefix = torch.zeros_like(missing)
    candidates = None
    for shift in SHIFTS:
        histogram = digit_counts(keys, prefix, shift, candidates)
        if sum_over_ranks is not None:
            histogram = sum_over_ranks(histogram)
        descend(histogram, prefix, missing, shift)
        if shift == SHIFTS[EARLY - 1]:
            candidates = gather(keys, prefix, shift)
    return torch.where(wanted == 0, FIRST, prefix)


def reference_order_keys(scores: Tensor, first: int = 0, total: int | None = None) -> Tensor:
    """`order_keys` in plain torch."""
    rows, m = scores.shape
    values = torch.where(scores.isnan(), -torch.inf, scores.float()) + 0.0  # the sum turns -0.0 into 0.0
    bits = values.view(torch.int32).long()
    sizes = bits & 0x7FFFFFFF
    ordered = torch.where(bits < 0, -sizes - 1, sizes)
    rank = torch.arange(m, device=scores.device) * (total or rows)
    rank = rank + first + torch.arange(rows, device=scores.device)[:, None]
    return ordered * 2**32 + (2**32 - 1 - rank)


def reference_digit_counts(keys: Tensor, prefix: Tensor, shift: int) -> Tensor:
    """`digit_counts` row by row."""
    counts = torch.zeros(len(keys), 256, dtype=torch.int64, device=keys.device)
    for row, above, out in zip(keys, prefix[:, 0].tolist(), counts, strict=True):
        for key in row.tolist():
            unsigned = key % 2**64
            if (unsigned >> shift >> 8) == above % 2 ** (56 - shift):
                out[(unsigned >> shift) % 256 ^ (0x80 if shift == 56 else 0)] += 1
    return counts


def reference_cuts(keys: Tensor, counts: Tensor | Sequence[int]) -> Tensor:
    """`cuts` by sorting."""
    wanted = torch.as_tensor(counts, dtype=torch.int64, device=keys.device)[:, None]
    best = keys.sort(dim=1, descending=True).values
    cut = best.gather(1, (wanted - 1).clamp(min=0))
    return torch.where(wanted == 0, FIRST, cut)


# Lengths differ from prompt to prompt: none may need a compilation of its own.
@triton.jit(do_not_specialize=["m", "row_stride", "first", "total"])
def _order_keys(scores, keys, m, row_stride, stride, first, total, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = position < m
    place = row.to(tl.int64) * row_stride + position.to(tl.int64) * stride
    # On integers only: what the hardware does with denormal numbers cannot matter.
    bits = tl.load(scores + place, mask=mask, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(size == 0, 0, ordered)
    ordered = tl.where(size > 0x7F800000, -0x7F800001, ordered)  # NaN: as -inf
    rank = position.to(tl.int64) * total + (first + row)
    key = (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - rank)
    tl.store(keys + row.to(tl.int64) * m + position, key, mask=mask)


@triton.jit(do_not_specialize=["n", "row_stride", "capacity", "shift"])
def _digit_counts(
    keys, prefix, counts, n, row_stride, aside, sizes, capacity, shift, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(1)
    keys += row.to(tl.int64) * row_stride
    if aside is not None:
        found = tl.load(sizes + row)
        fits = found <= capacity
        keys = tl.where(fits, aside + row.to(tl.int64) * capacity, keys)
        n = tl.where(fits, found, n)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) * BLOCK >= n:
        return
    key = tl.load(keys + place, mask=place < n, other=0) >> shift
    above = (key >> 8) ^ tl.load(prefix + row)
    inside = (place < n) & ((above & ((tl.full([], 1, tl.int64) << (56 - shift)) - 1)) == 0)
    digit = key.to(tl.int32) & 0xFF
    digit ^= tl.where(shift == 56, 0x80, 0)  # negative keys come last
    counted = tl.histogram(digit, 256, mask=inside)
    # The order of integer sums does not matter: the result is the same in every run.
    place = counts + row * 256 + tl.arange(0, 256)
    tl.atomic_add(place, counted.to(tl.int64), mask=counted > 0, sem="relaxed")


@triton.jit(do_not_specialize=["shift"])
def _descend(counts, prefix, missing, shift):
    row = tl.program_id(0)
    digits = tl.arange(0, 256)
    found = tl.load(counts + row * 256 + digits)
    wanted = tl.load(missing + row)
    above = tl.sum(found, 0) - tl.cumsum(found, 0)
    # The smallest digit with fewer keys above it than are wanted; the last one if none is wanted.
    digit = tl.minimum(tl.sum((above >= wanted).to(tl.int32), 0), 255)
    tl.store(missing + row, wanted - tl.sum(tl.where(digits == digit, above, 0), 0))
    digit ^= tl.where(shift == 56, 0x80, 0)
    tl.store(prefix + row, (tl.load(prefix + row) << 8) | digit)


@triton.jit(do_not_specialize=["n", "row_stride", "capacity", "shift"])
def _gather(keys, prefix, aside, sizes, n, row_stride, capacity, shift, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + row.to(tl.int64) * row_stride + place, mask=place < n, other=0)
    apart = ((key >> shift) ^ tl.load(prefix + row)) & ((tl.full([], 1, tl.int64) << (64 - shift)) - 1)
    inside = ((place < n) & (apart == 0)).to(tl.int32)
    count = tl.sum(inside, 0)
    if count > 0:
        # Where a program's keys lie among the others' differs from run to run; a histogram does not see it.
        rank = tl.atomic_add(sizes + row, count, sem="relaxed") + tl.cumsum(inside, 0) - 1
        target = aside + row.to(tl.int64) * capacity + rank
        tl.store(target, key, mask=(inside > 0) & (rank < capacity))
