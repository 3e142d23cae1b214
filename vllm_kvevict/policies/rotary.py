"""Rotary position embeddings (RoPE): undone, and averaged over positions (RoFormer: Su et al. 2021, section 3.4)."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """How a model turns queries and keys by their positions.

    cos, sin [positions, r/2], of positions 0, 1, ...: pair i of the first r dimensions is turned by angle i; the
    others, where r < d, are not. A pair is (i, i + r/2), or (2i, 2i + 1) if interleaved. Both may be multiplied by a
    factor, as YaRN does. Angles grow in proportion to the position.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def undo(self, x: Tensor, first: int = 0) -> Tensor:
        """x [..., n, d] after RoPE, of positions from `first` on, as it was before; in x's dtype."""
        rows = slice(first, first + x.shape[-2])
        cos, sin = self.cos[rows].to(x.dtype), self.sin[rows].to(x.dtype)
        size = cos * cos + sin * sin
        return self._turn(x, cos / size, -sin / size)

    def mean(self, first: int, count: int, size: int) -> Tensor:
        """The matrix by which RoPE turns a vector of `size`, averaged over `count` positions from `first` on.

        float64 [size, size]. Positions may lie beyond those of cos and sin.
        """
        cos, sin = self._at(torch.arange(first, first + count, device=self.cos.device))
        unit = torch.eye(size, dtype=torch.float64, device=cos.device)
        # Row by row what becomes of the unit vectors, which are the matrix's columns.
        return self._turn(unit, cos.mean(0), sin.mean(0)).T

    def _at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """float64 cos and sin of positions; beyond the table's end they are put together from what it holds."""
        last = max(len(self.cos) - 1, 1)
        laps = ((positions - 1) // last).clamp(min=0)
        rest = positions - laps * last
        cos, sin = self.cos[rest].double(), self.sin[rest].double()
        angle = laps[:, None] * torch.atan2(self.sin[-1].double(), self.cos[-1].double())
        return cos * angle.cos() - sin * angle.sin(), sin * angle.cos() + cos * angle.sin()

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size = 2 * cos.shape[-1]
        turned, rest = x[..., :size], x[..., size:]
        shape, pair = ((-1, 2), -1) if self.interleaved else ((2, -1), -2)
        one, two = turned.unflatten(-1, shape).unbind(pair)
        both = torch.stack((one * cos - two * sin, two * cos + one * sin), pair)
        return torch.cat((both.flatten(-2), rest), -1)
