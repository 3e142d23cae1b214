"""What goes into and comes out of one layer's scoring."""

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .rotary import Rotary

Kept = list[list[Tensor]]
"""kept[layer][kv_head]: int64 indices, strictly ascending."""


class Comm(Protocol):
    """What decisions need from tensor parallelism (see vllm_kvevict.parallel)."""

    @property
    def num_kv_heads_total(self) -> int:
        """KV heads of a layer over all ranks."""

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
    q_all [Hq, n, d]: queries of all tokens, after RoPE; col_sums [Hq, n] fp32: what each token receives of the
    attention of all queries, summed. h2o takes either.
    rotary: how positions turned queries and keys: a Rotary, or (cos, sin), each [positions, r/2] with at least n
    positions and r <= d, whose pairs are (i, i + r/2).
    tile_sums fp32 [Hq, n]: what each token receives of the attention within its tile; compactor takes it or q_all.
    query_moments fp32 [Hq, d+1, d+1]: sum over the queries q before RoPE, the sinks' left out, of x x' with x = (1, q);
    expected-attention takes it or q_all. Both as summed up by `tiles`.
    w_o [Hq, d, hidden]: the part of the output projection that each query head feeds.
    window_mean, window_max, window_recent fp32 [Hq, m]: what each of the m tokens before the window receives of its
    attention, the mean or a maximum over its rows (`attention.combine_rows`), from whoever has it already. Policies
    that score by one of them alone (`EvictionConfig.combines_rows_by` says by which) then read neither queries nor
    keys, of which only shape and dtype count: they may be on the meta device.
    repeated fp32 [Hkv, n]: the most attention that each token received when the model repeated the prompt, over the
    query heads that are here (`kvzip.repeat_attention`). kvzip takes it, and of keys only the shape unless it has a
    window: they may be on the meta device.
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
            raise ValueError(f"keys must be a tensor [Hkv, n, d], not {_shape(self.keys)}")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"scale must be finite or None, not {self.scale}")
        if self.logit_softcap is not None and not 0 <= self.logit_softcap < math.inf:
            raise ValueError(f"logit_softcap must be a number >= 0 or None, not {self.logit_softcap}")

    def check_queries(self, window: int) -> Tensor:
        """The last `window` query rows [Hq, window, d]. Raises ValueError naming q_window if unusable."""
        query = self.q_window
        if query is None:
            raise ValueError("q_window is required: the queries of the last window tokens, [Hq, rows, d]")
        heads, _, size = self.keys.shape
        if query.ndim != 3 or query.shape[0] == 0 or query.shape[0] % heads or query.shape[2] != size:
            raise ValueError(
                f"q_window must be [Hq, rows, {size}] with Hq a multiple of Hkv={heads}, not {_shape(query)}"
            )
        if query.shape[1] < window:
            raise ValueError(f"q_window must have at least {window} rows (the window), not {query.shape[1]}")
        return query[:, query.shape[1] - window :]

    def check_received(self, window: int, how: str) -> Tensor | None:
        """window_mean, window_max or window_recent by KV head, [Hkv, g, m]; None if it is not given.

        how: "mean", "max" or "recent". Raises ValueError naming the field if of a wrong shape or dtype.
        """
        name = f"window_{how}"
        given, heads, m = getattr(self, name), self.num_kv_heads, self.num_tokens - window
        if given is None:
            return None
        if (
            not isinstance(given, Tensor)
            or given.dtype != torch.float32
            or given.ndim != 2
            or given.shape[0] == 0
            or given.shape[0] % heads
            or given.shape[1] != m
        ):
            raise ValueError(
                f"{name} must be fp32 [Hq, {m}] with Hq a multiple of Hkv={heads}, not {_shape(given)}"
            )
        return given.unflatten(0, (heads, -1))

    def check_repeated(self) -> Tensor:
        """repeated [Hkv, n]. Raises ValueError naming it if missing or of a wrong shape or dtype."""
        repeated, shape = self.repeated, self.keys.shape[:2]
        if not isinstance(repeated, Tensor) or repeated.dtype != torch.float32 or repeated.shape != shape:
            raise ValueError(
                f"repeated is required, what each token received when the prompt was repeated: fp32 {list(shape)}, not "
                f"{_shape(repeated)}"
            )
        return repeated

    def check_q_all(self, instead: str) -> Tensor:
        """q_all [Hq, n, d]. Raises ValueError naming it if of a wrong shape, and what may stand for it if missing."""
        heads, n, size = self.keys.shape
        query = self.q_all
        if query is None:
            raise ValueError(f"{instead} or q_all [Hq, n, d] is required: what follows from all queries")
        if query.ndim != 3 or query.shape[0] == 0 or query.shape[0] % heads or query.shape[1:] != (n, size):
            raise ValueError(
                f"q_all must be [Hq, {n}, {size}] with Hq a multiple of Hkv={heads}, not {list(query.shape)}"
            )
        return query

    def check_sums(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The field of that name in fp32, [Hq, *shape]. Raises ValueError naming it if of another shape."""
        sums, heads = getattr(self, name), self.num_kv_heads
        if (
            sums.ndim != 1 + len(shape)
            or sums.shape[0] == 0
            or sums.shape[0] % heads
            or sums.shape[1:] != shape
        ):
            wanted = ", ".join(map(str, shape))
            raise ValueError(
                f"{name} must be [Hq, {wanted}] with Hq a multiple of Hkv={heads}, not {list(sums.shape)}"
            )
        return sums.float()

    def check_rotary(self) -> Rotary:
        """rotary. Raises ValueError naming it if missing or of a wrong shape."""
        if self.rotary is None:
            raise ValueError(
                "rotary is required: (cos, sin) of the model's rotary embedding, [positions, r/2]"
            )
        rotary, (_, n, size) = Rotary(*self.rotary), self.keys.shape
        cos, sin = rotary.cos, rotary.sin
        if cos.ndim != 2 or cos.shape != sin.shape or len(cos) < n or not 0 < 2 * cos.shape[1] <= size:
            raise ValueError(
                f"rotary must be (cos, sin), each [>= {n}, r/2] with r <= {size}, not "
                f"{list(cos.shape)} and {list(sin.shape)}"
            )
        return rotary

    def check_values(self) -> Tensor:
        """values [Hkv, n, d]. Raises ValueError naming them if missing or not shaped like keys."""
        if self.values is None:
            raise ValueError("values are required: [Hkv, n, d], as keys")
        if self.values.ndim != 3 or self.values.shape[:2] != self.keys.shape[:2]:
            raise ValueError(
                f"values must be shaped like keys {list(self.keys.shape)}, not {_shape(self.values)}"
            )
        return self.values

    def check_w_o(self) -> Tensor:
        """w_o [Hq, d, hidden]. Raises ValueError naming it if missing or of a wrong shape."""
        if self.w_o is None:
            raise ValueError("w_o is required: the output projection of each query head, [Hq, d, hidden]")
        heads, size = self.keys.shape[0], self.check_values().shape[2]
        w_o = self.w_o
        if w_o.ndim != 3 or w_o.shape[0] == 0 or w_o.shape[0] % heads or w_o.shape[1] != size:
            raise ValueError(
                f"w_o must be [Hq, {size}, hidden] with Hq a multiple of Hkv={heads}, not {_shape(w_o)}"
            )
        return w_o


@dataclass(frozen=True, eq=False)
class LayerScores:
    """One layer's scores for one request.

    scores: fp32 [Hkv, m] of the m candidates (the tokens before the window), or None where the policy
    reads no tensors or nothing is evicted. weight: the layer's claim on a budget shared between layers, a
    float or a float64 tensor without dimensions, None for policies whose layer budgets do not depend on
    data. second: fp32 [Hkv, m], what a policy that chooses in two rounds ranks by in the second. device:
    where kept indices are made. budget: candidates per KV head that the layer may keep, for policies that
    share a budget between layers, where it is decided outside (see `layer_budgets`).
    """

    layer: int
    num_layers: int
    num_kv_heads: int
    scores: Tensor | None = None
    weight: Tensor | float | None = None
    second: Tensor | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    budget: int | None = None


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else repr(value)
