"""h2o: the tokens that all queries of the prompt attend to most, and the last ones (H2O: Zhang et al. 2023).

A_j[hq, i] = attention of token j to token i <= j, softmax over the tokens 0..j: full causal attention
c[hq, i]   = sum of A_j[hq, i] over j = i..n-1, the token's own attention to itself included
s[h, i]    = mean over the query heads hq of KV head h of c[hq, i]; no pooling

window=32 last tokens stay besides the B - window best; the paper halves the budget between both (window=B//2).
h2o_norm="mean" divides column i by the n-i queries that see token i, which takes away the advantage of early tokens.

Reads col_sums [Hq, n], accumulated during prefill (`attention.add_column_sums`), or computes them from q_all
[Hq, n, d]: a second pass over the prompt's attention, quadratic in time but not in memory.
"""

import torch
from torch import Tensor

from .attention import add_column_sums, logit_scale, reduce_group
from .config import EvictionConfig
from .heads import best_of_each_head
from .inputs import COL_SUMS, Q_ALL
from .layer import Comm, LayerInputs, LayerScores
from .params import OPTIONAL_WINDOW, choice
from .registry import Policy, register

PARAMETERS = (OPTIONAL_WINDOW, choice("h2o_norm", "sum", "mean"))


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """Attention received from all queries."""
    n, heads = inputs.num_tokens, inputs.num_kv_heads
    m = n - cfg.window_for(n)
    grouped = column_sums(inputs)[:, :m].unflatten(0, (heads, -1))
    scores = torch.stack([reduce_group(rows, "mean", comm) for rows in grouped])
    if cfg.params["h2o_norm"] == "mean":
        scores /= torch.arange(n, n - m, -1, device=scores.device)
    return LayerScores(layer, num_layers, heads, scores, device=scores.device)


def column_sums(inputs: LayerInputs) -> Tensor:
    """c, fp32 [Hq, n]. Raises ValueError naming col_sums or q_all where both are missing or one does not fit."""
    if inputs.has(COL_SUMS) or not inputs.has(Q_ALL):
        return inputs.read(COL_SUMS).float()
    query = inputs.read(Q_ALL)
    sums = torch.zeros(query.shape[0], inputs.num_tokens, device=query.device)
    keys = inputs.seen_keys()
    add_column_sums(sums, query, keys, inputs.num_tokens, logit_scale(inputs), inputs.logit_softcap)
    return sums


register(
    Policy(
        "h2o",
        "per head, what all tokens of the prompt attend to most, and the last tokens",
        "H2O",
        score,
        best_of_each_head,
        PARAMETERS,
        needs=(COL_SUMS,),
        always_kept=("window",),
        url="https://arxiv.org/abs/2306.14048",
    )
)
