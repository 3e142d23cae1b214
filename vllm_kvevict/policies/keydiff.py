"""keydiff: the tokens whose keys differ most in direction from the average key (KeyDiff: Park et al. 2025).

u[h, i] = K[h, i] / max(||K[h, i]||, 1e-12), the anchor a[h] = mean of u[h, i] over all n tokens
s[h, i] = -cos(K[h, i], a[h]), each of the two norms in it at least 1e-8; keys after RoPE, fp32

window=32 last tokens stay (0: none in particular, they compete as all others do). No queries are read, so any
attention kernel will do.
"""

import torch
from torch import Tensor

from .config import EvictionConfig
from .heads import best_of_each_head
from .layer import Comm, LayerInputs, LayerScores
from .params import OPTIONAL_WINDOW
from .registry import Policy, register


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """Cosines with the anchor, negated."""
    m = inputs.num_tokens - cfg.window_for(inputs.num_tokens)
    # Head by head: no copy of all keys, and the same bits however many heads are here.
    scores = torch.stack([-_cosines(keys.float().contiguous())[:m] for keys in inputs.keys])
    return LayerScores(layer, num_layers, inputs.num_kv_heads, scores, device=scores.device)


def _cosines(keys: Tensor) -> Tensor:
    """[n, d] -> [n]."""
    norms = torch.linalg.vector_norm(keys, dim=1)
    anchor = (keys / norms.clamp(min=1e-12)[:, None]).mean(0)
    length = torch.linalg.vector_norm(anchor).clamp(min=1e-8)
    # Not keys @ anchor: a BLAS may round by where the head lies in memory, which differs between ranks.
    return (keys * anchor).sum(1) / (norms.clamp(min=1e-8) * length)


register(
    Policy(
        "keydiff",
        "per head, the tokens whose keys point away from the average key",
        "KeyDiff",
        score,
        best_of_each_head,
        (OPTIONAL_WINDOW,),
        always_kept=("window",),
        decodes=True,
        url="https://arxiv.org/abs/2504.15364",
    )
)
