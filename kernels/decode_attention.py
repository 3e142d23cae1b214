"""Attention of one or a few new tokens per request over ragged pages, on a CPU."""

import ctypes
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_kvevict.kernels import processor
from vllm_kvevict.kernels.build import load
from vllm_kvevict.kernels.quantise import Quantised, fields, rotate, scaled_signs, widen

_MATRIX = [ctypes.c_void_p, ctypes.c_int64]
_ARGUMENTS = [
    *(_MATRIX * 6),
    *([ctypes.c_void_p] * 8),
    *([ctypes.c_int64] * 2),
    *([ctypes.c_int] * 5),
    ctypes.c_float,
]
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def supports(dtype: torch.dtype, page_size: int, head_dim: int) -> bool:
    """Whether the kernel can serve queries of this dtype on such pages: it handles two vectors of entries, or of dims,
    at a time.

    Raises:
        ValueError: see :func:`processor.level`.
    """
    block = 2 * processor.levels()[processor.level()].lanes
    return dtype in DTYPES and page_size % block == 0 and head_dim % block == 0


@dataclass(frozen=True)
class BatchRows:
    """The page tables that a call reads. A row is one KV head of one layer of a request.

    Attributes:
        arena: int32 [size], page ids.
        starts: int32 [request slots, rows], contiguous: place in the arena of each row's first page.
        lengths: int32 [request slots, rows], contiguous: entries of each row, with those of the new tokens.
        request_slots: int64 [R], the batch's requests.
        first: row of the layer's first KV head.
        new_tokens: int32 [R], of each request; None: one each. More than one where the kernel says it takes more.
    """

    arena: Tensor
    starts: Tensor
    lengths: Tensor
    request_slots: Tensor
    first: int
    new_tokens: Tensor | None = None


class DecodeAttention:
    """The compiled kernel for one kind of pages.

    Args:
        pages: [pages, page_elements], contiguous, with keys transposed (:mod:`vllm_kvevict.kernels.layout`); int8: as
            :mod:`vllm_kvevict.kernels.quantise` has them.
        page_size: entries per page.
        most_new_tokens: of a request in a call. Each token sees its own entry and those before it.
        dtype: of queries and output; None: that of the pages.

    Raises:
        BuildError: the kernel cannot be compiled here.
    """

    def __init__(
        self, pages: Tensor, page_size: int, most_new_tokens: int = 1, dtype: torch.dtype | None = None
    ):
        self.page_size = page_size
        self.most_new_tokens = most_new_tokens
        self.pages = pages
        suffix = "_int8" if pages.dtype == torch.int8 else ""
        self._decode = getattr(
            load("decode_attention"), f"decode_attention_{DTYPES[dtype or pages.dtype]}{suffix}"
        )
        self._decode.argtypes, self._decode.restype = _ARGUMENTS, None

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
        """Store the new entries as the last of their rows, and attend: softmax(scale * q k) v, in fp32.

        Args:
            query: [T, Hq, head_dim]; the tokens may lie apart, a token's heads may not.
            key, value: [T, Hkv, head_dim], likewise; for pages of int8 quantised, keys rotated, while queries are not.
                Hq / Hkv query heads share a KV head.
            output: as the query, filled in place for the tokens below.
            rows: of the batch, R requests with N new tokens.
            tokens: int64 [N], where among the T the new tokens are, request by request; None: the first N, in order.
            scale: of the logits.
        """
        if isinstance(key, Quantised) != (self.pages.dtype == torch.int8):
            raise ValueError(f"pages are {self.pages.dtype}, and entries are not like them")
        head_dim = query.shape[2]
        kv_heads = numbers(key).shape[1]
        self._decode(
            *matrices(query, key, value, output),
            *scales_and_signs(key, value),
            None if tokens is None else tokens.data_ptr(),
            None if rows.new_tokens is None else rows.new_tokens.data_ptr(),
            self.pages.data_ptr(),
            rows.arena.data_ptr(),
            rows.starts.data_ptr(),
            rows.lengths.data_ptr(),
            rows.request_slots.data_ptr(),
            rows.lengths.shape[1],
            rows.first,
            rows.request_slots.numel(),
            kv_heads,
            query.shape[1] // kv_heads,
            head_dim,
            self.page_size,
            scale,
        )


