"""lava-pyramid: LAVa's scores and competing heads, with PyramidKV's layer budgets (LAVa, section 4.3)."""

from dataclasses import replace

from . import lava, lava_uniform, pyramidkv
from .params import BETA
from .registry import register

register(
    replace(
        lava_uniform.POLICY,
        name="lava-pyramid",
        summary="lava's scores, pyramidkv's layer budgets, heads compete",
        parameters=(*lava.PARAMETERS, BETA),
        layer_budgets=pyramidkv.layer_budgets,
    )
)
