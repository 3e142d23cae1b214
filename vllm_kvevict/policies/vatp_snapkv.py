"""vatp-snapkv: SnapKV's score of a token times the L1 norm of its own value (VATP; LAVa, appendix B).

s[h, i] = snapkv[h, i] * ||V[h, i]||_1, the norm applied after pooling. The original method also protects the
first tokens, whose values are so small that the product would drop them: sinks (default 0, the plain formula),
counted inside the budget.
"""

from dataclasses import replace

from . import snapkv
from .config import EvictionConfig
from .inputs import VALUES
from .layer import Comm, LayerInputs, LayerScores
from .norms import value_norms
from .params import first_tokens
from .registry import register

PARAMETERS = (*snapkv.PARAMETERS, first_tokens(0))


def score(
    cfg: EvictionConfig, inputs: LayerInputs, layer: int, num_layers: int, comm: Comm | None
) -> LayerScores:
    """SnapKV's scores times value norms."""
    scores = snapkv.score(cfg, inputs, layer, num_layers, comm).scores
    assert scores is not None
    scores = scores * value_norms(inputs.read(VALUES)[:, : scores.shape[1]])
    return LayerScores(layer, num_layers, inputs.num_kv_heads, scores, device=scores.device)


register(
    replace(
        snapkv.POLICY,
        name="vatp-snapkv",
        summary="snapkv's score x the token's own value norm",
        source="VATP; LAVa app. B",
        score=score,
        parameters=PARAMETERS,
        needs=(*snapkv.POLICY.needs, VALUES),
        always_kept=("window", "sinks"),
        decodes=False,
        url="https://arxiv.org/abs/2406.12335",
    )
)
