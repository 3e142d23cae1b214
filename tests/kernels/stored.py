"""Rows of requests in random pages, as kernels that attend are given them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_kvevict.kernels.decode_attention import BatchRows
from vllm_kvevict.kernels.quantise import Quantised, quantise_reference, write_reference

IN_8_BITS = (torch.float32, torch.int8), (torch.bfloat16, torch.int8)
"""Dtypes of queries and pages."""
Lengths = Sequence[Sequence[int]]
"""Of the requests' heads."""


def place(lengths: Lengths, page_size: int, random: torch.Generator, layer: int = 1) -> BatchRows:
    """Tables of rows of these lengths in one of two layers: pages in random order, slots that are not in order."""
    requests, heads = len(lengths), len(lengths[0])
    slots = torch.randperm(requests + 2, generator=random)[:requests]
    first = layer * heads
    own = torch.zeros(requests + 2, 2 * heads, dtype=torch.int32)
    own[slots, first : first + heads] = torch.tensor(lengths, dtype=torch.int32)
    widths = -(-own // page_size)
    starts = (widths.flatten().cumsum(0).view_as(widths) - widths).int()
    arena = torch.randperm(int(widths.sum()), generator=random).int()
    return BatchRows(arena, starts, own, slots, first)


def forget(rows: BatchRows, written: Lengths, *parts: Tensor) -> None:
    """Make NaN of what is behind so many entries of each row, in parts of all pages, [pages, page_size, ...] each."""
    page_size = parts[0].shape[1]
    for slot, of_request in zip(rows.request_slots.tolist(), written, strict=True):
        for row, count in enumerate(of_request, rows.first):
            for column in range(count // page_size, -(-int(rows.lengths[slot, row]) // page_size)):
                page = rows.arena[rows.starts[slot, row] + column]
                for part in parts:
                    part[page, max(count - column * page_size, 0) :] = torch.nan


def without_last(lengths: Lengths) -> Lengths:
    """One entry fewer in each row."""
    return [[length - 1 for length in of_request] for of_request in lengths]


def in_8_bits(keys: Tensor, values: Tensor) -> tuple[Quantised, Quantised]:
    """Entries as pages of int8 have them."""
    return quantise_reference(keys, True), quantise_reference(values, False)


def make_pages(dtype: torch.dtype, keys: Tensor, values: Tensor, rows: BatchRows, written: Lengths) -> Tensor:
    """Pages that hold keys and values [pages, page_size, d], or NaN behind so many entries of each row.

    In 8 bits, scales are NaN there.
    """
    forget(rows, written, keys, values)
    if dtype == torch.int8:
        return pages_in_8_bits(keys, values, keys_are_transposed=True)
    return torch.cat([keys.mT.flatten(1), values.flatten(1)], 1).to(dtype)


def pages_in_8_bits(keys: Tensor, values: Tensor, keys_are_transposed: bool = False) -> Tensor:
    """Pages that hold keys and values [pages, page_size, d]."""
    count, page_size, head_dim = keys.shape
    pages = torch.empty(count, page_size * (2 * head_dim + 8), dtype=torch.int8)
    slots = torch.arange(count * page_size)
    write_reference(pages, page_size, *in_8_bits(keys, values), slots, keys_are_transposed)
    return pages
