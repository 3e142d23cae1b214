"""lava: layers share the budget by the entropy of their scores, heads by score times value norm (LAVa, eq. 5-7).

a[hq, i] = mean over the window's rows of the attention that query head hq pays to token i
p        = pooled a (the paper: maximum, kernel 7)
s[h, i]  = max over tokens k of ||V[h, k]||_1  *  max over the query heads hq of KV head h of p[hq, i]
e        = -sum (s/S) log(s/S) / log(Hkv*m), S = sum s, over all KV heads and the m candidates of a layer

A layer's budget is in proportion to its e (Alg. 1-2; the window is taken off first), and the best Hkv*b_l
candidates of the layer stay, whichever heads they belong to. The paper's cascade, which lowers budgets layer by
layer as prefill proceeds, ends with the same set as this one decision after the last layer: shares only shrink.

Options: alpha > 0 gives heads a floor, as the authors' code does, which also leaves the window out of the value norm;
pooling, kernel and gqa as in snapkv, with the reduction over query heads last.
"""

import dataclasses
import math

import torch
from torch import Tensor

from .attention import pool, received, reduce_group
from .config import EvictionConfig
from .heads import best_of_each_layer
from .inputs import Q_WINDOW, VALUES
from .layer import Comm, LayerInputs, LayerScores
from .norms import value_norms
from .params import KERNEL, POOLING, WINDOW, choice, measured, unit_interval
from .registry import Policy, register

SCORING = (
    WINDOW,
    KERNEL,
    measured(POOLING, "decay"),
    choice("gqa", "max", "mean"),
)
PARAMETERS = (*SCORING, unit_interval("alpha", 0.0))


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """Pooled attention times the head's largest value norm; the weight is the entropy e."""
    result = score_unweighted(cfg, inputs, layer, num_layers, comm)
    assert result.scores is not None
    return dataclasses.replace(result, weight=entropy(result.scores, comm))


def score_unweighted(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """The same without a weight, for layer budgets that do not ask for it."""
    p = cfg.params
    window = cfg.window_for(inputs.num_tokens)
    values = inputs.read(VALUES)
    norms = value_norms(values).amax(1)
    # A maximum of maxima: pooling one row does for all query heads, and one call for all KV heads.
    pools_last = p["pooling"] != "avg" and p["gqa"] != "mean"
    best = []
    for attention in received(inputs, window):
        pooled = attention if pools_last else pool(attention, p["pooling"], p.get("kernel"))
        best.append(reduce_group(pooled, p["gqa"], comm))
    scores = torch.stack(best)
    if pools_last:
        scores = pool(scores, p["pooling"], p.get("kernel"))
    return LayerScores(layer, num_layers, inputs.num_kv_heads, scores * norms[:, None], device=values.device)


def entropy(scores: Tensor, comm: Comm | None) -> Tensor:
    """Normalised entropy of a layer's scores, float64 without dimensions; 1 where they say nothing.

    From two sums per KV head, added in head order, so that it does not depend on how heads lie on ranks.
    """
    sums = torch.stack([torch.stack([row.sum(), torch.xlogy(row, row).sum()]) for row in scores.double()])
    if comm is not None:
        sums = comm.gather_heads(sums)
    total, logs = sums.cumsum(0)[-1]
    size = math.log(len(sums) * scores.shape[1])
    if size <= 0:
        return torch.ones_like(total)
    return torch.where(total <= 0, 1.0, (total.log() - logs / total) / size)


POLICY = Policy(
    "lava",
    "attention x value norm; layers share the budget by entropy, heads compete",
    "LAVa eq. 5-7, Alg. 1-2",
    score,
    best_of_each_layer,
    PARAMETERS,
    needs=(Q_WINDOW, VALUES),
    window_rows="mean",
    schedule="by weight",
    heads_compete=True,
    always_kept=("window",),
    url="https://arxiv.org/abs/2509.09754",
)
register(POLICY)
