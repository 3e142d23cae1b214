"""rkv: while an answer is written, what its last tokens attend to and what is not said again later (R-KV, 2025).

z[r, i] = max over the query heads of a KV head of q[r] . k[i] * scale, for the last `window` queries and the m entries
          before them
a[i]    = maximum over `kernel` neighbours of the mean over r of the softmax of z[r] over those m
C       = cosines of the keys of all n entries (norms plus 1e-8), 0 on the diagonal; of each row i of C the newest entry
          above `threshold` is set to 0 too, or the oldest entry where none is: of what is similar the newest stays
R       = softmax over j of the mean over i of C[i, j], of which the first m count
s       = mix * a - (1 - mix) * R

Defaults are the authors' (their runs have mix=0.1, their class 0.07). A policy for answers alone. fp32, and no n x n
tensor: with u the keys over their norms, n * mean_i C[i, j] is u[j] . sum(u) - |u[j]|^2 less the sum of u[i] . u[j]
over the rows i whose zeroed entry is j.
"""

import torch
from torch import Tensor

from .attention import pool, window_queries
from .config import EvictionConfig
from .heads import best_of_each_head
from .inputs import Q_WINDOW
from .layer import Comm, LayerInputs, LayerScores
from .params import integer, kernel_width, unit_interval
from .registry import Policy, register

PARAMETERS = (
    integer("window", 8, 1),
    kernel_width(7),
    unit_interval("mix", 0.1),
    unit_interval("threshold", 0.5),
)
"""mix: weight of the attention compared with the redundancy. threshold: cosine from which on two keys are alike."""

_BLOCK = 128
_ONE = 2.0**40
"""Cosines are added up as multiples of its inverse: sums of integers do not depend on their order."""


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """Attention less redundancy, head by head."""
    mix, threshold = cfg.params["mix"], cfg.params["threshold"]
    window = cfg.window_for(inputs.num_tokens)
    m = inputs.num_tokens - window
    scores = []
    for query, keys in zip(window_queries(inputs, window), inputs.keys, strict=True):
        keys = keys.float()
        received = _attention(query, keys[:m], inputs.logit_softcap, comm)
        attention = pool(received[None], "max", cfg.params["kernel"])[0]
        scores.append(mix * attention - (1 - mix) * redundancy(keys, threshold)[:m])
    result = torch.stack(scores)
    return LayerScores(layer, num_layers, inputs.num_kv_heads, result, device=result.device)


def _attention(query: Tensor, keys: Tensor, softcap: float | None, comm: Comm | None) -> Tensor:
    """What each entry receives of the window, [m]: query [g, w, d], times the scale; keys [m, d]."""
    # One product per query head: see attention.window_attention.
    logits = torch.bmm(query, keys.t().expand(len(query), -1, -1))
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    if comm is not None:
        logits = comm.gather_group_rows(logits)
    return logits.amax(0).softmax(-1).mean(0)


def redundancy(keys: Tensor, threshold: float) -> Tensor:
    """How much each of n entries says again what others say, [n], adding up to 1: keys fp32 [n, d]."""
    unit = keys / (torch.linalg.vector_norm(keys, dim=1, keepdim=True) + 1e-8)
    newest = newest_alike(unit, threshold)
    zeroed = (
        (unit * unit[newest]).sum(1).masked_fill(newest == torch.arange(len(unit), device=unit.device), 0)
    )
    # The order in which a device adds is not known.
    sums = torch.zeros(len(unit), dtype=torch.int64, device=unit.device)
    sums.index_add_(0, newest, zeroed.double().mul(_ONE).round().long())
    # Not a matrix product: a BLAS may round by where the head lies in memory.
    similar = (unit * unit.sum(0)).sum(1) - (unit * unit).sum(1) - sums.double().div(_ONE).float()
    return (similar / len(unit)).softmax(0)


def newest_alike(unit: Tensor, threshold: float) -> Tensor:
    """For each of n unit keys [n, d] the last other one with a cosine above the threshold, int64 [n]; 0 where none is.

    From the newest keys backwards, by blocks, for those that have found none yet: memory is n x 128.
    """
    found = torch.zeros(len(unit), dtype=torch.int64, device=unit.device)
    rows, left = torch.arange(len(unit), device=unit.device), unit
    for stop in range(len(unit), 0, -_BLOCK):
        start = max(0, stop - _BLOCK)
        cosines = left @ unit[start:stop].t()
        (own,) = ((rows >= start) & (rows < stop)).nonzero(as_tuple=True)
        cosines[own, rows[own] - start] = -1
        hit = cosines.amax(1) > threshold
        if not hit.any():
            continue
        columns = torch.arange(start, stop, dtype=torch.int32, device=unit.device)
        found[rows[hit]] = torch.where(cosines[hit] > threshold, columns, -1).amax(1).long()
        rows, left = rows[~hit], left[~hit]
        if not len(rows):
            break
    return found


register(
    Policy(
        "rkv",
        "per head, what the last `window` tokens attend to and later tokens do not say again",
        "R-KV",
        score,
        best_of_each_head,
        PARAMETERS,
        needs=(Q_WINDOW,),
        always_kept=("window",),
        decodes=True,
        compares_entries=True,
        prompts=False,
        url="https://arxiv.org/abs/2505.24133",
    )
)
