"""lava-uniform-head: LAVa without competing heads (LAVa, section 4.3, "-head"). Layers share by entropy."""

from dataclasses import replace

from . import lava
from .heads import best_of_each_head
from .registry import register

register(
    replace(
        lava.POLICY,
        name="lava-uniform-head",
        summary="lava's scores, layers share the budget by entropy, the same number in every head",
        source="LAVa 4.3",
        select=best_of_each_head,
        parameters=lava.SCORING,
        heads_compete=False,
    )
)
