"""snapkv: per KV head, the tokens that the last `window` queries attend to most (SnapKV, section 4).

The paper's defaults are Ada-KV's evaluation setting (max-pooling 7); SnapKV's own is pooling="avg", kernel=5. They lose
answers of more than a few tokens: what is read at the end of the answer is not attended to yet, and seven tokens do not
reach it. The measured ones keep more behind each token that is found (pooling="decay"), and let a token count as much
as the one query that attends to it most (rows="recent"); in the mean over 32 queries such a token is lost.
"""

from .attention import window_scores
from .config import EvictionConfig
from .heads import best_of_each_head
from .inputs import Q_WINDOW
from .layer import Comm, LayerInputs, LayerScores
from .params import GQA, KERNEL, POOLING, ROWS, WINDOW, measured
from .registry import Policy, register

PARAMETERS = (WINDOW, KERNEL, measured(POOLING, "decay"), measured(GQA, "max"), measured(ROWS, "recent"))


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """Pooled attention of the window; every policy built on SnapKV scores uses this."""
    p = cfg.params
    window = cfg.window_for(inputs.num_tokens)
    scores = window_scores(
        inputs, window, rows=p["rows"], gqa=p["gqa"], pooling=p["pooling"], kernel=p.get("kernel"), comm=comm
    )
    return LayerScores(layer, num_layers, inputs.num_kv_heads, scores, device=scores.device)


POLICY = Policy(
    "snapkv",
    "per head, what the last `window` tokens attend to most",
    "SnapKV 4",
    score,
    best_of_each_head,
    PARAMETERS,
    needs=(Q_WINDOW,),
    window_rows="mean",
    always_kept=("window",),
    decodes=True,
    scores_rows=True,
    url="https://arxiv.org/abs/2404.14469",
)
register(POLICY)
