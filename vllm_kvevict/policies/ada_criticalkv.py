"""ada-criticalkv: criticalkv's two rounds with Ada-KV's head budgets (CriticalKV: Feng et al. 2025; Ada-KV, Alg. 1-2).

The heads of a layer share Hkv*(B - window) tokens by SnapKV's scores s, as in ada-snapkv (alpha=0.2, ada_safeguard);
each fills its share b_h in two rounds, of which the first takes floor(first*b_h), first=0.5.
"""

from collections.abc import Sequence
from dataclasses import replace

from . import criticalkv
from .config import EvictionConfig
from .criticalkv import select_in_rounds
from .heads import adaptive_counts
from .layer import Comm, Kept, LayerScores
from .params import ADA_SAFEGUARD, ALPHA
from .registry import register

PARAMETERS = (*criticalkv.PARAMETERS, ALPHA, ADA_SAFEGUARD)


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The window of each head and its share of the layer's Hkv*(B - window) tokens."""
    budgets = [cfg.budget_for(n) - cfg.window_for(n)] * len(layers)
    keys, counts = adaptive_counts(cfg, layers, budgets, n, comm)
    return select_in_rounds(cfg, layers, keys, counts, n)


register(
    replace(
        criticalkv.POLICY,
        name="ada-criticalkv",
        summary="as criticalkv, the heads of a layer compete for its budget",
        source="CriticalKV; Ada-KV Alg. 2",
        select=select,
        parameters=PARAMETERS,
        heads_compete=True,
    )
)
