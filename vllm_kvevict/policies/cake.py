"""cake: layers share the budget by how dispersed and how shifting their attention is (CAKE; LAVa, appendix B).

A[hq, r, i]: attention of row r of the window to candidate i, not renormalised.
c[hq, i] = mean_r A + gamma * var_r A (unbiased), pooled (the paper: average, kernel 5), then the mean over the
           query heads of each KV head: what the b_l best candidates of a head are chosen by
P        = Hs^(1/tau1) * Vt^(1/tau2), with Hs = -sum A log(A + 1e-10) and Vt = sum over hq, i of var_r A:
           the weight by which layers share the budget

gamma=200; tau1=tau2=1 (the authors tune both per model and budget). LAVa evaluated it with pooling="max", kernel=7.
"""

import torch

from .attention import pool, reduce_group, window_rows
from .config import EvictionConfig
from .heads import best_of_each_head
from .inputs import Q_WINDOW
from .layer import Comm, LayerInputs, LayerScores
from .params import GQA, MILLION, WINDOW, choice, kernel_width, limited, measured, real, unless
from .registry import Policy, register

PARAMETERS = (
    WINDOW,
    unless(kernel_width(5), pooling="decay"),
    measured(choice("pooling", "avg", "max", "none", "decay"), "decay"),
    GQA,
    limited(real("gamma", 200.0), MILLION),
    real("tau1", 1.0, positive=True),
    real("tau2", 1.0, positive=True),
)


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """Mean and variance of the window's attention; the weight is the preference P."""
    p = cfg.params
    window = cfg.window_for(inputs.num_tokens)
    m = inputs.num_tokens - window
    scores, spread = [], []
    scratch = None
    for rows in window_rows(inputs, window):
        past = rows[:, :, :m]
        scratch = torch.empty_like(past) if scratch is None else scratch
        mean = past.mean(1)
        # torch.var is twenty times slower along this dimension.
        squares = torch.sub(past, mean[:, None], out=scratch).square_()
        variance = squares.sum(1).div_(max(1, window - 1))
        indicator = pool(mean + p["gamma"] * variance, p["pooling"], p.get("kernel"))
        scores.append(reduce_group(indicator, p["gqa"], comm))
        logs = torch.add(past, 1e-10, out=scratch).log_().mul_(past)
        entropy = -logs.sum(2).sum(1, dtype=torch.float64)
        heads = torch.stack([entropy, torch.stack([v.sum(dtype=torch.float64) for v in variance])], 1)
        spread.append(heads if comm is None else comm.gather_group_rows(heads))
    sums = torch.stack(spread)
    if comm is not None:
        sums = comm.gather_heads(sums)
    total_entropy, total_variance = sums.flatten(0, 1).cumsum(0)[-1]
    weight = total_entropy ** (1 / p["tau1"]) * total_variance ** (1 / p["tau2"])
    return LayerScores(
        layer, num_layers, inputs.num_kv_heads, torch.stack(scores), weight, device=inputs.keys.device
    )


register(
    Policy(
        "cake",
        "mean and variance of the window's attention; layers share the budget by dispersion",
        "CAKE; LAVa app. B",
        score,
        best_of_each_head,
        PARAMETERS,
        needs=(Q_WINDOW,),
        schedule="by weight",
        always_kept=("window",),
        url="https://arxiv.org/abs/2503.12491",
    )
)
