"""knorm: the tokens with the smallest keys (Knorm: Devoto et al. 2024).

s[h, i] = -||K[h, i]||_2, in fp32, of the key after RoPE (a rotation, which keeps the norm)

window=32 last tokens stay (0: none in particular, they compete as all others do). The first skip_layers=0 layers of
the model keep everything, on top of the budget of the others; of an answer they keep no more than others do. No queries
are read, so any attention kernel will do.
"""

import torch

from .config import EvictionConfig
from .heads import best_of_each_head
from .layer import Comm, LayerInputs, LayerScores
from .params import OPTIONAL_WINDOW, integer, server_only
from .registry import Policy, register

PARAMETERS = (OPTIONAL_WINDOW, server_only(integer("skip_layers", 0, 0)))


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """Norms of the keys, negated."""
    m = inputs.num_tokens - cfg.window_for(inputs.num_tokens)
    # Head by head: no copy of all keys, and the same bits however many heads are here.
    norms = torch.stack([torch.linalg.vector_norm(keys[:m].float(), dim=1) for keys in inputs.keys])
    return LayerScores(layer, num_layers, inputs.num_kv_heads, -norms, device=norms.device)


def layer_budgets(cfg: EvictionConfig, n: int, num_layers: int) -> list[int]:
    """n in the skipped layers, B in the others."""
    return [n if layer < cfg.params["skip_layers"] else cfg.budget_for(n) for layer in range(num_layers)]


register(
    Policy(
        "knorm",
        "per head, the tokens with the smallest key norms",
        "Knorm",
        score,
        best_of_each_head,
        PARAMETERS,
        layer_budgets=layer_budgets,
        always_kept=("window",),
        decodes=True,
        url="https://arxiv.org/abs/2406.11430",
    )
)
