"""Store new entries into the pages of their rows, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvevict.kernels.quantise import Quantised, write_reference

_ELEMENTS = 4096  # of the keys, and as many of the values, that one program copies


def write_entries(
    storage: Tensor,
    page_size: int,
    keys: Tensor | Quantised,
    values: Tensor | Quantised,
    entry_slots: Tensor,
) -> None:
    """Copy each token's key and value of every KV head into the pages, bit for bit, with their scales if they have any.

    Args:
        storage: [pages, page_elements], contiguous, in rows (:mod:`vllm_kvevict.kernels.layout`).
        page_size: entries per page.
        keys, values: [T, H, head_dim], the dtype of the storage, for int8 quantised; tokens and heads may lie apart.
        entry_slots: int64 [T * H], contiguous: page * page_size + place in the page, token by token, then head by head;
            negative: that entry is not stored. No place occurs twice.

    Raises:
        ValueError: the dtypes differ, or a head's elements are not adjacent.
    """
    (key, key_scales), (value, value_scales) = parts_of(keys, storage), parts_of(values, storage)
    _check(storage, key, value)
    heads, head_dim = key.shape[1:]
    if entry_slots.numel() == 0:
        return
    width = triton.next_power_of_2(head_dim)
    block = max(1, _ELEMENTS // width)
    _write_entries[(triton.cdiv(entry_slots.numel(), block),)](
        storage,
        key,
        value,
        entry_slots,
        entry_slots.numel(),
        *key.stride()[:2],
        *value.stride()[:2],
        key_scales,
        value_scales,
        PAGE_ELEMENTS=storage.shape[1],
        HEADS=heads,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        BLOCK=block,
        BLOCK_D=width,
    )


def reference(
    storage: Tensor,
    page_size: int,
    keys: Tensor | Quantised,
    values: Tensor | Quantised,
    entry_slots: Tensor,
) -> None:
    """The same in plain torch; arguments as above."""
    if isinstance(keys, Quantised) and isinstance(values, Quantised):
        write_reference(storage, page_size, keys, values, entry_slots, keys_are_transposed=False)
        return
    assert isinstance(keys, Tensor) and isinstance(values, Tensor)
    _check(storage, keys, values)
    pages = storage.view(storage.shape[0], 2, page_size, -1)
    stored = entry_slots >= 0
    page, place = entry_slots[stored] // page_size, entry_slots[stored] % page_size
    pages[page, 0, place] = keys.flatten(0, 1)[stored]
    pages[page, 1, place] = values.flatten(0, 1)[stored]


def parts_of(entries: Tensor | Quantised, pages: Tensor) -> tuple[Tensor, Tensor | None]:
    """Numbers, and scales in 8 bits. Raises ValueError where pages of this dtype have the other one."""
    if isinstance(entries, Quantised) != (pages.dtype == torch.int8):
        raise ValueError(f"pages have dtype {pages.dtype}, and entries are not like them")
    return (
        (entries.numbers, entries.scales.contiguous()) if isinstance(entries, Quantised) else (entries, None)
    )


def _check(storage: Tensor, keys: Tensor, values: Tensor) -> None:
    for tensor in (keys, values):
        if tensor.dtype != storage.dtype:
            raise ValueError(f"entries must have the pages' dtype {storage.dtype}, got {tensor.dtype}")
        if tensor.stride(2) != 1:
            raise ValueError(f"the elements of a head must be adjacent, got strides {tensor.stride()}")


@triton.jit
def scales_of_keys(
    pages, page, place, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_ELEMENTS: tl.constexpr
):
    """Pointers to the scales of keys, by page, int64, and place in it; those of the values lie PAGE_SIZE further."""
    floats = pages.to(tl.pointer_type(tl.float32))
    return floats + page * (PAGE_ELEMENTS // 4) + PAGE_SIZE * HEAD_DIM // 4 + place


# The number of entries differs from step to step: no step may wait for a compilation of its own.
@triton.jit(do_not_specialize=["entries"])
def _write_entries(
    storage,
    keys,
    values,
    entry_slots,
    entries,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_scales,
    value_scales,
    PAGE_ELEMENTS: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry_slot = tl.load(entry_slots + entry, mask=entry < entries, other=-1)
    token = (entry // HEADS).to(tl.int64)[:, None]
    head = (entry % HEADS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (entry_slot >= 0)[:, None] & (d < HEAD_DIM)
    key = tl.load(keys + token * key_token_stride + head * key_head_stride + d, mask=mask)
    value = tl.load(values + token * value_token_stride + head * value_head_stride + d, mask=mask)
    page = entry_slot // PAGE_SIZE
    place = entry_slot - page * PAGE_SIZE
    target = storage + (page * PAGE_ELEMENTS + place * HEAD_DIM)[:, None] + d
    tl.store(target, key, mask=mask)
    tl.store(target + (PAGE_ELEMENTS - PAGE_SIZE * HEAD_DIM), value, mask=mask)
    if key_scales is not None:
        scale = scales_of_keys(storage, page, place, PAGE_SIZE, HEAD_DIM, PAGE_ELEMENTS)
        stored = entry_slot >= 0
        tl.store(scale, tl.load(key_scales + entry, mask=stored), mask=stored)
        tl.store(scale + PAGE_SIZE, tl.load(value_scales + entry, mask=stored), mask=stored)
