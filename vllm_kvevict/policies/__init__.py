"""What to keep: KV-cache eviction policies. Pure torch, usable without vLLM.

    cfg = EvictionConfig("ada-snapkv", keep_ratio=0.2)
    kept = decide(cfg, [LayerInputs(q_window, keys) for each layer])     # kept[layer][kv_head]

A new policy is one module that ends in `register(Policy(...))` and is imported below.
"""

from . import full, streaming_llm, snapkv, pyramidkv, ada_snapkv, ada_pyramid  # noqa: F401, I001 (order of the CLI)
from . import lava, lava_uniform, lava_pyramid, lava_uniform_head, cake, vatp_snapkv  # noqa: F401
from . import h2o, tova, knorm, keydiff, criticalkv, ada_criticalkv, defensivekv, layer_defensivekv  # noqa: F401
from . import take, kvzip, compactor, expected_attention, dropkv  # noqa: F401
from . import rkv  # noqa: F401
from .config import EvictionConfig
from .decision import decide, score_layer, select
from .heads import most_candidates
from .layer import Comm, Kept, LayerInputs, LayerScores
from .registry import available, decoding_policies, parameters
from .rotary import Rotary
from .shares import layer_budgets, provisional_budgets

__all__ = [
    "Comm",
    "EvictionConfig",
    "Kept",
    "LayerInputs",
    "LayerScores",
    "Rotary",
    "available",
    "decide",
    "decoding_policies",
    "layer_budgets",
    "most_candidates",
    "parameters",
    "provisional_budgets",
    "score_layer",
    "select",
]
