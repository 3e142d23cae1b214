"""dropkv: tokens without which the heads' outputs would change most (DropKV, the residual of a single dropped token).

p[hq, r] = attention of row r of the window in query head hq, over all tokens; o[hq, r] = sum_i p[hq, r, i] v_i

If token j alone were dropped, the attention to the others would grow by 1 / (1 - p_j), and the output would move by
p_j / (1 - p_j) (o - v_j). Its squared length, summed over the rows and over the query heads of KV head h, is

s[h, j]  = sum over hq and r of (p[hq, r, j] / (1 - p[hq, r, j]))^2 |v_j - o[hq, r]|^2, then pooled

Where one token has nearly all the attention of a row, 1 - p and v_j - o both vanish. So for the largest p of each row
the same is computed as p_j^2 |v_j - o_rest|^2, where o_rest is the output without it. The window stays, and the
L*Hkv*(B - window) best candidates of the whole model (`whole_model`). Pooling, and one budget for all heads, are this
project's choice.
"""

import torch
from torch import Tensor

from . import whole_model
from .attention import add_rows, pool, window_rows
from .config import EvictionConfig
from .inputs import Q_WINDOW, VALUES
from .layer import Comm, LayerInputs, LayerScores
from .params import POOLING, WINDOW, kernel_width, measured, unless
from .registry import Policy, register

KERNEL = unless(kernel_width(31), pooling="decay")


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """How far the window's outputs would move without each candidate."""
    p, n, window = cfg.params, inputs.num_tokens, cfg.window_for(inputs.num_tokens)
    scores = []
    for rows, values in zip(window_rows(inputs, window), inputs.read(VALUES), strict=True):
        # A copy: a BLAS may round by where the head lies in memory, which differs between ranks.
        own = values.to(torch.float32, copy=True)
        moved = torch.stack([moved_outputs(head.clone(), own, n - window) for head in rows])
        scores.append(add_rows(moved if comm is None else comm.gather_group_rows(moved)))
    pooled = pool(torch.stack(scores), p["pooling"], p.get("kernel"))
    return LayerScores(layer, num_layers, inputs.num_kv_heads, pooled, device=pooled.device)


def moved_outputs(attention: Tensor, values: Tensor, m: int) -> Tensor:
    """Squared change of one query head's outputs, summed over the rows, if each of the first m tokens were dropped.

    attention fp32 [w, n], which is overwritten; values fp32 [n, d]. fp32 [m].
    """
    largest, top = attention.max(1, keepdim=True)
    attention.scatter_(1, top, 0.0)
    rest = attention @ values
    top_values = values[top[:, 0]]
    outputs = rest + largest * top_values
    squares = values[:m].square().sum(1) + outputs.square().sum(1, keepdim=True)
    distances = (squares - 2 * (outputs @ values[:m].t())).clamp_(min=0)
    others = attention[:, :m]
    moved = (others / (1 - others)).square_().mul_(distances)
    # Where no other token has any attention, there is no output without the largest.
    rest_outputs = rest / attention.sum(1, keepdim=True).clamp_(min=torch.finfo(rest.dtype).tiny)
    by_largest = (largest * (top_values - rest_outputs)).square().sum(1, keepdim=True)
    is_top = top == torch.arange(m, device=top.device)
    return torch.where(is_top, by_largest, moved).sum(0)


register(
    Policy(
        "dropkv",
        "what moves the heads' outputs most if it is dropped; all heads of all layers compete",
        "DropKV",
        score,
        whole_model.select_best,
        (WINDOW, KERNEL, measured(POOLING, "decay")),
        needs=(Q_WINDOW, VALUES),
        schedule="by score",
        always_kept=("window",),
        experimental=True,
        parts=False,  # the values that earlier parts have left move the outputs, too
        url="https://openreview.net/forum?id=MqfNzH3TVH",
    )
)
