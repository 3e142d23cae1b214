"""ada-snapkv: SnapKV's scores, with the heads of a layer sharing one budget (Ada-KV, Alg. 1-2)."""

from collections.abc import Sequence

from . import snapkv
from .config import EvictionConfig
from .heads import select_adaptive
from .layer import Comm, Kept, LayerScores
from .params import ADA_SAFEGUARD, ALPHA, TP_LOCAL
from .registry import Policy, register

PARAMETERS = (*snapkv.PARAMETERS, ALPHA, ADA_SAFEGUARD, TP_LOCAL)


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window of each head and its share of the layer's Hkv*(B - window) tokens."""
    budgets = [cfg.budget_for(n) - cfg.window_for(n)] * len(layers)
    return select_adaptive(cfg, layers, budgets, n, comm)


register(
    Policy(
        "ada-snapkv",
        "as snapkv, the heads of a layer compete for its budget",
        "Ada-KV Alg. 1-2",
        snapkv.score,
        select,
        PARAMETERS,
        needs=("q_window",),
        window_rows="mean",
        heads_compete=True,
        always_kept=("window",),
        url="https://arxiv.org/abs/2407.11550",
    )
)
