"""Attention of one new token per request over ragged pages, on a GPU.

A row (one KV head of a request) is cut into parts, which programs attend to side by side; then the parts are combined.
Where it is cut depends on its length alone, so a request's result does not depend on the batch. All that changes from
step to step is read on the device, so calls can be recorded in a CUDA graph and replayed.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvevict.kernels import decode_attention
from vllm_kvevict.kernels.decode_attention import BatchRows
from vllm_kvevict.kernels.quantise import SCALE_BYTES, Quantised
from vllm_kvevict.kernels.rotate_and_round import rotate
from vllm_kvevict.kernels.write_entries import parts_of, scales_of_keys

_LOG2E = tl.constexpr(1.4426950408889634)
_SHORTEST_PART = tl.constexpr(256)  # entries; less is not worth another program
_PER_SM = 16  # programs for each multiprocessor
_WORKSPACE_BYTES = 128 << 20
_TILE_BYTES = 16 << 10


@triton.jit
def _part_length(length, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Entries of each part but the last of a row, a multiple of BLOCK; at most PARTS parts."""
    return tl.cdiv(tl.maximum(tl.cdiv(length, PARTS), _SHORTEST_PART), BLOCK) * BLOCK


@triton.jit
def _first_page(arena, starts, row, BY_ADDRESS: tl.constexpr):
    """Pointer to the first page id of a row."""
    if BY_ADDRESS:
        arena = tl.load(arena).to(tl.pointer_type(tl.int32))
    return arena + tl.load(starts + row)


@triton.jit
def _token(tokens, request):
    """The token of a request, int64, so that its offset may exceed 2^31 elements."""
    if tokens is None:
        return request.to(tl.int64)
    else:
        return tl.load(tokens + request)


