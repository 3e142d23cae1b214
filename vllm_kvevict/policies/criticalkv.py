"""criticalkv: part of each head's tokens by attention, the others by attention times what their value adds to the
layer's output (CriticalKV: Feng et al. 2025).

s[h, i] = SnapKV's score
N[h, i] = mean over the query heads hq of KV head h of ||V[h, i] @ Wo[hq]||_1, Wo[hq] [d, hidden] the head's part of
          the output projection
round 1: the floor(first*b) best by s, first=0.5
round 2: of the others, the best by (s + 1e-4) * N until b = B - window are chosen

window, rows, kernel, pooling and gqa as in snapkv. The window is kept apart from both rounds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import snapkv
from .budgets import guaranteed_tokens
from .config import EvictionConfig
from .heads import past_scores, with_window
from .inputs import Q_WINDOW, VALUES, W_O
from .layer import Comm, Kept, LayerInputs, LayerScores
from .norms import projected_norms
from .params import unit_interval
from .registry import Policy, register
from .select import best, best_positions, order_keys

PARAMETERS = (*snapkv.PARAMETERS, unit_interval("first", 0.5))


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """SnapKV's scores, and those of the second round."""
    scores = snapkv.score(cfg, inputs, layer, num_layers, comm).scores
    assert scores is not None
    second = (scores + 1e-4) * projected_norms(inputs, scores.shape[1], comm)
    return LayerScores(layer, num_layers, inputs.num_kv_heads, scores, second=second, device=scores.device)


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window and the B - window tokens of each head that the two rounds choose."""
    window = cfg.window_for(n)
    keys = [order_keys(past_scores(layer, n - window)) for layer in layers]
    counts = [[cfg.budget_for(n) - window] * layer.num_kv_heads for layer in layers]
    return select_in_rounds(cfg, layers, keys, counts, n)


def select_in_rounds(
    cfg: EvictionConfig,
    layers: Sequence[LayerScores],
    keys: Sequence[Tensor],
    counts: Sequence[Sequence[int]],
    n: int,
) -> Kept:
    """The window of each head and counts[layer][head] tokens: by `keys`, the order of s, then by the second score."""
    window = cfg.window_for(n)
    kept = []
    for layer, key, count in zip(layers, keys, counts, strict=True):
        second = layer.second
        if second is None or second.shape != key.shape:
            found = None if second is None else list(second.shape)
            raise ValueError(f"second of layer {layer.layer} must be {list(key.shape)}, not {found}")
        sure = best(key, [guaranteed_tokens(cfg.params["first"], c) for c in count])
        # What round 1 chose stands above all that round 2 ranks.
        ranked = order_keys(second).masked_fill(sure, torch.iinfo(torch.int64).max)
        kept.append(with_window(best_positions(ranked, count), n, window))
    return kept


POLICY = Policy(
    "criticalkv",
    "as snapkv, but half of the tokens by score x projected value norm",
    "CriticalKV",
    score,
    select,
    PARAMETERS,
    needs=(Q_WINDOW, VALUES, W_O),
    window_rows="mean",
    always_kept=("window",),
    url="https://arxiv.org/abs/2502.03805",
)
register(POLICY)
