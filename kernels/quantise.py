"""Entries in 8 bits: keys and values as int8 numbers, of which those of a head share a scale.

A scale is the largest magnitude / 127, at least 1e-6; numbers are rounded half away from zero, as vLLM's
``int8_per_token_head`` does. Keys are rotated first, so that no few dims rule the scale: by the signs and the Hadamard
matrix of vLLM's int4 mode, over blocks of as many dims as the largest power of two that divides head_dim. A rotation
keeps dot products, so queries are rotated instead of keys back.

Where an entry has NaN or inf, its scale is NaN or inf and its numbers are 0: whoever reads it gets NaN. A rotated key
with an inf can become NaN. :mod:`vllm_kvevict.kernels.layout` says what a page of them is.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_kvevict.kernels import processor
from vllm_kvevict.kernels.build import load

_ARGUMENTS: list[Any] = [ctypes.c_void_p, *[ctypes.c_int64] * 2, *[ctypes.c_int] * 2, *[ctypes.c_void_p] * 3]
_WRITE_ARGUMENTS: list[Any] = [*[ctypes.c_void_p] * 5, ctypes.c_int64, *[ctypes.c_int] * 2, ctypes.c_void_p]

MOST = 127
LEAST_SCALE = 1e-6
SCALE_BYTES = 4


@dataclass(frozen=True)
class Quantised:
    """Keys or values.

    Attributes:
        numbers: int8 [..., d].
        scales: fp32 [...].
    """

    numbers: Tensor
    scales: Tensor

    def __getitem__(self, index: Any) -> "Quantised":
        """Some of the tokens."""
        return Quantised(self.numbers[index], self.scales[index])

    def __setitem__(self, index: Any, new: "Quantised") -> None:
        self.numbers[index], self.scales[index] = new.numbers, new.scales


def rotate(x: Tensor, inverse: bool = False) -> Tensor:
    """Rotate vectors [..., d], or rotate them back; in fp32, or in fp64 if they are.

    The order of operations is fixed, so a vector's result depends on nothing else.
    """
    head_dim = x.shape[-1]
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    signs = scaled_signs(head_dim, x.device).to(x.dtype)
    if not inverse:
        x = x * signs
    half = 1
    while head_dim % (2 * half) == 0:
        first, second = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return x * signs if inverse else x


@functools.cache
def scaled_signs(head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """What dims are multiplied by before they are mixed: fp32 [head_dim], 1 / sqrt(block) with signs."""
    block = head_dim & -head_dim
    random = torch.Generator().manual_seed(0x9E3779B9)  # vLLM's
    signs = 2 * torch.bernoulli(torch.full((block,), 0.5), generator=random) - 1
    return (signs * block**-0.5).repeat(head_dim // block).to(device)


def quantise_reference(x: Tensor, is_rotated: bool) -> Quantised:
    """Quantise vectors [..., d], those that are to be rotated after that; plain torch."""
    x = rotate(x) if is_rotated else x.float()
    scales = (x.abs().amax(-1) / torch.tensor(float(MOST))).clamp(min=LEAST_SCALE)
    steps = x * scales.reciprocal().unsqueeze(-1)
    rounded = torch.where(steps >= 0, steps + 0.5, steps - 0.5).clamp(-MOST - 1, MOST)
    numbers = torch.where(scales.isfinite().unsqueeze(-1), rounded, 0).to(torch.int8)
    return Quantised(numbers, scales)


def dequantise(numbers: Tensor, scales: Tensor, dtype: torch.dtype, is_rotated: bool) -> Tensor:
    """Vectors [..., d] of numbers [..., d] and scales [...], rotated back where they were rotated; plain torch."""
    x = numbers.to(torch.promote_types(dtype, torch.float32)) * scales.unsqueeze(-1)
    return (rotate(x, inverse=True) if is_rotated else x).to(dtype)


def widen(entries: Tensor | Quantised, dtype: torch.dtype) -> Tensor:
    """Keys or values in this dtype; rotated keys stay so."""
    if isinstance(entries, Quantised):
        return dequantise(entries.numbers, entries.scales, dtype, is_rotated=False)
    return entries.to(dtype)


def fields(pages: Tensor, page_size: int, keys_are_transposed: bool = True) -> tuple[Quantised, Quantised]:
    """Views of what is in pages: keys and values, numbers [pages, page_size, d] and scales [pages, page_size]."""
    scale_bytes = SCALE_BYTES * page_size
    head_bytes = pages.shape[1] // 2 - scale_bytes
    keys, key_scales, value_scales, values = pages.split(
        [head_bytes, scale_bytes, scale_bytes, head_bytes], dim=1
    )
    by_token = (
        keys.unflatten(1, (-1, page_size)).mT if keys_are_transposed else keys.unflatten(1, (page_size, -1))
    )
    return (
        Quantised(by_token, key_scales.view(torch.float32)),
        Quantised(values.unflatten(1, (page_size, -1)), value_scales.view(torch.float32)),
    )


def write_reference(
    pages: Tensor,
    page_size: int,
    key: Quantised,
    value: Quantised,
    entry_slots: Tensor,
    keys_are_transposed: bool = True,
) -> None:
    """Write entries into their places in pages; plain torch.

    Args:
        pages: int8 [pages, page_bytes], contiguous.
        page_size: entries per page.
        key, value: numbers [N, d] or [T, H, d] with T * H = N, keys rotated.
        entry_slots: int64 [N], page * page_size + place in the page; negative: that entry is not stored.
    """
    stored = entry_slots >= 0
    page, place = entry_slots[stored] // page_size, entry_slots[stored] % page_size
    stored_fields = fields(pages, page_size, keys_are_transposed)
    for field, new in zip(stored_fields, (key, value), strict=True):
        field.numbers[page, place] = new.numbers.flatten(0, -2)[stored]
        field.scales[page, place] = new.scales.flatten()[stored]


class Quantiser:
    """Quantises, for one dtype.

    Args:
        dtype: of what it quantises, fp32 or bfloat16.

    Raises:
        BuildError: the kernel cannot be compiled here.
        ValueError: another dtype.
    """

    def __init__(self, dtype: torch.dtype):
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"only fp32 or bfloat16 can be quantised, got {dtype}")
        self.dtype = dtype
        self._lanes = processor.levels()[processor.level()].lanes
        self._quantise = getattr(load("quantise"), f"quantise_{str(dtype).removeprefix('torch.')}")
        self._quantise.argtypes, self._quantise.restype = _ARGUMENTS, None

    def __call__(self, x: Tensor, is_rotated: bool) -> Quantised:
        """As :func:`quantise_reference`, bit for bit; x [T, H, d]; tokens may lie apart, a token's heads may not.

        Raises:
            ValueError: heads that lie apart, another dtype, or a head_dim that is not a multiple of a vector.
        """
        tokens, heads, head_dim = x.shape
        if x.stride(2) != 1 or x.stride(1) != head_dim:
            raise ValueError(f"a token's heads must lie side by side, got strides {x.stride()}")
        if x.dtype != self.dtype or head_dim % self._lanes:
            raise ValueError(
                f"vectors must be {self.dtype}, of a multiple of {self._lanes} dims; got {x.dtype} of {head_dim}"
            )
        new = Quantised(torch.empty(x.shape, dtype=torch.int8), torch.empty(tokens, heads))
        signs = scaled_signs(head_dim).data_ptr() if is_rotated else None
        where = signs, new.numbers.data_ptr(), new.scales.data_ptr()
        self._quantise(x.data_ptr(), x.stride(0), tokens, heads, head_dim, *where)
        return new


def write_entries(
    pages: Tensor, page_size: int, key: Quantised, value: Quantised, entry_slots: Tensor
) -> None:
    """As :func:`write_reference`, compiled.

    Raises:
        BuildError: the kernel cannot be compiled here.
    """
    write = load("quantise").write_entries
    write.argtypes, write.restype = _WRITE_ARGUMENTS, None
    tensors = [key.numbers, key.scales, value.numbers, value.scales, entry_slots]
    tensors = [tensor.contiguous() for tensor in tensors]
    count, head_dim = entry_slots.numel(), key.numbers.shape[-1]
    write(*(tensor.data_ptr() for tensor in tensors), count, head_dim, page_size, pages.data_ptr())
