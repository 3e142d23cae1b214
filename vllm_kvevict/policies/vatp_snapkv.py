"""vatp-snapkv: SnapKV's score of a token times the L1 norm of its own value (VATP; LAVa, appendix B).

s[h, i] = snapkv[h, i] * ||V[h, i]||_1, the norm applied after pooling. The original method also protects the
first tokens, whose values are so small that the product would drop them: sinks (default 0, the plain formula),
counted inside the budget.
"""

from collections.abc import Sequence

from . import snapkv
from .config import EvictionConfig
from .heads import select_uniform
from .layer import Comm, Kept, LayerInputs, LayerScores
from .norms import value_norms
from .params import first_tokens
from .registry import Policy, register
from .sinks import keep_sinks

PARAMETERS = (*snapkv.PARAMETERS, first_tokens(0))


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """SnapKV's scores times value norms."""
    scores = snapkv.score(cfg, inputs, layer, num_layers, comm).scores
    assert scores is not None
    scores = scores * value_norms(inputs.check_values()[:, : scores.shape[1]])
    return LayerScores(layer, num_layers, inputs.num_kv_heads, scores, device=scores.device)


def select(cfg: EvictionConfig, layers: Sequence[LayerScores], n: int, comm: Comm | None) -> Kept:
    """The sinks, the window and the best of the other tokens of each head."""
    window = cfg.window_for(n)
    return select_uniform(keep_sinks(cfg, layers, n), [cfg.budget_for(n) - window] * len(layers), n, window)


register(
    Policy(
        "vatp-snapkv",
        "snapkv's score x the token's own value norm",
        "VATP; LAVa app. B",
        score,
        select,
        PARAMETERS,
        needs=("q_window", "values"),
        window_rows="mean",
        always_kept=("window", "sinks"),
        url="https://arxiv.org/abs/2406.12335",
    )
)
