"""ada-pyramid: PyramidKV's layer budgets, each shared by the heads of its layer (Ada-KV, Alg. 2)."""

from dataclasses import replace

from . import ada_snapkv, pyramidkv
from .params import ADA_SAFEGUARD, ALPHA
from .registry import register

register(
    replace(
        ada_snapkv.POLICY,
        name="ada-pyramid",
        summary="as ada-snapkv, with pyramidkv's layer budgets",
        source="Ada-KV Alg. 2",
        parameters=(*pyramidkv.PARAMETERS, ALPHA, ADA_SAFEGUARD),
        layer_budgets=pyramidkv.layer_budgets,
        decodes=False,
    )
)
