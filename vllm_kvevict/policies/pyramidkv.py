"""pyramidkv: SnapKV's scores with budgets that fall from the bottom to the top layer (PyramidKV, eq. 1-3).

The paper uses window=8; the default is SnapKV's, so that policies compare at one budget and window.
"""

from dataclasses import replace

from . import snapkv
from .budgets import pyramid_budgets
from .config import EvictionConfig
from .params import BETA
from .registry import register

PARAMETERS = (*snapkv.PARAMETERS, BETA)


def layer_budgets(cfg: EvictionConfig, n: int, num_layers: int) -> list[int]:
    """Tokens per KV head that each layer of the model keeps, window included."""
    window = cfg.window_for(n)
    past = pyramid_budgets(cfg.budget_for(n) - window, n - window, num_layers, cfg.params["beta"])
    return [window + budget for budget in past]


register(
    replace(
        snapkv.POLICY,
        name="pyramidkv",
        summary="as snapkv, with fewer tokens in higher layers",
        source="PyramidKV eq. 1-3",
        parameters=PARAMETERS,
        layer_budgets=layer_budgets,
        decodes=False,
        url="https://arxiv.org/abs/2406.02069",
    )
)
