"""layer-defensivekv: defensivekv's scores, all heads of all layers sharing one budget (DefensiveKV: Feng et al. 2025).

The L*Hkv*(B - window) best candidates of the whole model stay: the order is by score, then position, then layer, then
head. Decided after the last layer, with the scores of all layers in one process. Parameters as in defensivekv, without
tp_local.
"""

from collections.abc import Sequence

import torch

from . import defensivekv
from .config import EvictionConfig
from .heads import past_scores, with_window
from .layer import Comm, Kept, LayerScores
from .registry import Policy, register
from .select import best_positions, count_best, order_keys
from .shares import require_all_layers


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window of each head and its part of the model's best candidates."""
    require_all_layers(cfg, layers)
    window = cfg.window_for(n)
    heads = layers[0].num_kv_heads if comm is None else comm.num_kv_heads_total
    first = 0 if comm is None else comm.local_heads.start
    rows = len(layers) * heads
    # The heads of all layers compete as those of one layer do elsewhere: layer by layer, then by head.
    keys = [order_keys(past_scores(x, n - window), x.layer * heads + first, rows) for x in layers]
    counted = count_best([torch.cat(keys)], [rows * (cfg.budget_for(n) - window)], [0], comm)
    counts = counted.view(len(layers), -1).tolist()
    return [with_window(best_positions(*pair), n, window) for pair in zip(keys, counts, strict=True)]


register(
    Policy(
        "layer-defensivekv",
        "as defensivekv, all heads of all layers compete",
        "DefensiveKV, authors' code",
        defensivekv.score,
        select,
        defensivekv.SCORING,
        needs=("q_window", "values", "w_o"),
        schedule="by score",
        always_kept=("window",),
        experimental=True,
    )
)
