"""Which of a model's layers are evicted, and how vLLM groups them with the others."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

from vllm_kvevict.engine import versions

NULL_BLOCKS = 1
"""Blocks that vLLM's pool keeps back and its check at start-up does not count: the null block."""

FULL_ATTENTION = {"attention", "full_attention"}
WINDOW = "sliding_attention"
STATES = {"linear_attention", "mamba", "conv"}
BOTH = "hybrid"
LAYER_TYPES = {*FULL_ATTENTION, WINDOW, *STATES, BOTH, "mlp", "moe"}
"""Entries of a model's ``layer_types`` that can be served. Layers have full attention, whose KV is evicted; or remember
a window of tokens, or a state, of each request; or have attention and a state side by side; or remember nothing."""


@dataclass(frozen=True)
class LayerGroups:
    """The groups of a model's layers: layers of one group share block tables.

    A block is a piece of memory with a place for each layer of a group. Which group has it, changes from block to
    block; pages of evicted layers may lie in any of its places.

    Attributes:
        evicted, others: groups of evicted layers, and the others: layers of each by their number in the model.
        specs: of each of the others.
    """

    evicted: tuple[tuple[int, ...], ...]
    others: tuple[tuple[int, ...], ...] = ()
    specs: tuple[KVCacheSpec, ...] = ()

    @property
    def evicted_layers(self) -> list[int]:
        """All evicted layers in their order."""
        return sorted(layer for group in self.evicted for layer in group)

    def places(self, stage: range) -> int:
        """Places for layers in a block of a pipeline stage."""
        return max(sum(layer in stage for layer in group) for group in (*self.evicted, *self.others))

    def reserve(self, vllm_config: Any) -> int:
        """Blocks that are never used for pages: as many as the other groups hold of one request at most, besides
        vLLM's null block. So whatever else there is, one request can go on."""
        return reserve_for(self.specs, vllm_config)


def reserve_for(specs: Sequence[KVCacheSpec], vllm_config: Any) -> int:
    """The reserve, see :meth:`LayerGroups.reserve`, where the other groups have these specs."""
    of_one_request = sum(
        cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes) for spec in specs
    )
    return of_one_request + NULL_BLOCKS if specs else 0


def layer_types(text_config: Any) -> Sequence[str]:
    """What the configuration of a text model says of each layer's attention; empty if all are alike."""
    return getattr(text_config, "layer_types", None) or ()


def layer_groups(vllm_config: Any) -> LayerGroups:
    """How vLLM will group the layers of a model, by its configuration; no layer need exist yet."""
    model = vllm_config.model_config
    types = layer_types(model.hf_text_config)
    if set(types) <= FULL_ATTENTION:
        return LayerGroups((tuple(range(model.get_total_num_hidden_layers())),))
    specs = []
    for layer, kind in enumerate(types):
        specs += [(layer, spec) for spec in _specs(vllm_config, kind)]
    return _grouped(tuple(specs))


def _specs(vllm_config: Any, kind: str) -> list[KVCacheSpec]:
    """What vLLM will remember of a layer, as far as groups depend on it."""
    model = vllm_config.model_config
    shape: dict[str, Any] = {
        "block_size": vllm_config.cache_config.block_size,
        "num_kv_heads": model.get_num_kv_heads(vllm_config.parallel_config),
        "head_size": model.get_head_size(),
        "dtype": model.dtype,
    }
    full = FullAttentionSpec(**shape)
    specs: list[KVCacheSpec] = []
    if kind in FULL_ATTENTION or kind == BOTH:
        specs.append(full)
    if kind == WINDOW:
        # In vLLM's Cohere 2 layers see a token more than the configuration says.
        specs.append(SlidingWindowSpec(sliding_window=model.hf_text_config.sliding_window + 1, **shape))
    if kind in STATES or kind == BOTH:
        # vLLM makes blocks as large as states.
        bytes_of_block = ((full.page_size_bytes,),)
        specs.append(MambaSpec(block_size=model.max_model_len, shapes=bytes_of_block, dtypes=(torch.int8,)))
    return specs


@functools.lru_cache(maxsize=8)  # the front-end asks for every request
def _grouped(specs: tuple[tuple[int, KVCacheSpec], ...]) -> LayerGroups:
    """Groups of layers, by their numbers, with these specs."""
    evicted: list[tuple[int, ...]] = []
    others: list[tuple[int, ...]] = []
    of_others = []
    by_name = {str(index): spec for index, (_, spec) in enumerate(specs)}
    for group in versions.load(versions.moves().groups_of_one_page_size)(by_name):
        layers = tuple(specs[int(name)][0] for name in group.layer_names)
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            evicted.append(layers)
        else:
            others.append(layers)
            of_others.append(group.kv_cache_spec)
    return LayerGroups(tuple(evicted), tuple(others), tuple(of_others))
