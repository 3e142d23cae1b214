"""Decisions that need all layers of the model: budgets in proportion to the layers' weights."""

from collections.abc import Sequence

import torch

from .budgets import dynamic_layer_budgets, provisional_layer_budgets
from .config import EvictionConfig
from .layer import LayerScores


def layer_budgets(cfg: EvictionConfig, weights: Sequence[float], n: int) -> list[int]:
    """Candidates per KV head that each layer keeps of a prompt of n tokens, from the weights of all layers.

    For policies whose layers compete by weight (LAVa, CAKE), where no process holds all layers: put the result
    into LayerScores.budget and call `select` with any of the layers.
    """
    window = cfg.window_for(n)
    return dynamic_layer_budgets(weights, cfg.budget_for(n) - window, n - window)


def provisional_budgets(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int) -> list[int]:
    """Candidates per KV head that `layers`, the model's first, may still need when the others are known."""
    window = cfg.window_for(n)
    m, b = n - window, cfg.budget_for(n) - window
    return provisional_layer_budgets(_weights(cfg, layers), b, m, layers[0].num_layers)


def shared_budgets(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int) -> list[int]:
    """Candidates per KV head that each of `layers` keeps: their `budget` where it is set, else by weight.

    Raises ValueError where weights are missing or some layer of the model is.
    """
    given = [x.budget for x in layers if x.budget is not None]
    if len(given) == len(layers):
        return given
    require_all_layers(cfg, layers)
    in_order = sorted(layers, key=lambda x: x.layer)
    budgets = layer_budgets(cfg, _weights(cfg, in_order), n)
    return [budgets[x.layer] for x in layers]


def _weights(cfg: EvictionConfig, layers: Sequence[LayerScores]) -> list[float]:
    if any(x.weight is None for x in layers):
        raise ValueError(
            f"weight is required in every layer: policy {cfg.policy} shares its budget by weight"
        )
    # All weights come to the host in one transfer.
    weights: list[float] = torch.stack(
        [torch.as_tensor(x.weight, dtype=torch.float64) for x in layers]
    ).tolist()
    return weights


def require_all_layers(cfg: EvictionConfig, layers: Sequence[LayerScores]) -> None:
    """Raise ValueError unless every layer of the model is there once."""
    if sorted(x.layer for x in layers) != list(range(layers[0].num_layers)):
        raise ValueError(
            f"policy {cfg.policy} decides over all {layers[0].num_layers} layers together, but was given layers "
            f"{[x.layer for x in layers]}"
        )
