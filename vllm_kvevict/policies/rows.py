"""Rows of different lengths: the entries of an answer, of which the heads of a layer hold different numbers.

While an answer is written its entries are evicted again and again, and heads that compete are left with different
numbers. The row of a KV head then stands at the right end of what a layer's tensors hold; entries that are pinned, its
first ones, take no part. A policy's score knows nothing of this: it is asked for every row as if the row were alone.

    columns      0  1  2  3  4  5  6  7  8  9      lengths  pinned    asked for      scores (window 2)
    head 0       P  P  a  b  c  d  e  f  g  h        10       2       a b ... h      a  b  c  d  e  f
    head 1       .  .  .  P  i  j  k  l  m  n         7       1       i j ... n      -  -  i  j  k  l
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .config import EvictionConfig
from .inputs import RECEIVED, Input, shape_of
from .layer import Comm, LayerInputs, LayerScores
from .registry import decoding_policies, lookup


@dataclass(frozen=True)
class RaggedRows:
    """How many entries each row of a layer has, and how many of its first ones are pinned."""

    lengths: tuple[int, ...]
    pinned: tuple[int, ...]

    @classmethod
    def of(cls, x: LayerInputs | LayerScores) -> "RaggedRows":
        """Those of a layer's inputs or scores. Raises ValueError that names lengths or pinned."""
        heads, n = x.num_kv_heads, x.num_tokens if isinstance(x, LayerInputs) else None
        if x.lengths is None and n is None:
            raise ValueError("lengths is required where pinned is given")
        lengths = (n or 0,) * heads if x.lengths is None else _counts("lengths", x.lengths, heads)
        pinned = (0,) * heads if x.pinned is None else _counts("pinned", x.pinned, heads)
        if n is not None and max(lengths, default=0) > n:
            raise ValueError(f"lengths must be at most n={n}, not {max(lengths)}")
        if any(first > length for first, length in zip(pinned, lengths, strict=True)):
            raise ValueError(f"pinned must be at most lengths={list(lengths)}, not {list(pinned)}")
        return cls(lengths, pinned)

    @property
    def entries(self) -> list[int]:
        """How many entries of each row compete: all that are not pinned."""
        return [length - first for length, first in zip(self.lengths, self.pinned, strict=True)]


def are_ragged(x: LayerInputs | LayerScores) -> bool:
    """Whether the rows of a layer have lengths of their own, or pinned entries."""
    return x.lengths is not None or x.pinned is not None


def check_rows(cfg: EvictionConfig, layers: Sequence[LayerInputs | LayerScores]) -> None:
    """Raise ValueError unless all of the layers are ragged, and the configuration can evict them."""
    if not lookup(cfg.policy).decodes:
        able = ", ".join(decoding_policies())
        raise ValueError(f"lengths and pinned cannot be used with policy {cfg.policy} (choose from {able})")
    if cfg.budget is None:
        raise ValueError("keep_ratio cannot be used with lengths and pinned: give budget, a number of tokens")
    if not all(map(are_ragged, layers)):
        raise ValueError("lengths must be given for all layers, or for none")


def budget_and_window(cfg: EvictionConfig) -> tuple[int, int]:
    """(B, w): how many entries a row may keep on average besides what is pinned, and how many of its last stay."""
    assert cfg.budget is not None
    return cfg.budget, cfg.window_for(cfg.budget)


def compete_over_ranks(cfg: EvictionConfig, comm: Comm | None) -> Comm | None:
    """The comm over which the heads of a layer compete; None where those of this rank are all that matter."""
    return comm if cfg.heads_compete else None


def evicts_rows(cfg: EvictionConfig, entries: Sequence[int]) -> bool:
    """Whether a layer loses any entry. entries: of all heads that compete; of policies without competition, any."""
    budget, _ = budget_and_window(cfg)
    if cfg.heads_compete:
        return sum(entries) > budget * len(entries)
    return max(entries, default=0) > budget


