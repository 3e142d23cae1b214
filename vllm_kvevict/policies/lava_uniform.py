"""lava-uniform: LAVa without its layer budgets (LAVa, section 4.3, "-layer"). Every layer gets b = B - window."""

from collections.abc import Sequence

from . import lava
from .config import EvictionConfig
from .heads import select_adaptive
from .layer import Comm, Kept, LayerScores
from .registry import Policy, register


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window of each head and the best Hkv*b candidates of each layer."""
    budgets = [cfg.budget_for(n) - cfg.window_for(n)] * len(layers)
    return select_adaptive(cfg, layers, budgets, n, comm)


register(
    Policy(
        "lava-uniform",
        "lava's scores, the same budget in every layer, heads compete",
        "LAVa 4.3",
        lava.score_unweighted,
        select,
        lava.PARAMETERS,
        needs=("q_window", "values"),
        window_rows="mean",
        heads_compete=True,
        always_kept=("window",),
        url="https://arxiv.org/abs/2509.09754",
    )
)
