"""full: no eviction. The name under which a request switches eviction off."""

from collections.abc import Sequence

import torch

from .config import EvictionConfig
from .layer import Comm, Kept, LayerInputs, LayerScores
from .registry import Policy, register


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """No scores."""
    return LayerScores(layer, num_layers, inputs.num_kv_heads, device=inputs.keys.device)


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """All n positions, in every layer and head."""
    return [list(torch.arange(n, device=x.device).repeat(x.num_kv_heads, 1).unbind(0)) for x in layers]


register(Policy("full", "everything: no eviction", "-", score, select, evicts=False))
