"""What prompts add up to while they are read, tile by tile.

A tile is 128 tokens in a row, the first one the prompt's, or part's, first 128; the last may be shorter. Each is
summed up on its own, one after the other, so that the sums do not depend on the steps in which a prompt was read.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .inputs import Q_ALL, QUERY_MOMENTS, TILE_SUMS
from .layer import LayerInputs

TILE = 128


def add_tile_sums(out: Tensor, query: Tensor, keys: Tensor) -> None:
    """What each token of a tile receives of the attention within it, to `out` fp32 [Hq, r] (Compactor, authors' code).

    query [Hq, r, d], keys [Hkv, r, d]: of the tile, after RoPE. Every token sees the whole tile, also what comes after
    it, and logits are q.k without a factor.
    """
    group = query.shape[0] // keys.shape[0]
    for head, key in enumerate(keys):
        queries, key = _copy(query[head * group : (head + 1) * group]), _copy(key)
        # One product per query head (the keys are broadcast): the same bits however many heads are here.
        logits = torch.bmm(queries, key.t().expand(group, -1, -1))
        attention = torch.softmax(logits, dim=-1)
        for i in range(group):
            out[head * group + i] = attention[i].sum(0)


def add_query_moments(out: Tensor, query: Tensor) -> None:
    """Add to `out` fp32 [Hq, d+1, d+1] the products x x' of x = (1, q) for some queries q [Hq, r, d] before RoPE."""
    for total, rows in zip(out, query.float(), strict=True):
        x = torch.cat((rows.new_ones(len(rows), 1), rows), 1)
        total += x.t() @ x


def tile_sums(inputs: LayerInputs) -> Tensor:
    """fp32 [Hq, n]. Raises ValueError naming tile_sums or q_all where both are missing or one does not fit."""
    n = inputs.num_tokens
    if inputs.has(TILE_SUMS) or not inputs.has(Q_ALL):
        return inputs.read(TILE_SUMS).float()
    query = inputs.read(Q_ALL)
    sums = torch.empty(query.shape[0], n, device=query.device)
    for tile in _tiles(n):
        add_tile_sums(sums[:, tile], query[:, tile], inputs.keys[:, tile])
    return sums


def query_moments(inputs: LayerInputs, sinks: int) -> Tensor:
    """fp32 [Hq, d+1, d+1]. Raises ValueError naming query_moments, q_all or rotary if missing or unfit.

    Args:
        sinks: first tokens that do not count.
    """
    n, size = inputs.keys.shape[1:]
    if inputs.has(QUERY_MOMENTS) or not inputs.has(Q_ALL):
        return inputs.read(QUERY_MOMENTS).float()
    query, rotary = inputs.read(Q_ALL), inputs.read_rotary()
    moments = torch.zeros(query.shape[0], size + 1, size + 1, device=query.device)
    for tile in _tiles(n):
        first = max(tile.start, sinks)
        before = rotary.undo(query[:, first : tile.stop].float(), inputs.begins + first)
        add_query_moments(moments, before)
    return moments


def _copy(rows: Tensor) -> Tensor:
    """fp32; a BLAS may round by where rows lie in memory, which differs between steps."""
    return rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _tiles(n: int) -> Iterator[slice]:
    for first in range(0, n, TILE):
        yield slice(first, min(first + TILE, n))
