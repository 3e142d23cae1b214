"""ada-snapkv: SnapKV's scores, with the heads of a layer sharing one budget (Ada-KV, Alg. 1-2)."""

from collections.abc import Sequence

from . import snapkv
from .config import EvictionConfig
from .heads import select_adaptive
from .layer import Comm, Kept, LayerScores
from .params import ADA_SAFEGUARD, ALPHA
from .registry import Policy, register

PARAMETERS = (*snapkv.PARAMETERS, ALPHA, ADA_SAFEGUARD)


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window of each head and its share of the layer's Hkv*(B - window) tokens."""
    window = cfg.window_for(n)
    budgets = [cfg.budget_for(n) - window] * len(layers)
    alpha, rule = cfg.params["alpha"], cfg.params["ada_safeguard"]
    return select_adaptive(layers, budgets, n, window, alpha=alpha, rule=rule, comm=comm)


register(Policy("ada-snapkv", snapkv.score, select, PARAMETERS, needs_queries=True, always_kept="window"))
