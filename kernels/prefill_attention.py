"""Attention of many new tokens per request, behind nothing or behind a prefix in ragged pages, on a CPU."""

import ctypes
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_kvevict.kernels import processor
from vllm_kvevict.kernels.build import load
from vllm_kvevict.kernels.decode_attention import (
    DTYPES,
    BatchRows,
    matrices,
    numbers,
    page_fields,
    scales_and_signs,
)
from vllm_kvevict.kernels.quantise import Quantised, rotate, widen

_ARGUMENTS = [
    *([ctypes.c_void_p, ctypes.c_int64] * 6),
    *([ctypes.c_void_p] * 10),
    *([ctypes.c_int64] * 2),
    *([ctypes.c_int] * 5),
    *([ctypes.c_float] * 2),
]

FEWEST_TOKENS = 16
"""New tokens of a request for which the kernel is worth while: it packs all that they see."""


def supports(dtype: torch.dtype, page_size: int, head_dim: int) -> bool:
    """Whether the kernel can attend in this dtype, behind pages of this size: it packs pairs of entries.

    Raises:
        ValueError: see :func:`processor.level`.
    """
    lanes = processor.levels()[processor.level()].lanes
    return dtype in DTYPES and page_size % 2 == 0 and head_dim % lanes == 0


class PrefillAttention:
    """The compiled kernel for one dtype.

    Args:
        dtype: of queries and output; of keys, values and pages, too, where they are not quantised.
        pages: [pages, page_elements], contiguous, as of :class:`DecodeAttention`; None: no call has prefixes.
        page_size: entries per page.

    Raises:
        BuildError: the kernel cannot be compiled here.
    """

    def __init__(self, dtype: torch.dtype, pages: Tensor | None = None, page_size: int = 2):
        self.pages = pages
        self.page_size = page_size
        library, name = load("prefill_attention"), f"prefill_attention_{DTYPES[dtype]}"
        self._exact, self._quantised = (getattr(library, name), getattr(library, f"{name}_int8"))
        for function in (self._exact, self._quantised):
            function.argtypes, function.restype = _ARGUMENTS, None

    def __call__(
        self,
        query: Tensor,
        key: Tensor | Quantised,
        value: Tensor | Quantised,
        output: Tensor,
        new_tokens: Tensor,
        prefixes: BatchRows | None,
        tokens: Tensor | None,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        log_sums: Tensor | None = None,
    ) -> None:
        """Attend: softmax(scale * q k) v, in fp32 or, where the processor has that, on products of bfloat16.

        Each token sees the entries of its request's prefix, the new ones before its own, and its own. Sums are fp32,
        and a request's result does not depend on the rest of the batch.

        Args:
            query: [T, Hq, head_dim]; the tokens may lie apart, a token's heads may not.
            key, value: [T, Hkv, head_dim], likewise; with pages of int8 quantised, keys rotated, while queries are not.
                Hq / Hkv query heads share a KV head.
            output: as the query, filled in place for the tokens below.
            new_tokens: int32 [R], of each request, at least one.
            prefixes: rows whose last entries are the new ones, which need not be in the pages; None: no prefixes.
            tokens: int64 [N], where among the T the new tokens are, request by request; None: the first N, in order.
            scale: of the logits, positive.
            softcap: c > 0 turns each scaled logit z into c * tanh(z / c).
            sinks: fp32 [Hq], logits beside those of the keys, which take a share of the attention and give nothing.
            log_sums: fp32 [T, Hq], contiguous, filled with the logarithms of the sums of exponentials, sinks included.

        Raises:
            ValueError: heads that lie apart, entries unlike those in pages, or a scale that is not positive.
        """
        if scale <= 0:
            raise ValueError(f"the scale must be positive, got {scale}")
        kv_heads, head_dim = numbers(key).shape[1:]
        if prefixes is not None and self.pages is not None and self.pages.dtype != numbers(key).dtype:
            raise ValueError(f"pages are {self.pages.dtype}, and entries are not like them")
        prefill = self._quantised if isinstance(key, Quantised) else self._exact
        prefill(
            *matrices(query, key, value, output),
            *scales_and_signs(key, value),
            *map(_address, (log_sums, sinks, tokens, new_tokens)),
            *_rows(None if prefixes is None else self.pages, prefixes),
            new_tokens.numel(),
            kv_heads,
            query.shape[1] // kv_heads,
            head_dim,
            self.page_size,
            scale,
            softcap,
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rows(pages: Tensor | None, rows: BatchRows | None) -> Sequence[int | None]:
    """The arguments that say where prefixes are."""
    if rows is None:
        return [None] * 5 + [0, 0]
    tensors = (pages, rows.arena, rows.starts, rows.lengths, rows.request_slots)
    return [*map(_address, tensors), rows.lengths.shape[1], rows.first]


def reference(
    pages: Tensor | None,
    page_size: int,
    query: Tensor,
    key: Tensor | Quantised,
    value: Tensor | Quantised,
    output: Tensor,
    new_tokens: Tensor,
    prefixes: BatchRows | None,
    tokens: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    log_sums: Tensor | None = None,
) -> None:
    """The same in plain torch, head by head; arguments as above. The output may have more precision than the query."""
    dtype = torch.promote_types(output.dtype, torch.float32)
    group = query.shape[1] // numbers(key).shape[1]
    query = rotate(query.to(dtype)) if isinstance(key, Quantised) else query.to(dtype)
    places = iter(range(len(query)) if tokens is None else tokens.tolist())
    for request, count in enumerate(new_tokens.tolist()):
        mine = list(itertools.islice(places, count))
        for head in range(query.shape[1]):
            kv_head = head // group
            own = [widen(matrix[mine, kv_head], dtype) for matrix in (key, value)]
            before = _prefix(pages, page_size, prefixes, request, kv_head, count, dtype)
            keys, values = (torch.cat([x, y]) for x, y in zip(before, own, strict=True))
            logits = scale * query[mine, head] @ keys.T
            if softcap:
                logits = softcap * (logits / softcap).tanh()
            hidden = torch.ones(count, len(keys), dtype=torch.bool).triu(len(keys) - count + 1)
            logits = logits.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                logits = torch.cat([logits, sinks[head].to(dtype).expand(count, 1)], 1)
            output[mine, head] = (logits.softmax(-1)[:, : len(keys)] @ values).to(output.dtype)
            if log_sums is not None:
                log_sums[mine, head] = logits.logsumexp(-1).to(log_sums.dtype)


def _prefix(
    pages: Tensor | None,
    page_size: int,
    rows: BatchRows | None,
    request: int,
    head: int,
    new: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Keys and values [P, head_dim] of what is before a request's new entries in a row."""
    if pages is None or rows is None:
        return torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)
    request_slot, row = int(rows.request_slots[request]), rows.first + head
    length, start = int(rows.lengths[request_slot, row]) - new, int(rows.starts[request_slot, row])
    table = rows.arena[start : start + -(-length // page_size)].long()
    keys, values = page_fields(pages[table], page_size)
    return widen(keys, dtype).flatten(0, 1)[:length], widen(values, dtype).flatten(0, 1)[:length]
