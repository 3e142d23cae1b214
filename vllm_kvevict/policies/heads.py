"""From scores and layer budgets to kept positions: the same number for every KV head, or Ada-KV's numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .budgets import guaranteed_tokens, safeguard
from .layer import Comm, Kept, LayerScores
from .select import best_positions, count_best, order_keys


def select_uniform(layers: Sequence[LayerScores], budgets: Sequence[int], n: int, window: int) -> Kept:
    """Every KV head of layers[i] keeps its budgets[i] best candidates and the window."""
    kept = []
    for layer, b in zip(layers, budgets, strict=True):
        scores = past_scores(layer, n - window)
        kept.append(_with_window(best_positions(order_keys(scores), [b] * len(scores)), n, window))
    return kept


def select_adaptive(
    layers: Sequence[LayerScores],
    budgets: Sequence[int],
    n: int,
    window: int,
    *,
    alpha: float,
    rule: str,
    comm: Comm | None,
) -> Kept:
    """The heads of layers[i] share Hkv*budgets[i] candidates by Ada-KV Alg. 1-2; each keeps the window too.

    rule: "interp" and "paper" as in `safeguard`; "guarantee": each head first owns its floor(alpha*b) best,
    the rest goes to the best of the layer. Without the safeguard (interp, alpha=0) the kept score is the
    largest possible for that many entries (Ada-KV theorem 3.3). Under tensor parallelism the heads of all
    ranks compete; this rank's heads are returned.
    """
    counted = []
    for layer, b in zip(layers, budgets, strict=True):
        scores = past_scores(layer, n - window)
        keys = order_keys(scores if comm is None else comm.gather_heads(scores))
        guaranteed = guaranteed_tokens(alpha, b) if rule == "guarantee" else 0
        counted.append(count_best(keys, len(keys) * b, guaranteed))
    kept = []
    # All counts come to the host in one transfer.
    for layer, b, counts in zip(layers, budgets, torch.stack(counted).tolist(), strict=True):
        if rule != "guarantee":
            counts = safeguard(counts, b, alpha, rule)
        if comm is not None:
            counts = counts[comm.local_heads]
        keys = order_keys(past_scores(layer, n - window))
        kept.append(_with_window(best_positions(keys, counts), n, window))
    return kept


def past_scores(layer: LayerScores, m: int) -> Tensor:
    """The layer's scores [Hkv, m]. Raises ValueError if they are missing or of another shape."""
    scores = layer.scores
    if scores is None or scores.shape != (layer.num_kv_heads, m):
        found = None if scores is None else list(scores.shape)
        raise ValueError(f"scores of layer {layer.layer} must be [{layer.num_kv_heads}, {m}], not {found}")
    return scores


def _with_window(past: list[Tensor], n: int, window: int) -> list[Tensor]:
    last = torch.arange(n - window, n, device=past[0].device)
    return [torch.cat((positions, last)) for positions in past]
