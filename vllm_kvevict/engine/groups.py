"""Which of a model's layers are evicted, and how vLLM groups them with the others."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

FULL_ATTENTION = {"attention", "full_attention"}
"""Entries of a model's ``layer_types`` whose KV is evicted."""

WINDOW = "sliding_attention"


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
        vLLM's block of padding. So whatever else there is, one request can go on."""
        return reserve_for(self.specs, vllm_config)


def reserve_for(specs: Sequence[KVCacheSpec], vllm_config: Any) -> int:
    """The reserve, see :meth:`LayerGroups.reserve`, where the other groups have these specs."""
    of_one_request = sum(
        cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes) for spec in specs
    )
    return of_one_request + 1 if specs else 0


def layer_types(text_config: Any) -> Sequence[str]:
    """What the configuration of a text model says of each layer's attention; empty if all are alike."""
    return getattr(text_config, "layer_types", None) or ()


def layer_groups(vllm_config: Any) -> LayerGroups:
    """How vLLM will group the layers of a model, by its configuration; no layer need exist yet."""
    model = vllm_config.model_config
    types = layer_types(model.hf_text_config)
    if set(types) <= FULL_ATTENTION:
        return LayerGroups((tuple(range(model.get_total_num_hidden_layers())),))
    return _grouped(tuple(_spec(vllm_config, kind) for kind in types))


def _spec(vllm_config: Any, kind: str) -> AttentionSpec:
    model = vllm_config.model_config
    shape: dict[str, Any] = {
        "block_size": vllm_config.cache_config.block_size,
        "num_kv_heads": model.get_num_kv_heads(vllm_config.parallel_config),
        "head_size": model.get_head_size(),
        "dtype": model.dtype,
    }
    if kind == WINDOW:
        # In vLLM's Cohere 2 layers see a token more than the configuration says.
        return SlidingWindowSpec(sliding_window=model.hf_text_config.sliding_window + 1, **shape)
    return FullAttentionSpec(**shape)


@functools.lru_cache(maxsize=8)  # the front-end asks for every request
def _grouped(specs: tuple[KVCacheSpec, ...]) -> LayerGroups:
    """Groups of layers with these specs."""
    evicted: list[tuple[int, ...]] = []
    others: list[tuple[int, ...]] = []
    of_others = []
    for group in _get_kv_cache_groups_uniform_page_size({str(i): spec for i, spec in enumerate(specs)}):
        layers = tuple(map(int, group.layer_names))
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            evicted.append(layers)
        else:
            others.append(layers)
            of_others.append(group.kv_cache_spec)
    return LayerGroups(tuple(evicted), tuple(others), tuple(of_others))
