"""First tokens that always stay, whatever they score."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from .config import EvictionConfig
from .heads import past_scores
from .layer import LayerScores


def num_sinks(cfg: EvictionConfig, n: int) -> int:
    """First tokens that stay (0 without the parameter); a small ratio shrinks them to fit beside the window."""
    sinks: int = cfg.params.get("sinks", 0)
    budget, window = cfg.budget_for(n), cfg.window_for(n)
    if window < cfg.params.get("window", 0):
        return min(sinks, budget // 2)
    return min(sinks, budget - window)


def keep_sinks(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int) -> list[LayerScores]:
    """The same scores, but for the first tokens' that stay: no other of their head's is as high or comes first."""
    sinks, m = num_sinks(cfg, n), n - cfg.window_for(n)
    if not sinks:
        return list(layers)

    def lifted(scores: Tensor) -> Tensor:
        return torch.cat((torch.full_like(scores[:, :sinks], torch.inf), scores[:, sinks:]), 1)

    return [dataclasses.replace(x, scores=lifted(past_scores(x, m))) for x in layers]
