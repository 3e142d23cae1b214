"""streaming-llm: the first tokens (attention sinks) and the most recent ones (StreamingLLM, section 3.2).

Kept entries stay at their original positions; the original work renumbers them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import EvictionConfig
from .layer import Comm, Kept, LayerInputs, LayerScores
from .params import SINKS
from .registry import Policy, register
from .rows import RaggedRows, are_ragged


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """No scores: positions alone decide."""
    return LayerScores(layer, num_layers, inputs.num_kv_heads, device=inputs.keys.device)


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """Positions 0..sinks-1 and the last B - sinks, the same in every layer and head.

    Where a ratio gives B <= sinks, sinks shrink to B//2, so that the last token always stays. Rows of different
    lengths likewise, each by what it has that is not pinned.
    """
    if are_ragged(layers[0]):
        return [_ends_of_rows(cfg, layer) for layer in layers]
    budget = cfg.budget_for(n)
    sinks = cfg.params["sinks"]
    if budget <= sinks:
        sinks = budget // 2
    kept = []
    for layer in layers:
        positions = torch.arange(budget, device=layer.device)
        positions[sinks:] += n - budget
        kept.append(list(positions.repeat(layer.num_kv_heads, 1).unbind(0)))
    return kept


def _ends_of_rows(cfg: EvictionConfig, layer: LayerScores) -> list[Tensor]:
    """For each row what is pinned, the `sinks` entries behind that, and the last ones; all of a row that fits."""
    rows, kept = RaggedRows.of(layer), []
    for length, pinned in zip(rows.lengths, rows.pinned, strict=True):
        positions = torch.arange(min(length, pinned + cfg.budget_for(length)), device=layer.device)
        positions[pinned + cfg.params["sinks"] :] += length - len(positions)
        kept.append(positions)
    return kept


register(
    Policy(
        "streaming-llm",
        "the first `sinks` and the last tokens",
        "StreamingLLM 3.2",
        score,
        select,
        (SINKS,),
        always_kept=("sinks",),
        decodes=True,
        url="https://arxiv.org/abs/2309.17453",
    )
)
