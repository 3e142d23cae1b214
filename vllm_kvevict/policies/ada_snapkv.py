"""ada-snapkv: SnapKV's scores, with the heads of a layer sharing one budget (Ada-KV, Alg. 1-2)."""

from dataclasses import replace

from . import snapkv
from .heads import best_of_each_layer
from .params import ADA_SAFEGUARD, ALPHA
from .registry import register

PARAMETERS = (*snapkv.PARAMETERS, ALPHA, ADA_SAFEGUARD)

POLICY = replace(
    snapkv.POLICY,
    name="ada-snapkv",
    summary="as snapkv, the heads of a layer compete for its budget",
    source="Ada-KV Alg. 1-2",
    select=best_of_each_layer,
    parameters=PARAMETERS,
    heads_compete=True,
    url="https://arxiv.org/abs/2407.11550",
)
register(POLICY)
