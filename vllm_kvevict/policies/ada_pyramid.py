"""ada-pyramid: PyramidKV's layer budgets, each shared by the heads of its layer (Ada-KV, Alg. 2)."""

from collections.abc import Sequence

from . import pyramidkv, snapkv
from .config import EvictionConfig
from .heads import select_adaptive
from .layer import Comm, Kept, LayerScores
from .params import ADA_SAFEGUARD, ALPHA, TP_LOCAL
from .registry import Policy, register

PARAMETERS = (*pyramidkv.PARAMETERS, ALPHA, ADA_SAFEGUARD, TP_LOCAL)


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window of each head and its share of the layer's pyramid budget."""
    budgets = pyramidkv.past_budgets(cfg, layers, n)
    return select_adaptive(cfg, layers, budgets, n, comm)


register(
    Policy(
        "ada-pyramid",
        "as ada-snapkv, with pyramidkv's layer budgets",
        "Ada-KV Alg. 2",
        snapkv.score,
        select,
        PARAMETERS,
        needs=("q_window",),
        window_rows="mean",
        layer_budgets=pyramidkv.layer_budgets,
        heads_compete=True,
        always_kept=("window",),
        url="https://arxiv.org/abs/2407.11550",
    )
)
