"""lava-pyramid: LAVa's scores and competing heads, with PyramidKV's layer budgets (LAVa, section 4.3)."""

from collections.abc import Sequence

from . import lava, pyramidkv
from .config import EvictionConfig
from .heads import select_adaptive
from .layer import Comm, Kept, LayerScores
from .params import BETA, PYRAMID_ROUNDING
from .registry import Policy, register


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window of each head and the best Hkv*b_l candidates of each layer."""
    return select_adaptive(cfg, layers, pyramidkv.past_budgets(cfg, layers, n), n, comm)


register(
    Policy(
        "lava-pyramid",
        "lava's scores, pyramidkv's layer budgets, heads compete",
        "LAVa 4.3",
        lava.score_unweighted,
        select,
        (*lava.PARAMETERS, BETA, PYRAMID_ROUNDING),
        needs=("q_window", "values"),
        window_rows="mean",
        layer_budgets=pyramidkv.layer_budgets,
        heads_compete=True,
        always_kept=("window",),
        url="https://arxiv.org/abs/2509.09754",
    )
)
