"""What each earlier token receives of the attention of a request's last ones, read from the pages, on a GPU."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvevict.kernels.decode_attention import page_fields
from vllm_kvevict.kernels.quantise import rotate as rotate_reference
from vllm_kvevict.kernels.quantise import widen
from vllm_kvevict.kernels.rotate_and_round import rotate
from vllm_kvevict.kernels.write_entries import scales_of_keys

_SUMS, _SHARES = (256, 128, 4), (384, 64, 8)
"""Of the two kernels that read keys: programs, keys of a tile, and warps of a program (with few rows half of them). The
programs are about as many as a large GPU runs at once; they are not asked of the device, for the same sums everywhere.
"""
_LOG2E = tl.constexpr(math.log2(math.e))
_HALF_LIFE = tl.constexpr(12)  # of rows "recent", in tokens
_LOWEST = tl.constexpr(-1e30)  # below any logit, and finite: a row may see no key of a split


def window_attention(
    query: Tensor,
    storage: Tensor,
    page_size: int,
    table: Tensor,
    n: int,
    scale: float,
    softcap: float = 0.0,
    rows: str = "mean",
) -> Tensor:
    """What each of the first m = n - w tokens receives of the attention of the last w queries.

    The softmax is over all n keys, where a query sees the keys up to its own token, in fp32.

    Args:
        query: [w, Hq, head_dim], the dtype of the storage, unless that is int8: of the tokens n - w to n - 1. Tokens
            and heads may lie apart. w >= 1, practical up to 64. Hq / Hkv query heads share a KV head.
        storage: [pages, page_elements], contiguous, in rows (:mod:`vllm_kvevict.kernels.layout`).
        page_size: entries per page.
        table: int32 [Hkv, columns], rows may lie apart: the pages of each KV head, ceil(n / page_size) of them.
        n: entries of every KV head, at least w + 1. What lies behind them in the last page is not used.
        scale: factor of the logits.
        softcap: c in c * tanh(logit / c), or 0.
        rows: over the queries of a head, their "mean", their "max", or the "recent" maximum: a query counts half as
            much for each 12 tokens that it lies further back.

    Returns:
        fp32 [Hq, m].

    Raises:
        ValueError: dtypes or shapes do not fit, or `rows` is none of these.
    """
    _check(query, storage, table, n, rows)
    window, heads, _ = query.shape
    kv_heads, m, group = table.shape[0], n - window, heads // table.shape[0]
    if storage.dtype == torch.int8:
        query = rotate(query)
    sizes = {**_sizes(query, group, page_size), "PAGE_ELEMENTS": storage.shape[1]}
    blocks, lines = kv_heads * triton.cdiv(group, sizes["BLOCK_HEADS"]), sizes["BLOCK_HEADS"] * sizes["ROWS"]
    sums, shares = (_launched(*chosen[1:], query, lines) for chosen in (_SUMS, _SHARES))
    first = _split(n, sums["BLOCK_N"], blocks, _SUMS[0])
    second = _split(m, shares["BLOCK_N"], blocks, _SHARES[0])
    splits = triton.cdiv(n, first)
    shapes = (2, blocks, splits, lines), (blocks, lines), (heads, m)
    partial, offset, out = (query.new_empty(shape, dtype=torch.float32) for shape in shapes)
    where = (query, *query.stride()[:2], storage, table, table.stride(0), n, scale)
    kind = {**sizes, "SOFTCAP": float(softcap)}
    _row_sums[(blocks, splits)](*where, first, *partial, **kind, **sums)
    joined = {"WINDOW": window, "HOW": rows, "ROWS": sizes["ROWS"], "BLOCK_M": lines, "CHUNK": 32}
    _join[(blocks,)](*partial, offset, splits, **joined, num_warps=8)
    _combine[(blocks, triton.cdiv(m, second))](*where, second, offset, out, HOW=rows, **kind, **shares)
    return out


def reference(
    query: Tensor,
    storage: Tensor,
    page_size: int,
    table: Tensor,
    n: int,
    scale: float,
    softcap: float = 0.0,
    rows: str = "mean",
) -> Tensor:
    """The same in plain torch; arguments as above. The result has the dtype of the query, but at least fp32."""
    _check(query, storage, table, n, rows)
    window, heads, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    pages, _ = page_fields(storage, page_size, keys_are_transposed=False)
    keys = widen(pages[table[:, : -(-n // page_size)].long()], dtype).flatten(1, 2)[:, :n]
    keys = keys.repeat_interleave(heads // table.shape[0], 0)
    query = rotate_reference(query.to(dtype)) if storage.dtype == torch.int8 else query.to(dtype)
    logits = scale * torch.einsum("whd,hnd->hwn", query, keys)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    token = torch.arange(n, device=query.device)
    logits.masked_fill_(token > token[n - window :, None], -torch.inf)
    received = logits.softmax(-1)[:, :, : n - window]
    if rows == "mean":
        return received.mean(1)
    if rows == "recent":
        back = torch.arange(window - 1, -1, -1, device=query.device)
        received *= torch.exp2(-back / _HALF_LIFE.value)[:, None]
    return received.amax(1)


def _check(query: Tensor, storage: Tensor, table: Tensor, n: int, rows: str) -> None:
    if storage.dtype not in (query.dtype, torch.int8):
        raise ValueError(f"queries must have the pages' dtype {storage.dtype}, got {query.dtype}")
    if query.stride(2) != 1 or table.stride(1) != 1:
        raise ValueError("the elements of a query's head, and of a table's row, must be adjacent")
    if query.shape[1] % table.shape[0]:
        raise ValueError(f"{query.shape[1]} query heads cannot share {table.shape[0]} KV heads evenly")
    if n <= query.shape[0]:
        raise ValueError(f"{n} entries leave none before a window of {query.shape[0]}")
    if rows not in ("mean", "max", "recent"):
        raise ValueError(f"rows must be mean, max or recent, not {rows!r}")


def _sizes(query: Tensor, group: int, page_size: int) -> dict[str, int]:
    """What both kernels that read keys are compiled for; of a block, the padded rows of a head and the query heads."""
    window, _, head_dim = query.shape
    rows = triton.next_power_of_2(window)
    wide = query.dtype == torch.float32  # no tensor cores: a larger block would not fit the registers
    most = max(1, (32 if wide else 128 if head_dim <= 128 else 64) // rows)
    # A matrix product has at least 16 rows.
    heads = max(min(triton.next_power_of_2(group), most), 16 // rows)
    return {
        "WINDOW": window,
        "GROUP": group,
        "PAGE_SIZE": page_size,
        "HEAD_DIM": head_dim,
        "ROWS": rows,
        "BLOCK_HEADS": heads,
        "BLOCK_D": triton.next_power_of_2(head_dim),
    }


def _launched(block_n: int, warps: int, query: Tensor, lines: int) -> dict[str, int]:
    """How a kernel with some rows in a block is launched."""
    # So that the keys of all stages fit the shared memory of small GPUs.
    most = 32 if query.dtype == torch.float32 else 128 if query.shape[2] <= 128 else 64
    return {
        "BLOCK_N": min(block_n, most),
        "num_warps": warps if lines >= 128 else max(warps // 2, 4),
        "num_stages": 3,  # a tile needs its page ids, and they come from memory, too
    }


def _split(n: int, block_n: int, blocks: int, programs: int) -> int:
    """Keys of one program, a multiple of block_n, where each of `blocks` blocks of rows needs n keys."""
    tiles = triton.cdiv(n, block_n)
    return block_n * triton.cdiv(tiles, max(1, programs // blocks))


@triton.jit
def _load_queries(query, token_stride, head_stride, WINDOW, GROUP, HEAD_DIM, ROWS, BLOCK_HEADS, BLOCK_D):
    """The block's queries [BLOCK_HEADS * ROWS, BLOCK_D], head by head; zeros where there is none."""
    blocks: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    line = tl.arange(0, BLOCK_HEADS * ROWS)
    head = tl.program_id(0) % blocks * BLOCK_HEADS + line // ROWS
    row = line % ROWS
    d = tl.arange(0, BLOCK_D)[None, :]
    place = (
        row.to(tl.int64) * token_stride
        + (tl.program_id(0) // blocks * GROUP + head).to(tl.int64) * head_stride
    )
    exists = (row < WINDOW) & (head < GROUP)
    return tl.load(query + place[:, None] + d, mask=exists[:, None] & (d < HEAD_DIM), other=0.0)


@triton.jit
def _load_keys(storage, pages, key, n, PAGE_SIZE, HEAD_DIM, PAGE_ELEMENTS, BLOCK_D):
    """Some keys int32 [BLOCK_N] as [BLOCK_N, BLOCK_D], and their scales, 1.0 where they have none; `pages` is the
    table's row. Those from n on are 0."""
    page = tl.load(pages + key // PAGE_SIZE, mask=key < n, other=0).to(tl.int64)
    place = page * PAGE_ELEMENTS + key % PAGE_SIZE * HEAD_DIM
    d = tl.arange(0, BLOCK_D)[None, :]
    k = tl.load(storage + place[:, None] + d, mask=(key < n)[:, None] & (d < HEAD_DIM), other=0)
    if storage.dtype.element_ty == tl.int8:
        scales = scales_of_keys(storage, page, key % PAGE_SIZE, PAGE_SIZE, HEAD_DIM, PAGE_ELEMENTS)
        return k, tl.load(scales, mask=key < n, other=0.0)
    else:
        return k, 1.0


@triton.jit
def _logits(products, scale, SOFTCAP):
    """Logits, times log2(e), of products of queries and keys."""
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (1 + exp(2 x))
        logits = SOFTCAP - 2 * SOFTCAP / (1 + tl.exp2(products * (scale * (2 / SOFTCAP * _LOG2E))))
        return logits * _LOG2E
    return products * (scale * _LOG2E)


# Lengths differ from prompt to prompt: none may need a compilation of its own.
@triton.jit(do_not_specialize=["table_stride", "n", "per_split"])
def _row_sums(
    query,
    token_stride,
    head_stride,
    storage,
    table,
    table_stride,
    n,
    scale,
    per_split,
    maxima,
    sums,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Of each row the largest logit of a range of keys, and the sum of the exponentials relative to it."""
    blocks: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    q = _load_queries(query, token_stride, head_stride, WINDOW, GROUP, HEAD_DIM, ROWS, BLOCK_HEADS, BLOCK_D)
    pages = table + (tl.program_id(0) // blocks).to(tl.int64) * table_stride
    line = tl.arange(0, BLOCK_HEADS * ROWS)
    last = tl.minimum(n - WINDOW + line % ROWS, n - 1)  # the last key that a row sees
    highest = tl.full([BLOCK_HEADS * ROWS], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_HEADS * ROWS], tl.float32)
    start = tl.program_id(1) * per_split
    for first in range(start, tl.minimum(start + per_split, n), BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        k, scales = _load_keys(storage, pages, key, n, PAGE_SIZE, HEAD_DIM, PAGE_ELEMENTS, BLOCK_D)
        products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if storage.dtype.element_ty == tl.int8:
            products *= scales[None, :]
        logits = _logits(products, scale, SOFTCAP)
        if first + BLOCK_N > n - WINDOW:
            logits = tl.where(key[None, :] <= last[:, None], logits, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(logits - higher[:, None]), 1)
        highest = higher
    place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (BLOCK_HEADS * ROWS) + line
    tl.store(maxima + place, highest)
    tl.store(sums + place, total)


@triton.jit(do_not_specialize=["splits"])
def _join(
    maxima,
    sums,
    offset,
    splits,
    WINDOW: tl.constexpr,
    HOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Of each row what its logits exceed the logarithm of their parts of the result by, to the base 2."""
    line = tl.arange(0, BLOCK_M)
    top = tl.full([BLOCK_M], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, splits, CHUNK):
        split = first + tl.arange(0, CHUNK)[:, None]
        place = (tl.program_id(0) * splits + split) * BLOCK_M + line[None, :]
        part = tl.load(maxima + place, mask=split < splits, other=_LOWEST)
        part_sum = tl.load(sums + place, mask=split < splits, other=0.0)
        higher = tl.maximum(top, tl.max(part, 0))
        total = total * tl.exp2(top - higher) + tl.sum(part_sum * tl.exp2(part - higher[None, :]), 0)
        top = higher
    exceeds = top + tl.log2(total * (WINDOW if HOW == "mean" else 1))
    row = line % ROWS
    if HOW == "recent":
        exceeds += (WINDOW - 1 - row) / _HALF_LIFE
    # A row that only pads the window has no part.
    tl.store(offset + tl.program_id(0) * BLOCK_M + line, tl.where(row < WINDOW, exceeds, float("inf")))


@triton.jit(do_not_specialize=["table_stride", "n", "per_split"])
def _combine(
    query,
    token_stride,
    head_stride,
    storage,
    table,
    table_stride,
    n,
    scale,
    per_split,
    offset,
    out,
    HOW: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The probabilities of a range of keys before the window, which every row sees: their sum over the rows, or the
    largest of them, where rows that lie further back may count less."""
    blocks: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    q = _load_queries(query, token_stride, head_stride, WINDOW, GROUP, HEAD_DIM, ROWS, BLOCK_HEADS, BLOCK_D)
    kv_head = tl.program_id(0) // blocks
    pages = table + kv_head.to(tl.int64) * table_stride
    exceeds = tl.load(offset + tl.program_id(0) * (BLOCK_HEADS * ROWS) + tl.arange(0, BLOCK_HEADS * ROWS))
    head = tl.program_id(0) % blocks * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    m = n - WINDOW
    target = out + (kv_head * GROUP + head).to(tl.int64) * m
    start = tl.program_id(1) * per_split
    for first in range(start, tl.minimum(start + per_split, m), BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        k, scales = _load_keys(storage, pages, key, m, PAGE_SIZE, HEAD_DIM, PAGE_ELEMENTS, BLOCK_D)
        # [keys, rows], so that a thread holds all that it adds up.
        products = tl.dot(k.to(q.dtype), tl.trans(q), input_precision="ieee")
        if storage.dtype.element_ty == tl.int8:
            products *= scales[:, None]
        logits = _logits(products, scale, SOFTCAP)
        logarithms = tl.reshape(logits - exceeds[None, :], [BLOCK_N, BLOCK_HEADS, ROWS])
        received = tl.sum(tl.exp2(logarithms), 2) if HOW == "mean" else tl.exp2(tl.max(logarithms, 2))
        exists = (key < m)[:, None] & (head < GROUP)[None, :]
        tl.store(target[None, :] + key[:, None], received, mask=exists)
