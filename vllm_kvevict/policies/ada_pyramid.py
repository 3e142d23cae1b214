"""ada-pyramid: PyramidKV's layer budgets, each shared by the heads of its layer (Ada-KV, Alg. 2)."""

from collections.abc import Sequence

from . import pyramidkv, snapkv
from .config import EvictionConfig
from .heads import select_adaptive
from .layer import Comm, Kept, LayerScores
from .params import ADA_SAFEGUARD, ALPHA
from .registry import Policy, register

PARAMETERS = (*pyramidkv.PARAMETERS, ALPHA, ADA_SAFEGUARD)


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window of each head and its share of the layer's pyramid budget."""
    budgets = pyramidkv.layer_budgets(cfg, layers, n)
    alpha, rule = cfg.params["alpha"], cfg.params["ada_safeguard"]
    return select_adaptive(layers, budgets, n, cfg.window_for(n), alpha=alpha, rule=rule, comm=comm)


register(Policy("ada-pyramid", snapkv.score, select, PARAMETERS, needs_queries=True, always_kept="window"))