def reference(
    pages: Tensor,
    page_size: int,
    query: Tensor,
    key: Tensor | Quantised,
    value: Tensor | Quantised,
    output: Tensor,
    rows: BatchRows,
    tokens: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    keys_are_transposed: bool = True,
) -> None:
    """The same in plain torch, row by row; arguments as above. The output may have more precision than the pages.

    Requests with a negative slot are skipped, and their output is 0.

    Args:
        softcap: c > 0 turns each scaled logit z into c * tanh(z / c).
        keys_are_transposed: whether a page has its keys so, or in rows like its values.
    """
    stored: Any = page_fields(pages, page_size, keys_are_transposed)
    kv_heads = numbers(key).shape[1]
    group = query.shape[1] // kv_heads
    dtype = torch.promote_types(output.dtype, torch.float32)
    query = rotate(query.to(dtype)) if isinstance(key, Quantised) else query.to(dtype)
    requests = len(rows.request_slots)
    new_tokens = [1] * requests if rows.new_tokens is None else rows.new_tokens.tolist()
    places = iter(range(len(query)) if tokens is None else tokens.tolist())
    for request_slot, count in zip(rows.request_slots.tolist(), new_tokens, strict=True):
        mine = list(itertools.islice(places, count))
        if request_slot < 0:
            output[mine] = 0
            continue
        for head, (token_number, token) in itertools.product(range(kv_heads), enumerate(mine, 1)):
            row = rows.first + head
            start = int(rows.starts[request_slot, row])
            length = int(rows.lengths[request_slot, row]) - count + token_number
            table = rows.arena[start : start + -(-length // page_size)].long()
            last = table[-1], (length - 1) % page_size
            for field, new in zip(stored, (key, value), strict=True):
                field[last] = new[token, head]
            k, v = (widen(field[table], dtype).flatten(0, 1)[:length] for field in stored)
            group_heads = slice(head * group, (head + 1) * group)
            logits = scale * query[token, group_heads] @ k.T
            if softcap:
                logits = softcap * (logits / softcap).tanh()
            output[token, group_heads] = (logits.softmax(-1) @ v).to(output.dtype)


def numbers(entries: Tensor | Quantised) -> Tensor:
    """Keys or values as they are stored, without scales."""
    return entries.numbers if isinstance(entries, Quantised) else entries


def matrices(*matrices: Tensor | Quantised) -> list[int]:
    """Address and stride of each, as kernels take them. Raises ValueError where a token's heads lie apart."""
    arguments = []
    for matrix in map(numbers, matrices):
        if matrix.stride(2) != 1 or matrix.stride(1) != matrix.shape[2]:
            raise ValueError(f"a token's heads must lie side by side, got strides {matrix.stride()}")
        arguments += [matrix.data_ptr(), matrix.stride(0)]
    return arguments


def scales_and_signs(key: Tensor | Quantised, value: Tensor | Quantised) -> list[int | None]:
    """The arguments of kernels that follow matrices: where scales are, and the signs of the rotation.

    Raises ValueError where only one is quantised, or a token's scales lie apart.
    """
    if not isinstance(key, Quantised) or not isinstance(value, Quantised):
        if isinstance(key, Quantised) or isinstance(value, Quantised):
            raise ValueError("keys and values must be quantised alike")
        return [None, 0, None, 0, None]
    arguments: list[int | None] = []
    for scales in (key.scales, value.scales):
        if scales.stride(1) != 1:
            raise ValueError(f"a token's scales must lie side by side, got strides {scales.stride()}")
        arguments += [scales.data_ptr(), scales.stride(0)]
    return [*arguments, scaled_signs(key.numbers.shape[2]).data_ptr()]


def page_fields(
    pages: Tensor, page_size: int, keys_are_transposed: bool = True
) -> tuple[Tensor, Tensor] | tuple[Quantised, Quantised]:
    """Views of the keys and the values in pages, [pages, page_size, head_dim] each."""
    if pages.dtype == torch.int8:
        return fields(pages, page_size, keys_are_transposed)
    keys, values = pages.unflatten(1, (2, page_size, -1)).unbind(1)
    return keys.reshape(len(pages), keys.shape[2], page_size).mT if keys_are_transposed else keys, values
