"""Which of a model's layers are evicted, and how vLLM groups them with the others.

It is predicted by the model's configuration, found in vLLM's groups where there are any, and workers compare both.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from vllm_kvevict.engine import versions
from vllm_kvevict.engine.config import require_options

NULL_BLOCKS = 1
"""Blocks that vLLM's pool keeps back and its check at start-up does not count: the null block."""

BACKEND_KIND = "full_attention"
"""vLLM's name for the kind of layers that get our attention backend."""

FULL_ATTENTION = {"attention", "full_attention"}
WINDOW = "sliding_attention"
STATES = {"linear_attention", "mamba", "conv"}
BOTH = "hybrid"
LAYER_TYPES = {*FULL_ATTENTION, WINDOW, *STATES, BOTH, "mlp", "moe"}
"""Entries of a model's ``layer_types`` that can be served. Layers have full attention, whose KV is evicted; or remember
a window of tokens, or a state, of each request; or have attention and a state side by side; or remember nothing."""


EVICTED_SPECS: set[type[KVCacheSpec]] = {FullAttentionSpec}
"""Specs of layers that are evicted: vLLM's, and the one that takes its place in workers (``spec.py``)."""


def is_evicted(spec: KVCacheSpec) -> bool:
    """Whether a layer with this spec is evicted."""
    return type(spec) in EVICTED_SPECS and not getattr(spec, "non_causal", False)


@dataclass(frozen=True)
class LayerMap:
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

    @classmethod
    def predicted(cls, vllm_config: Any) -> "LayerMap":
        """How vLLM will group the layers of a model, by its configuration; no layer need exist yet."""
        model = vllm_config.model_config
        types = layer_types(model.hf_text_config)
        if set(types) <= FULL_ATTENTION:
            return cls((tuple(range(model.get_total_num_hidden_layers())),))
        return _grouped(
            tuple((layer, spec) for layer, kind in enumerate(types) for spec in _specs(vllm_config, kind))
        )

    @classmethod
    def found(cls, groups: Sequence[KVCacheGroupSpec]) -> "LayerMap":
        """How vLLM has grouped the layers of a worker; of the others their specs alone, since nobody asks for more."""
        # The front-end need not load vLLM's layers.
        from vllm.model_executor.models.utils import extract_layer_index

        found = []
        for group in groups:
            names = group.layer_names if is_evicted(group.kv_cache_spec) else ()
            found.append((tuple(map(extract_layer_index, names)), group.kv_cache_spec))
        return cls._of(found)

    @classmethod
    def _of(cls, groups: Sequence[tuple[tuple[int, ...], KVCacheSpec]]) -> "LayerMap":
        """Of groups of layers, by their numbers, with these specs."""
        others = [(layers, spec) for layers, spec in groups if not is_evicted(spec)]
        return cls(
            tuple(layers for layers, spec in groups if is_evicted(spec)),
            tuple(layers for layers, _ in others),
            tuple(spec for _, spec in others),
        )

    @property
    def all_evicted(self) -> bool:
        """Whether there are no other layers."""
        return not self.others

    @property
    def caches_prefixes(self) -> bool:
        """Whether requests may begin with cached prefixes: beside windows or states; vLLM copies blocks of models with
        both only in part."""
        kinds = set(map(type, self.specs))
        return len(kinds) <= 1 and kinds <= {SlidingWindowSpec, MambaSpec}

    @property
    def repeats_prompts(self) -> bool:
        """Whether prompts may be repeated: beside windows, or beside states. No model with both was tried."""
        return len({type(spec) for spec in self.specs}) <= 1

    @property
    def evicted_layers(self) -> list[int]:
        """All evicted layers in their order."""
        return sorted(layer for group in self.evicted for layer in group)

    def on_stage(self, stage: range) -> range:
        """The evicted layers of a pipeline stage, counted among all evicted ones."""
        layers = self.evicted_layers
        first = sum(layer < stage.start for layer in layers)
        return range(first, first + sum(layer in stage for layer in layers))

    def places(self, stage: range) -> int:
        """Places for layers in a block of a pipeline stage."""
        return max(sum(layer in stage for layer in group) for group in (*self.evicted, *self.others))

    def blocks_kept(self, vllm_config: Any) -> int:
        """Blocks that are never used for pages: as many as the other groups hold of one request at most, besides
        vLLM's null block and those for repeats. So whatever else there is, one request can go on. 0 where all layers
        are evicted."""
        if self.all_evicted:
            return 0
        held = (cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes) for spec in self.specs)
        late = 0
        if vllm_config.cache_config.enable_prefix_caching:
            # Each step in flight may have a state of its own.
            late = sum(isinstance(spec, MambaSpec) for spec in self.specs)
            late *= vllm_config.max_concurrent_batches - 1
        return sum(held) + late + sum(self.scratch(vllm_config)) + NULL_BLOCKS

    def scratch(self, vllm_config: Any) -> tuple[int, ...]:
        """Blocks of each of the other groups for the repeat of a prompt, one for a state: 0 where no request may have a
        policy that repeats prompts."""
        rows = min(require_options(vllm_config).most_repeated, vllm_config.model_config.max_model_len)
        return tuple(
            min(1, rows) if isinstance(spec, MambaSpec) else cdiv(rows, spec.block_size)
            for spec in self.specs
        )


def layer_types(text_config: Any) -> Sequence[str]:
    """What the configuration of a text model says of each layer's attention; empty if all are alike."""
    return getattr(text_config, "layer_types", None) or ()


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
def _grouped(specs: tuple[tuple[int, KVCacheSpec], ...]) -> LayerMap:
    """Groups of layers, by their numbers, with these specs."""
    by_name = {str(index): spec for index, (_, spec) in enumerate(specs)}
    groups = versions.load(versions.moves().groups_of_one_page_size)(by_name)
    return LayerMap._of(
        [(tuple(specs[int(name)][0] for name in group.layer_names), group.kv_cache_spec) for group in groups]
    )
