"""From scores and layer budgets to kept positions: the same number for every KV head, or Ada-KV's numbers."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from .budgets import MILLION, guaranteed_tokens, safeguard
from .config import EvictionConfig
from .layer import Comm, Kept, LayerScores
from .registry import lookup
from .row_heads import best_of_rows
from .rows import are_ragged
from .select import best_of_layers, count_best, order_keys
from .shares import shared_budgets
from .sinks import num_sinks


def best_of_each_head(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """As a policy's `select`: the sinks, the window and the best others of each head, as many as its layer may keep."""
    if are_ragged(layers[0]):
        return best_of_rows(cfg, layers, comm)
    return select_uniform(keep_sinks(cfg, layers, n), past_budgets(cfg, layers, n), n, cfg.window_for(n))


def best_of_each_layer(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """Likewise, with the layer's best others, whichever heads they belong to (`adaptive_counts`)."""
    if are_ragged(layers[0]):
        return best_of_rows(cfg, layers, comm)
    return select_adaptive(cfg, keep_sinks(cfg, layers, n), past_budgets(cfg, layers, n), n, comm)


def past_budgets(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int) -> list[int]:
    """Tokens per KV head that each of `layers` keeps besides the window, by their weights if the policy has some."""
    if lookup(cfg.policy).schedule == "by weight":
        return shared_budgets(cfg, layers, n)
    budgets = cfg.layer_budgets(n, layers[0].num_layers)
    return [budgets[x.layer] - cfg.window_for(n) for x in layers]


def keep_sinks(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int) -> list[LayerScores]:
    """The same scores, but for the first tokens' that stay: no other of their head's is as high or comes first."""
    sinks, m = num_sinks(cfg, n), n - cfg.window_for(n)
    if not sinks:
        return list(layers)

    def lifted(scores: Tensor) -> Tensor:
        return torch.cat((torch.full_like(scores[:, :sinks], torch.inf), scores[:, sinks:]), 1)

    return [dataclasses.replace(x, scores=lifted(past_scores(x, m))) for x in layers]


def select_uniform(layers: Sequence[LayerScores], budgets: Sequence[int], n: int, window: int) -> Kept:
    """Every KV head of layers[i] keeps its budgets[i] best candidates and the window."""
    keys = [order_keys(past_scores(layer, n - window)) for layer in layers]
    counts = [[b] * len(rows) for b, rows in zip(budgets, keys, strict=True)]
    return [with_window(positions, n, window) for positions in best_of_layers(keys, counts)]


def select_adaptive(
    cfg: EvictionConfig, layers: Sequence[LayerScores], budgets: Sequence[int], n: int, comm: Comm | None
) -> Kept:
    """The heads of layers[i] share Hkv*budgets[i] candidates (`adaptive_counts`); each keeps the window too."""
    window = cfg.window_for(n)
    keys, counts = adaptive_counts(cfg, layers, budgets, n, comm)
    return [with_window(positions, n, window) for positions in best_of_layers(keys, counts)]


def adaptive_counts(
    cfg: EvictionConfig, layers: Sequence[LayerScores], budgets: Sequence[int], n: int, comm: Comm | None
) -> tuple[list[Tensor], list[list[int]]]:
    """Order keys of every layer, and how many candidates each of its heads may keep by Ada-KV Alg. 1-2.

    Parameters that count, where the policy has them: alpha (else 0) and ada_safeguard (else "interp"), as in
    `safeguard`; "guarantee": each head first owns its floor(alpha*b) best, the rest goes to the best of the
    layer. Without the safeguard (alpha=0) the kept score is the largest possible for that many entries (Ada-KV
    theorem 3.3). Under tensor parallelism the heads of all ranks compete; the counts are those of this rank's
    heads.
    """
    params = cfg.params
    alpha, is_guaranteed = params.get("alpha", 0.0), params.get("ada_safeguard") == "guarantee"
    keys = [_keys(layer, n - cfg.window_for(n), comm) for layer in layers]
    heads = layers[0].num_kv_heads if comm is None else comm.num_kv_heads_total
    own = [guaranteed_tokens(alpha, b) if is_guaranteed else 0 for b in budgets]
    counted = count_best(keys, [heads * b for b in budgets], own, comm)
    if is_guaranteed:
        return keys, counted.tolist()
    if comm is not None:
        counted = comm.gather_heads(counted.T).T
    # All counts come to the host in one transfer.
    shares = [safeguard(counts, b, alpha) for counts, b in zip(counted.tolist(), budgets, strict=True)]
    return keys, shares if comm is None else [counts[comm.local_heads] for counts in shares]


def most_candidates(cfg: EvictionConfig, b: int, m: int, local: int, heads: int) -> int:
    """The most candidates that `local` of a layer's `heads` KV heads can be given together, whatever the scores.

    b: candidates per head on average. m: candidates that each head has. For whoever needs room before there are scores;
    without competition, or where all competing heads are meant, it is the number they are given.
    """
    if not cfg.heads_compete or local == heads:
        return local * min(b, m)
    alpha, is_guaranteed = cfg.params.get("alpha", 0.0), cfg.params.get("ada_safeguard") == "guarantee"
    if is_guaranteed:
        own = guaranteed_tokens(alpha, b)
        return local * own + min(heads * (b - own), local * (m - own))
    uniform = round(alpha * MILLION)
    won = min(heads * b, local * m)
    # Each head's share is rounded up at most.
    rounding = local if uniform else 0
    shares = ((MILLION - uniform) * won + uniform * local * b) // MILLION + rounding
    return min(shares, local * m)


def _keys(layer: LayerScores, m: int, comm: Comm | None) -> Tensor:
    scores = past_scores(layer, m)
    if comm is None:
        return order_keys(scores)
    return order_keys(scores, comm.local_heads.start, comm.num_kv_heads_total)


def past_scores(layer: LayerScores, m: int) -> Tensor:
    """The layer's scores [Hkv, m]. Raises ValueError if they are missing or of another shape."""
    scores = layer.scores
    if scores is None or scores.shape != (layer.num_kv_heads, m):
        found = None if scores is None else list(scores.shape)
        raise ValueError(f"scores of layer {layer.layer} must be [{layer.num_kv_heads}, {m}], not {found}")
    return scores


def with_window(past: list[Tensor], n: int, window: int) -> list[Tensor]:
    """For each KV head its chosen candidates and then the last `window` of n positions."""
    last = torch.arange(n - window, n, device=past[0].device)
    return [torch.cat((positions, last)) for positions in past]
