"""Entries in 8 bits on a GPU: what :mod:`vllm_kvevict.kernels.quantise` does to vectors, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvevict.kernels.quantise import LEAST_SCALE, MOST, Quantised, scaled_signs

_ELEMENTS = 2048  # of the vectors of one program
_MOST, _LEAST_SCALE = tl.constexpr(float(MOST)), tl.constexpr(LEAST_SCALE)


def quantise(x: Tensor, is_rotated: bool) -> Quantised:
    """As :func:`vllm_kvevict.kernels.quantise.quantise_reference`, bit for bit; x [T, H, d]: tokens and heads may lie
    apart, a head's elements may not."""
    new = Quantised(x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:2], dtype=torch.float32))
    _launch(x, None, is_rotated, new.numbers, new.scales)
    return new


def rotate(x: Tensor, tokens: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Vectors rotated, in their dtype: [N, H, d], of x [T, H, d] as above.

    Args:
        tokens: int64 [N], which of the T; None: the first ones, in order.
        out: [N, H, d], contiguous, filled in place; None: a new one for all T.
    """
    out = x.new_empty(x.shape) if out is None else out
    _launch(x, tokens, True, out, None)
    return out


def _launch(x: Tensor, tokens: Tensor | None, is_rotated: bool, out: Tensor, scales: Tensor | None) -> None:
    if x.stride(2) != 1:
        raise ValueError(f"the elements of a head must be adjacent, got strides {x.stride()}")
    count, heads, head_dim = out.shape
    if not count:
        return
    width = triton.next_power_of_2(head_dim)
    block = max(1, _ELEMENTS // width)
    _rotate_and_round[(triton.cdiv(count * heads, block),)](
        x,
        *x.stride()[:2],
        tokens,
        scaled_signs(head_dim, x.device) if is_rotated else None,
        out,
        scales,
        count * heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
        LEVELS=(head_dim & -head_dim).bit_length() - 1,
        BLOCK=block,
        BLOCK_D=width,
        enable_fp_fusion=False,  # else results would have other bits than elsewhere
    )


@triton.jit
def _mix(x, LEVELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sums and differences of vectors [BLOCK, BLOCK_D], over blocks of 2^LEVELS dims."""
    for level in tl.static_range(LEVELS):
        pairs = tl.reshape(x, [BLOCK, BLOCK_D // (2 << level), 2, 1 << level])
        first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        pairs = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
        x = tl.reshape(pairs, [BLOCK, BLOCK_D])
    return x


# The number of vectors differs from step to step: no step may wait for a compilation of its own.
@triton.jit(do_not_specialize=["count"])
def _rotate_and_round(
    x,
    token_stride,
    head_stride,
    tokens,
    signs,
    out,
    scales,
    count,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    vector = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = (vector // HEADS).to(tl.int64)
    if tokens is not None:
        token = tl.load(tokens + token, mask=vector < count, other=0)
    d = tl.arange(0, BLOCK_D)
    mask = (vector < count)[:, None] & (d < HEAD_DIM)[None, :]
    place = token * token_stride + (vector % HEADS) * head_stride
    numbers = tl.load(x + place[:, None] + d[None, :], mask=mask, other=0).to(tl.float32)
    if signs is not None:
        numbers = numbers * tl.load(signs + d, mask=d < HEAD_DIM, other=0)[None, :]
        numbers = _mix(numbers, LEVELS, BLOCK, BLOCK_D)
    if scales is not None:
        # A maximum passes over NaN on a GPU.
        has_nan = tl.max((numbers != numbers).to(tl.int32), 1) > 0
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(numbers), 1), _MOST), _LEAST_SCALE)
        scale = tl.where(has_nan, float("nan"), scale)
        tl.store(scales + vector, scale, mask=vector < count)
        steps = numbers * tl.div_rn(1.0, scale)[:, None]
        rounded = tl.where(steps >= 0, steps + 0.5, steps - 0.5)
        rounded = tl.minimum(tl.maximum(rounded, -_MOST - 1), _MOST)
        numbers = tl.where((scale < float("inf"))[:, None], rounded, 0.0)
    target = out + vector.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
    tl.store(target, numbers.to(out.dtype.element_ty), mask=mask)
