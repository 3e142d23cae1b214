"""Store new entries into the pages of their rows, on a GPU."""

import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096  # of the keys, and as many of the values, that one program copies


def write_entries(storage: Tensor, page_size: int, keys: Tensor, values: Tensor, entry_slots: Tensor) -> None:
    """Copy each token's key and value of every KV head into the pages, bit for bit.

    Args:
        storage: [pages, page_elements], contiguous, in rows (:mod:`vllm_kvevict.kernels.layout`).
        page_size: entries per page.
        keys, values: [T, H, head_dim], the dtype of the storage; tokens and heads may lie apart.
        entry_slots: int64 [T * H], contiguous: page * page_size + place in the page, token by token, then head by head;
            negative: that entry is not stored. No place occurs twice.

    Raises:
        ValueError: the dtypes differ, or a head's elements are not adjacent.
    """
    _check(storage, keys, values)
    heads, head_dim = keys.shape[1:]
    if entry_slots.numel() == 0:
        return
    width = triton.next_power_of_2(head_dim)
    block = max(1, _ELEMENTS // width)
    _write_entries[(triton.cdiv(entry_slots.numel(), block),)](
        storage,
        keys,
        values,
        entry_slots,
        entry_slots.numel(),
        *keys.stride()[:2],
        *values.stride()[:2],
        HEADS=heads,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        BLOCK=block,
        BLOCK_D=width,
    )


def reference(storage: Tensor, page_size: int, keys: Tensor, values: Tensor, entry_slots: Tensor) -> None:
    """The same in plain torch; arguments as above."""
    _check(storage, keys, values)
    pages = storage.view(storage.shape[0], 2, page_size, -1)
    stored = entry_slots >= 0
    page, place = entry_slots[stored] // page_size, entry_slots[stored] % page_size
    pages[page, 0, place] = keys.flatten(0, 1)[stored]
    pages[page, 1, place] = values.flatten(0, 1)[stored]


def _check(storage: Tensor, keys: Tensor, values: Tensor) -> None:
    for tensor in (keys, values):
        if tensor.dtype != storage.dtype:
            raise ValueError(f"entries must have the pages' dtype {storage.dtype}, got {tensor.dtype}")
        if tensor.stride(2) != 1:
            raise ValueError(f"the elements of a head must be adjacent, got strides {tensor.stride()}")


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
    place = page * (2 * PAGE_SIZE * HEAD_DIM) + (entry_slot - page * PAGE_SIZE) * HEAD_DIM
    target = storage + place[:, None] + d
    tl.store(target, key, mask=mask)
    tl.store(target + PAGE_SIZE * HEAD_DIM, value, mask=mask)
