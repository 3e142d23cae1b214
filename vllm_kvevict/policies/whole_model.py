"""One budget for all KV heads of all layers: the L*Hkv*(B - window) best candidates of the model stay.

Sinks, where a policy has them, come before all others. The order is by score, then position, then layer, then head. A
process that holds all layers chooses at once (`select_best`). Of several, each keeps what lies at or above a cut that
they find together (`cuts`, `select_above`).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vllm_kvevict.kernels.masks import true_places

from .config import EvictionConfig
from .heads import keep_sinks, past_scores, with_window
from .layer import Comm, Kept, LayerScores
from .select import best_positions, count_best, order_keys
from .shares import require_all_layers


def order_of(
    cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None
) -> Iterator[Tensor]:
    """Order keys of the candidates of some of the model's layers, int64 [Hkv, m] each; distinct over the model."""
    heads = layers[0].num_kv_heads if comm is None else comm.num_kv_heads_total
    first = 0 if comm is None else comm.local_heads.start
    rows = layers[0].num_layers * heads
    m = n - cfg.window_for(n)
    for given in layers:
        (x,) = keep_sinks(cfg, [given], n)
        # The heads of all layers compete as those of one layer do elsewhere: layer by layer, then by head.
        yield order_keys(past_scores(x, m), x.layer * heads + first, rows)


def wanted(cfg: EvictionConfig, n: int, num_layers: int, num_kv_heads: int) -> int:
    """How many candidates a model of so many layers and KV heads (of all ranks) keeps of n tokens."""
    return num_layers * num_kv_heads * (cfg.budget_for(n) - cfg.window_for(n))


def select_best(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window of each head and its part of the model's best candidates.

    Raises:
        ValueError: some layer of the model is missing.
    """
    require_all_layers(cfg, layers)
    keys = list(order_of(cfg, layers, n, comm))
    heads = layers[0].num_kv_heads if comm is None else comm.num_kv_heads_total
    counted = count_best([torch.cat(keys)], [wanted(cfg, n, len(layers), heads)], [0], comm)
    counts, window = counted.view(len(layers), -1).tolist(), cfg.window_for(n)
    return [with_window(best_positions(*pair), n, window) for pair in zip(keys, counts, strict=True)]


def select_above(
    cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, cut: int, comm: Comm | None
) -> Kept:
    """The window of each head and its candidates whose key is at least the cut; for any of the model's layers."""
    stay = [keys >= cut for keys in order_of(cfg, layers, n, comm)]
    # All counts come to the host in one transfer.
    counts = torch.stack([rows.sum(1) for rows in stay]).tolist()
    kept = []
    for rows, each in zip(stay, counts, strict=True):
        found = true_places(rows, sum(each)) % rows.shape[1]
        kept.append(with_window(list(found.split(each)), n, cfg.window_for(n)))
    return kept
