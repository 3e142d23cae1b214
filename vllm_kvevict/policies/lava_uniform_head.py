"""lava-uniform-head: LAVa without competing heads (LAVa, section 4.3, "-head"). Layers share by entropy."""

from collections.abc import Sequence

from . import lava
from .config import EvictionConfig
from .heads import select_uniform
from .layer import Comm, Kept, LayerScores
from .registry import Policy, register
from .shares import shared_budgets


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window and the b_l best candidates of each head."""
    return select_uniform(layers, shared_budgets(cfg, layers, n), n, cfg.window_for(n))


register(
    Policy(
        "lava-uniform-head",
        "lava's scores, layers share the budget by entropy, the same number in every head",
        "LAVa 4.3",
        lava.score,
        select,
        lava.SCORING,
        needs=("q_window", "values"),
        window_rows="mean",
        schedule="by weight",
        always_kept=("window",),
        url="https://arxiv.org/abs/2509.09754",
    )
)
