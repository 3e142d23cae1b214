"""What goes into and comes out of one layer's scoring."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .inputs import ROTARY, Input, shape_of
from .rotary import Rotary

Kept = list[list[Tensor]]
"""kept[layer][kv_head]: int64 indices, strictly ascending."""


class Comm(Protocol):
    """What decisions need from tensor parallelism (see vllm_kvevict.parallel)."""

    @property
    def num_kv_heads_total(self) -> int:
        """KV heads of a layer over all ranks."""

    @property
    def replicas(self) -> int:
        """How many ranks hold the same KV heads."""

    @property
    def local_heads(self) -> slice:
        """Global indices of this rank's KV heads."""

    def gather_heads(self, local: Tensor) -> Tensor:
        """[local KV heads, ...] of every rank -> [all KV heads, ...], each KV head once."""

    def gather_group_rows(self, rows: Tensor) -> Tensor:
        """[local query heads, ...] of one KV head -> [all its query heads, ...]."""

    def sum_counts(self, local: Tensor) -> Tensor:
        """Elementwise sum of int64 counts over the ranks, each KV head counted once."""


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """Tensors of one layer and one request. Hq query heads, Hkv KV heads, n cached tokens, head size d.

    q_window [Hq, r, d]: queries of the last r tokens, after RoPE; r >= window, the last `window` rows count.
    keys, values [Hkv, n, d]: cached entries in ascending position, keys after RoPE.
    scale: factor of the logits, None for 1/sqrt(d).
    logit_softcap: c for models whose logits become c*tanh(z/c); None or 0 is off.
    q_all [Hq, n, d]: queries of all tokens, after RoPE, from which the three next follow: policies take either.
    col_sums fp32 [Hq, n]: what each token receives of the attention of all queries, summed.
    tile_sums fp32 [Hq, n]: what each token receives of the attention within its tile, as summed up by `tiles`.
    query_moments fp32 [Hq, d+1, d+1]: sum over the queries q before RoPE, the sinks' left out, of x x' with x = (1, q).
    rotary: how positions turned queries and keys: a Rotary, or (cos, sin), each [positions, r/2] with at least n
    positions and r <= d, whose pairs are (i, i + r/2).
    w_o [Hq, d, hidden]: the part of the output projection that each query head feeds.
    window_mean, window_max, window_recent fp32 [Hq, m]: what each of the m tokens before the window receives of its
    attention, the mean or a maximum over its rows (`attention.combine_rows`), from whoever has it already. Policies
    that score by one of them alone (`EvictionConfig.combines_rows_by` says by which) then read neither queries nor
    keys, of which only shape and dtype count: they may be on the meta device.
    repeated fp32 [Hkv, n]: the most attention that each token received when the model repeated the prompt, over the
    query heads that are here (`kvzip.repeat_attention`). kvzip takes it, and of keys only the shape unless it has a
    window: they may be on the meta device.
    lengths, pinned int64 [Hkv], preferably on the CPU: for policies that evict answers while they are written
    (`decoding_policies`), how many entries each KV head's row has, None for n, and how many of its first ones stay in
    any case, None for 0. A row stands at the right end of keys, values and whatever else has a column for each token;
    what lies before it is never read. Pinned entries neither compete nor count: to the others it is as if they were not
    there. n is then the most that any row has, or more.
    earlier_keys: one [S_h, d] for each KV head, the keys that evictions of earlier parts of the prompt have left, if
    it is evicted part by part. All else is then of the n tokens of the part: they alone are scored, but a softmax over
    what a query sees takes in the earlier keys.
    begins: position of the first of the n tokens, for policies that undo the rotary embedding.
    Any floating dtype. A policy reads only what it needs; the rest may be None.
    """

    q_window: Tensor | None
    keys: Tensor
    values: Tensor | None = None
    scale: float | None = None
    logit_softcap: float | None = None
    q_all: Tensor | None = None
    col_sums: Tensor | None = None
    w_o: Tensor | None = None
    window_mean: Tensor | None = None
    window_max: Tensor | None = None
    window_recent: Tensor | None = None
    repeated: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | Rotary | None = None
    tile_sums: Tensor | None = None
    query_moments: Tensor | None = None
    lengths: Tensor | None = None
    pinned: Tensor | None = None
    earlier_keys: Sequence[Tensor] | None = None
    begins: int = 0

    @property
    def num_tokens(self) -> int:
        """n, the number of cached tokens."""
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Hkv on this rank."""
        return self.keys.shape[0]

    def check(self) -> None:
        """Raise ValueError, naming the field, unless keys and the logit parameters are usable."""
        if not isinstance(self.keys, Tensor) or self.keys.ndim != 3:
            raise ValueError(f"keys must be a tensor [Hkv, n, d], not {shape_of(self.keys)}")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"scale must be finite or None, not {self.scale}")
        if self.logit_softcap is not None and not 0 <= self.logit_softcap < math.inf:
            raise ValueError(f"logit_softcap must be a number >= 0 or None, not {self.logit_softcap}")
        self._check_earlier_keys()

    def _check_earlier_keys(self) -> None:
        if self.earlier_keys is None:
            return
        heads, _, size = self.keys.shape
        shapes = [list(keys.shape) for keys in self.earlier_keys]
        if self.lengths is not None or self.pinned is not None:
            raise ValueError("earlier_keys cannot be given together with lengths or pinned")
        if len(shapes) != heads or any(len(shape) != 2 or shape[1] != size for shape in shapes):
            raise ValueError(f"earlier_keys must be {heads} tensors [S, {size}], not of shapes {shapes}")

    def seen_keys(self) -> Iterator[Tensor]:
        """For each KV head in turn all keys that its last query sees, the earlier ones first: [S_h + n, d]."""
        if self.earlier_keys is None:
            yield from self.keys
            return
        for earlier, own in zip(self.earlier_keys, self.keys, strict=True):
            yield torch.cat((earlier, own))

    def has(self, what: Input) -> bool:
        """Whether the field of an input is given."""
        return getattr(self, what.name) is not None

    def read(self, what: Input, window: int = 0) -> Tensor:
        """The field of an input, of a prompt whose last `window` tokens are not scored.

        Raises ValueError naming the field, the shape that it must have and the one that it has.
        """
        given: Tensor = getattr(self, what.name)
        what.check(given, self._sizes(window))
        return given

    def read_rotary(self) -> Rotary:
        """rotary. Raises ValueError as `read`."""
        ROTARY.check(self.rotary, self._sizes(0))
        assert self.rotary is not None
        return Rotary(*self.rotary)

    def _sizes(self, window: int) -> dict[str, range]:
        """Valid sizes of the dimensions of inputs; of others any is."""
        heads, n, size = self.keys.shape
        exact = {"Hkv": heads, "n": n, "m": n - window, "d": size, "d+1": size + 1}
        if isinstance(self.values, Tensor) and self.values.ndim == 3:
            exact["d_v"] = self.values.shape[2]  # which need not be that of keys
        sizes = {name: range(x, x + 1) for name, x in exact.items()}
        sizes["Hq"], sizes["r/2"] = range(heads, sys.maxsize, heads), range(1, size // 2 + 1)
        return sizes | {"rows": range(window, sys.maxsize), "positions": range(self.begins + n, sys.maxsize)}


@dataclass(frozen=True, eq=False)
class LayerScores:
    """One layer's scores for one request.

    scores: fp32 [Hkv, m] of the m candidates (the tokens before the window), or None where the policy
    reads no tensors or nothing is evicted. weight: the layer's claim on a budget shared between layers, a
    float or a float64 tensor without dimensions, None for policies whose layer budgets do not depend on
    data. second: fp32 [Hkv, m], what a policy that chooses in two rounds ranks by in the second. device:
    where kept indices are made. budget: candidates per KV head that the layer may keep, for policies that
    share a budget between layers, where it is decided outside (see `layer_budgets`). lengths, pinned: as in
    LayerInputs; both, or neither. With them row h has m_h = max(0, lengths[h] - pinned[h] - window) candidates, m is
    the largest of these, and scores stand at the right end of their rows; before them, at no candidate, is -inf.
    """

    layer: int
    num_layers: int
    num_kv_heads: int
    scores: Tensor | None = None
    weight: Tensor | float | None = None
    second: Tensor | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    budget: int | None = None
    lengths: Tensor | None = None
    pinned: Tensor | None = None
