"""layer-defensivekv: defensivekv's scores, all heads of all layers sharing one budget (DefensiveKV: Feng et al. 2025).

The L*Hkv*(B - window) best candidates of the whole model stay (`whole_model`). Parameters as in defensivekv.
"""

from dataclasses import replace

from . import defensivekv, whole_model
from .registry import register

register(
    replace(
        defensivekv.POLICY,
        name="layer-defensivekv",
        summary="as defensivekv, all heads of all layers compete",
        select=whole_model.select_best,
        parameters=defensivekv.PARAMETERS,
        schedule="by score",
        heads_compete=False,
    )
)
