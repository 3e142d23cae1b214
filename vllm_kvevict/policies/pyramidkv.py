"""pyramidkv: SnapKV's scores with budgets that fall from the bottom to the top layer (PyramidKV, eq. 1-3).

The paper uses window=8; the default is SnapKV's, so that policies compare at one budget and window.
"""

from collections.abc import Sequence

from . import snapkv
from .budgets import pyramid_budgets
from .config import EvictionConfig
from .heads import select_uniform
from .layer import Comm, Kept, LayerScores
from .params import BETA, PYRAMID_ROUNDING
from .registry import Policy, register

PARAMETERS = (*snapkv.PARAMETERS, BETA, PYRAMID_ROUNDING)


def layer_budgets(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int) -> list[int]:
    """Tokens per KV head that each of `layers` keeps besides the window."""
    window = cfg.window_for(n)
    beta, rounding = cfg.params["beta"], cfg.params["pyramid_rounding"]
    past = cfg.budget_for(n) - window
    return [pyramid_budgets(past, n - window, x.num_layers, beta, rounding)[x.layer] for x in layers]


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window and the layer's budget of best tokens of each head."""
    return select_uniform(layers, layer_budgets(cfg, layers, n), n, cfg.window_for(n))


register(
    Policy(
        "pyramidkv",
        "as snapkv, with fewer tokens in higher layers",
        "PyramidKV eq. 1-3",
        snapkv.score,
        select,
        PARAMETERS,
        needs=("q_window",),
        always_kept=("window",),
    )
)
