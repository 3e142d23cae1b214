"""The two steps of every decision: score a layer, then select what it keeps."""

from collections.abc import Sequence

import torch

from .config import EvictionConfig
from .layer import Comm, Kept, LayerInputs, LayerScores
from .registry import lookup
from .rows import are_ragged, check_rows, score_rows


def score_layer(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None = None
) -> LayerScores:
    """Scores of the tokens of one layer.

    layer: index among the num_layers layers of the whole model that hold a full-attention cache, also
    when this process runs only some of them. comm: the tensor-parallel group, None for one device; where
    a KV head is replicated on several ranks this call is a collective.

    Nothing is read and scores are None where nothing is evicted (cfg.evicts(n) is False).
    With inputs.lengths or inputs.pinned every row is scored as if it were alone, without what is pinned.
    Raises ValueError naming the tensor that is missing or has a wrong shape.
    """
    inputs.check()
    _check_layer(layer, num_layers, inputs.num_kv_heads, comm)
    if are_ragged(inputs):
        with torch.no_grad():
            return score_rows(cfg, inputs, layer, num_layers, comm)
    if not cfg.evicts(inputs.num_tokens):
        return LayerScores(layer, num_layers, inputs.num_kv_heads, device=inputs.keys.device)
    with torch.no_grad():
        return lookup(cfg.policy).score(cfg, inputs, layer, num_layers, comm)


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None = None) -> Kept:
    """What a prompt of n tokens keeps: kept[i][kv_head], int64, strictly ascending, for layers[i].

    Indices count in stored order, which at a first eviction is the position. Layer-local policies take
    any subset of the layers, in any order; others take all of them, or, where layers compete by weight
    (LAVa, CAKE), any whose `budget` is set. Under comm, each rank gets its own KV heads, and the call is a
    collective for policies that compare heads. Raises ValueError for scores that do not fit n.

    Of rows with lengths of their own, indices count within the row: 0 is its first entry, pinned or not. Pinned ones
    are kept, and the budget counts the others; n plays no part.
    """
    for x in layers:
        _check_layer(x.layer, x.num_layers, x.num_kv_heads, comm)
    if not layers:
        return []
    if any(map(are_ragged, layers)):
        check_rows(cfg, layers)
        return lookup(cfg.policy).select(cfg, layers, n, comm)
    return lookup(cfg.policy if cfg.evicts(n) else "full").select(cfg, layers, n, comm)


def decide(cfg: EvictionConfig, inputs: Sequence[LayerInputs]) -> Kept:
    """select(score_layer(...) of each layer): kept[layer][kv_head] of a whole model on one device."""
    lengths = {x.num_tokens for x in inputs}
    if len(lengths) > 1 and not all(map(are_ragged, inputs)):
        raise ValueError(f"keys must have the same number of tokens in every layer, not {sorted(lengths)}")
    scores = [score_layer(cfg, x, layer, len(inputs)) for layer, x in enumerate(inputs)]
    return select(cfg, scores, max(lengths, default=0))


def _check_layer(layer: int, num_layers: int, num_kv_heads: int, comm: Comm | None) -> None:
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be in 0..{num_layers - 1} (num_layers={num_layers}), not {layer}")
    if comm is not None and (local := comm.local_heads).stop - local.start != num_kv_heads:
        raise ValueError(
            f"comm places KV heads {local.start}..{local.stop - 1} here, but the layer has {num_kv_heads}"
        )
