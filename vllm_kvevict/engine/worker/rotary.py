"""The rotary embedding of a vLLM model, for policies that ask what queries and keys were before it."""

from collections.abc import Sequence

from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_alpha_rope import DynamicNTKAlphaRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope import (
    DynamicNTKScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.ntk_scaling_rope import NTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

from vllm_kvevict.engine.worker.projection import beside, holders
from vllm_kvevict.policies import Rotary

KNOWN = (
    RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    NTKScalingRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding,
    Llama3RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
"""Those that turn by angles in proportion to a token's position, whatever the request's length."""

TURNS_IF = {
    "CohereAttention": ("v1", "sliding_window"),
    "Cohere2MoeAttention": ("force_rope", "sliding_window"),
    "Exaone4Attention": ("apply_rope_all_layers", "sliding_window"),
    "ExaoneMoeAttention": ("use_rope",),
    "Step3p5Attention": ("use_rope",),
}
"""vLLM's classes that hold a rotary embedding in every layer, and use it only in those where one of these attributes is
true: by name, since importing all these models would take seconds."""


class ModelRotary:
    """The rotary embedding that all attention layers of this rank share.

    Args:
        model: the rank's model.
        attentions: vLLM's attention layers, each held by a module that also holds its rotary embedding.
        positions: how many there are in the longest request.
        head_size: of the model's configuration, by which the scheduler shares out the reserve.
    """

    def __init__(self, model: nn.Module, attentions: Sequence[nn.Module], positions: int, head_size: int):
        found = _shared(model, attentions)
        # vLLM reads on behind a table that is too short.
        long_enough = found is not None and len(found.cos_sin_cache) >= positions
        as_configured = all(attention.head_size == head_size for attention in attentions)
        is_used = all(_turns(holder) for holder in holders(model, attentions))
        self._found = found if long_enough and as_configured and is_used else None

    @property
    def available(self) -> bool:
        """Whether there is one, the same in every layer and used there, and of a kind that can be undone."""
        return self._found is not None

    def read(self) -> Rotary:
        """As the model has it: views of its tables, which are read anew each time."""
        assert self._found is not None
        cos, sin = self._found.cos_sin_cache.chunk(2, dim=-1)
        return Rotary(cos, sin, not self._found.is_neox_style)


def _shared(model: nn.Module, attentions: Sequence[nn.Module]) -> RotaryEmbedding | None:
    """The only rotary embedding beside every attention layer; None where there is none, or several, or another kind."""
    found = beside(model, attentions, RotaryEmbeddingBase)
    distinct = {id(x): x for each in found for x in each}
    if not all(found) or len(distinct) != 1:
        return None
    (rotary,) = distinct.values()
    return rotary if _is_known(rotary) else None


def _turns(holder: nn.Module | None) -> bool:
    """Whether the holder of an attention layer uses the rotary embedding that it holds."""
    known = [TURNS_IF[kind.__name__] for kind in type(holder).__mro__ if kind.__name__ in TURNS_IF]
    return not known or any(getattr(holder, name, False) for name in known[0])


def _is_known(rotary: nn.Module) -> bool:
    # Subclasses may turn in their own way. Several factors are several tables, one after the other.
    several = isinstance(rotary, LinearScalingRotaryEmbedding) and len(rotary.scaling_factors) > 1
    return type(rotary) in KNOWN and not several
