"""layer-defensivekv: defensivekv's scores, all heads of all layers sharing one budget (DefensiveKV: Feng et al. 2025).

The L*Hkv*(B - window) best candidates of the whole model stay (`whole_model`). Parameters as in defensivekv, without
tp_local.
"""

from . import defensivekv, whole_model
from .registry import Policy, register

register(
    Policy(
        "layer-defensivekv",
        "as defensivekv, all heads of all layers compete",
        "DefensiveKV, authors' code",
        defensivekv.score,
        whole_model.select_best,
        defensivekv.SCORING,
        needs=("q_window", "values", "w_o"),
        schedule="by score",
        always_kept=("window",),
        experimental=True,
        url="https://arxiv.org/abs/2510.13334",
    )
)
