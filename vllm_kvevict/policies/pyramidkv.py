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


def layer_budgets(cfg: EvictionConfig, n: int, num_layers: int) -> list[int]:
    """Tokens per KV head that each layer of the model keeps, window included."""
    window = cfg.window_for(n)
    beta, rounding = cfg.params["beta"], cfg.params["pyramid_rounding"]
    past = pyramid_budgets(cfg.budget_for(n) - window, n - window, num_layers, beta, rounding)
    return [window + budget for budget in past]


def past_budgets(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int) -> list[int]:
    """Tokens per KV head that each of `layers` keeps besides the window."""
    budgets = layer_budgets(cfg, n, layers[0].num_layers)
    return [budgets[x.layer] - cfg.window_for(n) for x in layers]


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window and the layer's budget of best tokens of each head."""
    return select_uniform(layers, past_budgets(cfg, layers, n), n, cfg.window_for(n))


register(
    Policy(
        "pyramidkv",
        "as snapkv, with fewer tokens in higher layers",
        "PyramidKV eq. 1-3",
        snapkv.score,
        select,
        PARAMETERS,
        needs=("q_window",),
        window_rows="mean",
        layer_budgets=layer_budgets,
        always_kept=("window",),
        url="https://arxiv.org/abs/2406.02069",
    )
)
