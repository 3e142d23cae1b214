"""defensivekv: tokens by the worst case of their attention and value, not by the mean (DefensiveKV: Feng et al. 2025).

Follows the authors' code where it is clear, otherwise what it means to do; experimental. For each KV head h, with A
the attention of the window's rows r in its query heads hq to the m candidates:

p[hq, r]    = average-pooled A[hq, r] (the paper: kernel 5), rescaled to the sum of A[hq, r]
worst[h, i] = max over hq and r of p[hq, r, i]
s[h, i]     = max(worst[h, i], mean_i worst[h]) * N[h, i] / sum_h' N[h', i], N the projected value norm of criticalkv
lift: tokens in order of a[h, i] = mean over hq and r of A, at most B - window of them, while the share of the head's
      past mass (sum_i a) that they hold stays below mass=0.9 less the window's mass, get the layer's largest s

Factors with a divisor of 0 are 0, and a head without past mass lifts nothing. The best Hkv*(B - window) candidates of
the layer stay, whichever heads they belong to, and each head's window=32.
"""

import torch
from torch import Tensor

from .attention import add_rows, pool, reduce_group, window_rows
from .config import EvictionConfig
from .heads import best_of_each_layer
from .inputs import Q_WINDOW, VALUES, W_O
from .layer import Comm, LayerInputs, LayerScores
from .norms import projected_norms
from .params import WINDOW, kernel_width, measured, unit_interval
from .registry import Policy, register

PARAMETERS = (
    WINDOW,
    measured(kernel_width(5), 31),
    unit_interval("mass", 0.9),
)


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """Worst-case attention times value norm, the surely needed tokens lifted."""
    p = cfg.params
    n, window = inputs.num_tokens, cfg.window_for(inputs.num_tokens)
    norms = projected_norms(inputs, n - window, comm)
    shares = _ratio(norms, add_rows(norms if comm is None else comm.gather_heads(norms)))
    scores, lifted = [], []
    for rows in window_rows(inputs, window):
        past = rows[:, :, : n - window]
        # One query head at a time: the pooled rows take as much memory as the attention itself.
        worst = reduce_group(torch.stack([_worst(head, p["kernel"]) for head in past]), "max", comm)
        mean = reduce_group(torch.stack([head.mean(0) for head in past]), "mean", comm)
        scores.append(torch.maximum(worst, worst.mean()))
        lifted.append(_lifted(mean, p["mass"], cfg.budget_for(n) - window))
    result = torch.stack(scores) * shares
    largest = result.amax(1)
    if comm is not None:
        largest = comm.gather_heads(largest)
    result = torch.where(torch.stack(lifted), largest.amax(), result)
    return LayerScores(layer, num_layers, inputs.num_kv_heads, result, device=result.device)


def _worst(rows: Tensor, kernel: int) -> Tensor:
    """One query head's attention [w, m] -> [m]: pooled, every row with its own sum, the largest over rows."""
    pooled = pool(rows, "avg", kernel)
    return pooled.mul_(_ratio(rows.sum(1), pooled.sum(1))[:, None]).amax(0)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 where the whole is 0."""
    return torch.where(whole > 0, part / whole, 0.0)


def _lifted(mean: Tensor, mass: float, most: int) -> Tensor:
    """Which candidates of one head are lifted: bool [m], from their mean attention [m]."""
    order = mean.argsort(descending=True, stable=True)
    # Integer sums are the same in every order of summation; in floating point a GPU's cumsum is not.
    held = mean[order].double().mul(2.0**60).long().cumsum(0)
    past = held[-1].double()
    limit = mass - (1 - past / 2.0**60)
    below = (held.double() / past < limit) & (past > 0)
    below[most:] = False
    return torch.zeros_like(below).scatter_(0, order, below)


POLICY = Policy(
    "defensivekv",
    "worst-case attention x projected value norm, heads compete",
    "DefensiveKV, authors' code",
    score,
    best_of_each_layer,
    PARAMETERS,
    needs=(Q_WINDOW, VALUES, W_O),
    heads_compete=True,
    always_kept=("window",),
    experimental=True,
    url="https://arxiv.org/abs/2510.13334",
)
register(POLICY)
