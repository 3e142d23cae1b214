"""Attention of one new token per sequence over ragged pages, on a CPU."""

import ctypes

import torch
from torch import Tensor

from vllm_kvevict.kernels.build import load

_ARGUMENTS = [*[ctypes.c_void_p] * 5, ctypes.c_int64, *[ctypes.c_int] * 4, ctypes.c_float]
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def supports(dtype: torch.dtype, page_size: int, head_dim: int) -> bool:
    """Whether the kernel can read pages of this kind."""
    return dtype in DTYPES and page_size % 32 == 0 and head_dim % 32 == 0


class DecodeAttention:
    """The compiled kernel for one kind of pages.

    Args:
        pages: [pages, 2 * page_size * head_dim], contiguous. A page holds the keys of one KV head, transposed,
            [head_dim, page_size], then the values, [page_size, head_dim].
        page_size: entries per page.

    Raises:
        BuildError: the kernel cannot be compiled here.
    """

    def __init__(self, pages: Tensor, page_size: int):
        self.page_size = page_size
        self.pages = pages
        self._decode = getattr(load("decode_attention"), f"decode_attention_{DTYPES[pages.dtype]}")
        self._decode.argtypes, self._decode.restype = _ARGUMENTS, None

    def __call__(self, query: Tensor, output: Tensor, lengths: Tensor, tables: Tensor, scale: float) -> None:
        """Attend; softmax(scale * q k) v over each sequence's entries, in fp32.

        Args:
            query: [S, G, head_dim], the dtype of the pages: G query heads for each of S sequences.
            output: as the query and contiguous, filled in place.
            lengths: int32 [S], contiguous: entries of each sequence, at least one.
            tables: int32 [S, width], contiguous: pages of each sequence.
            scale: of the logits.
        """
        sequences, group, head_dim = query.shape
        query = query.contiguous()  # with one KV head it is a view of the projection's output
        self._decode(
            query.data_ptr(),
            output.data_ptr(),
            self.pages.data_ptr(),
            lengths.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            sequences,
            group,
            head_dim,
            self.page_size,
            scale,
        )


def reference(
    query: Tensor, pages: Tensor, page_size: int, lengths: Tensor, tables: Tensor, scale: float
) -> Tensor:
    """The same in plain torch, sequence by sequence; arguments as above. Returns fp32 [S, G, head_dim]."""
    head_dim = query.shape[-1]
    keys, values = pages.float().view(len(pages), 2, -1).unbind(1)
    outputs = []
    for q, length, table in zip(query.float(), lengths.tolist(), tables.long(), strict=True):
        mine = table[: -(-length // page_size)]
        k = keys[mine].view(-1, head_dim, page_size).transpose(1, 2).flatten(0, 1)[:length]
        v = values[mine].view(-1, head_dim)[:length]
        outputs.append((scale * q @ k.T).softmax(-1) @ v)
    return torch.stack(outputs)