@triton.jit(do_not_specialize=["first"])
def _store(
    pages,
    key,
    key_token,
    key_head,
    value,
    value_token,
    value_head,
    key_scales,
    value_scales,
    arena,
    starts,
    lengths,
    num_rows,
    request_slots,
    first,
    tokens,
    PAGE_ELEMENTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BY_ADDRESS: tl.constexpr,
):
    request, head = tl.program_id(0), tl.program_id(1)
    request_slot = tl.load(request_slots + request)
    if request_slot < 0:
        return
    row = request_slot * num_rows + first + head
    last = tl.load(lengths + row) - 1
    page = tl.load(_first_page(arena, starts, row, BY_ADDRESS) + last // PAGE_SIZE).to(tl.int64)
    token = _token(tokens, request)
    dim = tl.arange(0, BLOCK_D)
    mask = dim < HEAD_DIM
    entry = pages + page * PAGE_ELEMENTS + last % PAGE_SIZE * HEAD_DIM + dim
    tl.store(entry, tl.load(key + token * key_token + head * key_head + dim, mask=mask), mask=mask)
    new_value = tl.load(value + token * value_token + head * value_head + dim, mask=mask)
    tl.store(entry + (PAGE_ELEMENTS - PAGE_SIZE * HEAD_DIM), new_value, mask=mask)
    if key_scales is not None:
        scale = scales_of_keys(pages, page, last % PAGE_SIZE, PAGE_SIZE, HEAD_DIM, PAGE_ELEMENTS)
        new = token * tl.num_programs(1) + head
        tl.store(scale, tl.load(key_scales + new))
        tl.store(scale + PAGE_SIZE, tl.load(value_scales + new))


@triton.jit
def _attend_to_part(
    pages,
    table,
    begin,
    end,
    q,
    scale,
    softcap,
    BLOCK_G: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Largest logit, total of the weights relative to it, and sums of the values by them, of entries begin to end."""
    dim = tl.arange(0, BLOCK_D)
    # The first block holds an entry, so the maximum is finite from then on.
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for block in range(begin, end, BLOCK_N):
        entry = block + tl.arange(0, BLOCK_N)
        page = tl.load(table + entry // PAGE_SIZE, mask=entry < end, other=0).to(tl.int64)
        place = page * PAGE_ELEMENTS + entry % PAGE_SIZE * HEAD_DIM
        keys = pages + place[:, None] + dim[None, :]
        # What lies behind the last entry may be NaN, which a weight of 0 would not undo.
        mask = (entry < end)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(keys, mask=mask, other=0).to(q.dtype)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if pages.dtype.element_ty == tl.int8:
            scales = scales_of_keys(pages, page, entry % PAGE_SIZE, PAGE_SIZE, HEAD_DIM, PAGE_ELEMENTS)
            logits *= tl.load(scales, mask=entry < end, other=0)[None, :]
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + exp(2 x))
            logits = softcap - 2 * softcap / (1 + tl.exp(2 * logits / softcap))
        logits = tl.where((entry < end)[None, :], logits * _LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - new_top[:, None])
        fade = tl.exp2(top - new_top)
        top = new_top
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(keys + (PAGE_ELEMENTS - PAGE_SIZE * HEAD_DIM), mask=mask, other=0).to(q.dtype)
        if pages.dtype.element_ty == tl.int8:
            weights *= tl.load(scales + PAGE_SIZE, mask=entry < end, other=0)[None, :]
        sums = tl.dot(weights.to(q.dtype), v, sums * fade[:, None], input_precision="ieee")
    return top, total, sums


@triton.jit(do_not_specialize=["first"])
def _attend(
    pages,
    query,
    query_token,
    query_head,
    partial,
    log_sums,
    arena,
    starts,
    lengths,
    num_rows,
    request_slots,
    first,
    tokens,
    scale,
    softcap,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BY_ADDRESS: tl.constexpr,
):
    request, head = tl.program_id(0), tl.program_id(1)
    request_slot = tl.load(request_slots + request)
    row = request_slot * num_rows + first + head
    length = tl.load(lengths + row, mask=request_slot >= 0, other=0)
    part_length = _part_length(length, PARTS, BLOCK_N)
    if tl.program_id(2) * part_length >= length:
        return
    table = _first_page(arena, starts, row, BY_ADDRESS)

    member = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    q_mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_heads = (head * GROUP + member) * query_head
    q = tl.load(
        query + _token(tokens, request) * query_token + q_heads[:, None] + dim[None, :], mask=q_mask, other=0
    )
    for part in range(tl.program_id(2), tl.cdiv(length, part_length), tl.num_programs(2)):
        end = tl.minimum((part + 1) * part_length, length)
        top, total, sums = _attend_to_part(
            pages, table, part * part_length, end, q, scale, softcap,
            BLOCK_G, PAGE_ELEMENTS, PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, SOFTCAP,
        )  # fmt: skip
        # [R, Hq, PARTS], and as many entries.
        place = ((request * tl.num_programs(1) + head) * GROUP + member) * PARTS + part
        tl.store(log_sums + place, top + tl.log2(total), mask=member < GROUP)
        out = partial + place.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out, sums / total[:, None], mask=q_mask)


@triton.jit(do_not_specialize=["first"])
def _combine(
    output,
    output_token,
    output_head,
    partial,
    log_sums,
    lengths,
    num_rows,
    request_slots,
    first,
    tokens,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
):
    request, head = tl.program_id(0), tl.program_id(1)  # a query head
    request_slot = tl.load(request_slots + request)
    row = request_slot * num_rows + first + head // GROUP
    length = tl.load(lengths + row, mask=request_slot >= 0, other=0)
    used = tl.cdiv(length, _part_length(length, PARTS, BLOCK_N))
    part = tl.arange(0, PARTS)
    dim = tl.arange(0, BLOCK_D)
    place = (request * tl.num_programs(1) + head) * PARTS + part
    log_sum = tl.load(log_sums + place, mask=part < used, other=float("-inf"))
    # A request that is skipped has no parts; its result is 0.
    weights = tl.exp2(log_sum - tl.where(used > 0, tl.max(log_sum, 0), 0))
    mask = (part < used)[:, None] & (dim < HEAD_DIM)[None, :]
    parts = tl.load(partial + place.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0)
    result = tl.sum(weights[:, None] * parts, 0) / tl.where(used > 0, tl.sum(weights, 0), 1)
    out = output + _token(tokens, request) * output_token + head * output_head + dim
    tl.store(out, result.to(output.dtype.element_ty), mask=dim < HEAD_DIM)


class PagedDecode:
    """The kernels for one kind of pages, and their workspace.

    A call allocates nothing and waits for nothing, and its launches depend on the host values and shapes of its
    arguments only. Kernels are compiled by the first call of their kind, which must not be recorded in a CUDA graph.

    Args:
        pages: [pages, page_elements], contiguous, fp32, bf16, fp16 or int8, in rows
            (:mod:`vllm_kvevict.kernels.layout`).
        page_size: entries per page.
        max_requests: the largest batch.
        num_kv_heads: KV heads of a layer.
        group: query heads per KV head.
        softcap: c > 0 turns each scaled logit z into c * tanh(z / c).
        num_sms: multiprocessors of the device.
        dtype: of queries and output; None: that of the pages.

    Attributes:
        arena_address: int64 [1], where the arena lies that :meth:`set_arena` was last given.
        most_new_tokens: of a request in a call.
    """

    most_new_tokens = 1

    def __init__(
        self,
        pages: Tensor,
        page_size: int,
        max_requests: int,
        num_kv_heads: int,
        group: int,
        softcap: float = 0.0,
        num_sms: int = 132,
        dtype: torch.dtype | None = None,
    ):
        self.pages, self.page_size, self.max_requests = pages, page_size, max_requests
        self.num_kv_heads, self.group, self.softcap = num_kv_heads, group, softcap
        scales = 2 * SCALE_BYTES if pages.dtype == torch.int8 else 0
        self.head_dim = (pages.shape[1] // page_size - scales) // 2
        self.dtype = dtype or pages.dtype
        self.block_d = triton.next_power_of_2(self.head_dim)
        self.block_n = min(max(_TILE_BYTES // (self.block_d * self.dtype.itemsize), 16), 64)
        self.num_sms = num_sms
        heads = max_requests * num_kv_heads * group
        self.parts = _parts(num_kv_heads, num_sms, heads * self.head_dim * 4)
        self.arena_address = torch.zeros(1, dtype=torch.int64, device=pages.device)
        self._arena: Tensor | None = None
        self._partial = pages.new_empty(heads * self.parts * self.head_dim, dtype=torch.float32)
        self._log_sums = pages.new_empty(heads * self.parts, dtype=torch.float32)
        self._rotated = pages.new_empty(
            max_requests, num_kv_heads * group, self.head_dim if scales else 0, dtype=self.dtype
        )

    def set_arena(self, arena: Tensor) -> None:
        """Say where the arena, int32 [size], lies from now on, for calls whose ``rows.arena`` is :attr:`arena_address`;
        it is kept alive."""
        self.arena_address.fill_(arena.data_ptr())
        self._arena = arena

    def __call__(
        self,
        query: Tensor,
        key: Tensor | Quantised,
        value: Tensor | Quantised,
        output: Tensor,
        rows: BatchRows,
        tokens: Tensor | None,
        scale: float,
    ) -> None:
        """Store each request's new entry as the last of its rows, and attend: softmax(scale * q k) v, in fp32.

        A request whose request slot is negative is skipped: nothing is read or stored for it, and its output is 0.

        Args:
            query: [T, Hq, head_dim], of this dtype; tokens and heads may lie apart.
            key, value: [T, Hkv, head_dim], likewise; for pages of int8 quantised, keys rotated, while queries are not.
                Hq / Hkv query heads share a KV head.
            output: as the query, filled in place for the tokens below.
            rows: of the batch, R requests; the arena may be :attr:`arena_address` instead.
            tokens: int64 [R], of each request its token among the T, no two the same; None: the first R, in order.
            scale: of the logits.

        Raises:
            ValueError: more than max_requests requests, other numbers of heads than announced, or an entry whose
                elements lie apart, or that is quantised where pages are not, or the other way round.
        """
        requests = rows.request_slots.numel()
        (keys, key_scales), (values, value_scales) = parts_of(key, self.pages), parts_of(value, self.pages)
        self._check(requests, query, keys, values, output)
        if not requests:
            return
        of_rows = rows.lengths, rows.lengths.shape[1], rows.request_slots, rows.first
        where = (*of_rows, tokens)
        self._store(keys, values, (key_scales, value_scales), rows, where)
        if key_scales is None:
            self._attend(query, rows, where, scale)
        else:
            rotated = rotate(query, tokens, self._rotated[:requests])
            self._attend(rotated, rows, (*of_rows, None), scale)
        self._combine(output, where)

    def _check(self, requests: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        kv_heads, heads = self.num_kv_heads, self.num_kv_heads * self.group
        if requests > self.max_requests:
            raise ValueError(f"{requests} requests, but there is a workspace for {self.max_requests}")
        for matrix, expected in ((query, heads), (key, kv_heads), (value, kv_heads), (output, heads)):
            if matrix.shape[1:] != (expected, self.head_dim) or matrix.stride(2) != 1:
                raise ValueError(
                    f"expected [tokens, {expected}, {self.head_dim}] with elements side by side, got shape "
                    f"{list(matrix.shape)}, strides {matrix.stride()}"
                )

    def _store(self, key: Tensor, value: Tensor, scales: tuple, rows: BatchRows, where: tuple) -> None:
        """Store the new entries; ``where`` says of each request which rows it has and which token is new."""
        _store[rows.request_slots.numel(), self.num_kv_heads](
            self.pages,
            key,
            *key.stride()[:2],
            value,
            *value.stride()[:2],
            *scales,
            rows.arena,
            rows.starts,
            *where,
            PAGE_ELEMENTS=self.pages.shape[1],
            PAGE_SIZE=self.page_size,
            HEAD_DIM=self.head_dim,
            BLOCK_D=self.block_d,
            BY_ADDRESS=rows.arena.dtype == torch.int64,
            num_warps=1,
        )

    def _attend(self, query: Tensor, rows: BatchRows, where: tuple, scale: float) -> None:
        """Attend to every part of the rows, into the workspace."""
        requests = rows.request_slots.numel()
        _attend[requests, self.num_kv_heads, self._programs(requests)](
            self.pages,
            query,
            *query.stride()[:2],
            self._partial,
            self._log_sums,
            rows.arena,
            rows.starts,
            *where,
            scale,
            self.softcap,
            GROUP=self.group,
            BLOCK_G=max(triton.next_power_of_2(self.group), 16),
            PAGE_ELEMENTS=self.pages.shape[1],
            PAGE_SIZE=self.page_size,
            HEAD_DIM=self.head_dim,
            BLOCK_D=self.block_d,
            BLOCK_N=self.block_n,
            PARTS=self.parts,
            SOFTCAP=self.softcap > 0,
            BY_ADDRESS=rows.arena.dtype == torch.int64,
            # Page ids, then keys and values: with fewer stages no block would be on its way while one is attended to.
            num_stages=4,
        )

    def _combine(self, output: Tensor, where: tuple) -> None:
        """Combine the parts of the workspace into the output."""
        _combine[where[2].numel(), self.num_kv_heads * self.group](
            output,
            *output.stride()[:2],
            self._partial,
            self._log_sums,
            *where,
            GROUP=self.group,
            HEAD_DIM=self.head_dim,
            BLOCK_D=self.block_d,
            BLOCK_N=self.block_n,
            PARTS=self.parts,
        )

    def _programs(self, requests: int) -> int:
        """Programs per row, which take its parts in turn: far more than fill the device if all rows are long.

        Most rows are short and leave programs without work. That costs little, and spare ones spread the parts of a
        row that is much longer than the others.
        """
        wanted = triton.cdiv(_PER_SM * self.num_sms, requests * self.num_kv_heads)
        return min(max(wanted, 4), self.parts)


def _parts(num_kv_heads: int, num_sms: int, part_bytes: int) -> int:
    """The most parts of a row: one request then gives each multiprocessor two, if the workspace stays small."""
    parts = 64
    while parts > 4 and (parts * num_kv_heads > 2 * num_sms or parts * part_bytes > _WORKSPACE_BYTES):
        parts //= 2
    return parts


reference = partial(decode_attention.reference, keys_are_transposed=False)
"""The same in plain torch, row by row: (pages, page_size, query, key, value, output, rows, tokens, scale, softcap=0.0),
where the arena is page ids."""
