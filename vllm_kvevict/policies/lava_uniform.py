"""lava-uniform: LAVa without its layer budgets (LAVa, section 4.3, "-layer"). Every layer gets b = B - window."""

from dataclasses import replace

from . import lava
from .registry import register

POLICY = replace(
    lava.POLICY,
    name="lava-uniform",
    summary="lava's scores, the same budget in every layer, heads compete",
    source="LAVa 4.3",
    score=lava.score_unweighted,
    schedule="whole",
)
register(POLICY)