def score_rows(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """As `score_layer`, for rows of different lengths.

    Scores are None only where this rank can tell that nothing is evicted. Where KV heads are replicated the call is a
    collective in any case, in which the ranks also tell each other how long their rows are.
    """
    check_rows(cfg, [inputs])
    rows = RaggedRows.of(inputs)
    entries, fields = rows.entries, _fields_read(cfg, inputs)
    # Keys may be on the meta device, where others stand in for them.
    device = getattr(inputs, fields[-1].name).device if fields else inputs.keys.device
    lengths, pinned = torch.tensor(rows.lengths), torch.tensor(rows.pinned)
    result = LayerScores(layer, num_layers, len(entries), device=device, lengths=lengths, pinned=pinned)
    if comm is not None and comm.replicas > 1:
        longest = int(comm.gather_heads(torch.tensor(entries, device=device)).max())
        comm = _OneWidth(comm, max(1, longest))
    elif compete_over_ranks(cfg, comm) is None and not evicts_rows(cfg, entries):
        return result
    window = budget_and_window(cfg)[1]
    for what in fields:
        inputs.read(what, min(window, max(entries)))

    def score(heads: slice, count: int) -> Tensor | None:
        part = _part(inputs, fields, heads, count)
        if min(entries[heads]) < count:
            part = replace(part, lengths=torch.tensor(entries[heads]))
        if count <= window:
            part = _lengthened(part, fields, window)
        return lookup(cfg.policy).score(cfg, part, layer, num_layers, comm).scores

    if isinstance(comm, _OneWidth) and entries[0] <= window:
        score(slice(0, 1), entries[0])  # no candidates, but the other ranks wait for what is sent
    if max(entries) > window and (lookup(cfg.policy).scores_rows or min(entries) == max(entries)):
        return replace(result, scores=_together(score, entries, window))
    return replace(result, scores=_by_row(score, entries, window, device))


def _together(
    score: Callable[[slice, int], Tensor | None], entries: Sequence[int], window: int
) -> Tensor | None:
    """As `_by_row`, and the same, by one call for all rows of which some have candidates."""
    longest, shortest = max(entries), min(entries)
    scores = score(slice(0, len(entries)), longest)
    if scores is None or shortest == longest:
        return scores
    missing = torch.tensor([[longest - count] for count in entries], device=scores.device)
    return scores.masked_fill(torch.arange(longest - window, device=scores.device) < missing, -torch.inf)


def _by_row(
    score: Callable[[slice, int], Tensor | None], entries: Sequence[int], window: int, device: torch.device
) -> Tensor | None:
    """[Hkv, m], -inf where there is no candidate; None from a policy that has no scores.

    score(heads, count): of the last `count` entries of the rows of these heads.
    """
    longest = max(entries)
    found = torch.full((len(entries), max(0, longest - window)), -torch.inf, device=device)
    for head, count in enumerate(entries):
        if count <= window:
            continue
        scores = score(slice(head, head + 1), count)
        if scores is None:
            return None
        found[head, longest - count :] = scores[0]
    return found


def _fields_read(cfg: EvictionConfig, inputs: LayerInputs) -> list[Input]:
    """The inputs that the policy reads, of those that are given; last what stands in for others."""
    rows = cfg.combines_rows_by
    return [what for what in (*cfg.inputs, *([RECEIVED[rows]] if rows else [])) if inputs.has(what)]


def _part(inputs: LayerInputs, fields: Sequence[Input], heads: slice, count: int) -> LayerInputs:
    """Of some KV heads the last `count` entries, as if there were nothing else."""
    start = inputs.num_tokens - count
    cut: dict[str, Any] = {}
    for what in fields:
        tensor: Tensor = getattr(inputs, what.name)
        group = len(tensor) // inputs.num_kv_heads  # query heads of a KV head
        mine = tensor[heads.start * group : heads.stop * group]
        # Candidates are all tokens but the last ones: they begin where the tokens do.
        cut[what.name] = mine[:, start:] if what.dims.split()[1] in ("n", "m") else mine
    return replace(inputs, keys=inputs.keys[heads, start:], lengths=None, pinned=None, **cut)


def _lengthened(inputs: LayerInputs, fields: Sequence[Input], window: int) -> LayerInputs:
    """A row that is too short to score, behind so many zeros that it has a candidate."""

    def fill(tensor: Tensor, size: int) -> Tensor:
        return functional.pad(tensor, (*(0, 0) * (tensor.ndim - 2), max(0, size - tensor.shape[1]), 0))

    sizes = {"n": window + 1, "m": 1, "rows": window}
    filled: dict[str, Any] = {
        what.name: fill(getattr(inputs, what.name), sizes[what.dims.split()[1]]) for what in fields
    }
    return replace(inputs, keys=fill(inputs.keys, window + 1), **filled)


class _OneWidth:
    """A comm for ranks whose rows have different lengths: what they exchange is filled up to one width."""

    def __init__(self, comm: Comm, width: int) -> None:
        self._comm = comm
        self._width = width
        self.num_kv_heads_total, self.local_heads, self.replicas = (
            comm.num_kv_heads_total,
            comm.local_heads,
            comm.replicas,
        )
        self.gather_heads, self.sum_counts = comm.gather_heads, comm.sum_counts

    def gather_group_rows(self, rows: Tensor) -> Tensor:
        """[local query heads, ..., m] -> [all of the KV head's query heads, ..., m]."""
        missing = self._width - rows.shape[-1]
        return self._comm.gather_group_rows(functional.pad(rows, (missing, 0)))[..., missing:]


def _counts(name: str, given: Tensor, heads: int) -> tuple[int, ...]:
    """The numbers of a field that has one for each KV head. Raises ValueError that names it."""
    if not isinstance(given, Tensor) or given.dtype != torch.int64 or given.shape != (heads,):
        raise ValueError(f"{name} must be int64 [{heads}], not {shape_of(given, dtype=True)}")
    counts = tuple(given.tolist())
    if min(counts, default=0) < 0:
        raise ValueError(f"{name} must be at least 0, not {list(counts)}")
    return counts
