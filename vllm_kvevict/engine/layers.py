"""Which of a model's layers are evicted, and how vLLM groups them with the others and those of a draft model.

It is predicted by the model's configuration, found in vLLM's groups where there are any, and workers compare both.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
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


DRAFTERS = "draft_model", "eagle", "eagle3", "mtp"
"""Methods of speculative decoding whose draft model has KV of its own."""


def can_be_evicted(spec: KVCacheSpec) -> bool:
    """Whether a layer that vLLM describes so can be evicted, if it is not one of a draft model."""
    return type(spec) is FullAttentionSpec and not getattr(spec, "non_causal", False)


@dataclass(frozen=True, kw_only=True)
class EvictedSpec(AttentionSpec):
    """What vLLM is told of an evicted layer, as far as groups depend on it (the rest: ``spec.py``).

    It is none of vLLM's ``FullAttentionSpec``, which vLLM would put into one group with whole layers, such as those of
    a draft model.
    """


def is_evicted(spec: KVCacheSpec) -> bool:
    """Whether layers of a group with this spec are evicted."""
    return isinstance(spec, EvictedSpec)


def keeps_all(spec: KVCacheSpec) -> bool:
    """Whether layers of a group keep all tokens, which only those of a draft model do."""
    return isinstance(spec, FullAttentionSpec)


@dataclass(frozen=True)
class LayerMap:
    """The groups of a model's layers: layers of one group share block tables.

    A block is a piece of memory with a place for each layer of a group. Which group has it, changes from block to
    block; pages of evicted layers may lie in any of its places.

    Attributes:
        evicted, others: groups of evicted layers, and the others: layers of each by their number in the model; those of
            a draft model have numbers below 0.
        specs: of each of the others.
        unlisted: evicted layers that are in no group. Groups have as many layers as the smallest, which those of a
            draft model are, so vLLM hears of as many evicted ones only.
        enlarged: blocks of evicted layers have so many times the memory that vLLM's configuration says, where those of
            others take more.
    """

    evicted: tuple[tuple[int, ...], ...]
    others: tuple[tuple[int, ...], ...] = ()
    specs: tuple[KVCacheSpec, ...] = ()
    unlisted: tuple[int, ...] = ()
    enlarged: Fraction = Fraction(1)

    @classmethod
    def predicted(cls, vllm_config: Any) -> "LayerMap":
        """How vLLM will group the layers of a model, by its configuration; no layer need exist yet."""
        model = vllm_config.model_config
        types, drafter = layer_types(model.hf_text_config), draft_layers(vllm_config)
        if set(types) <= FULL_ATTENTION and not drafter:
            return cls((tuple(range(model.get_total_num_hidden_layers())),))
        types = types or ["full_attention"] * model.get_total_num_hidden_layers()
        layers = tuple(
            (layer, spec) for layer, kind in enumerate(types) for spec in _specs(vllm_config, kind)
        )
        return _beside_drafter(layers, drafter, goes_first(vllm_config)) if drafter else _grouped(layers)

    @classmethod
    def found(cls, groups: Sequence[KVCacheGroupSpec]) -> "LayerMap":
        """How vLLM has grouped the layers that it hears of in a worker; of the others only how many, since nobody asks
        for more."""
        # The front-end need not load vLLM's layers.
        from vllm.model_executor.models.utils import extract_layer_index

        found = []
        for group in groups:
            layers = tuple(range(len(group.layer_names)))
            if is_evicted(group.kv_cache_spec):
                layers = tuple(map(extract_layer_index, group.layer_names))
            found.append((layers, group.kv_cache_spec))
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
    def has_drafts(self) -> bool:
        """Whether there are layers of a draft model."""
        return any(min(group) < 0 for group in self.others if group)

    @property
    def has_states(self) -> bool:
        """Whether some layers remember a state of each request."""
        return any(isinstance(spec, MambaSpec) for spec in self.specs)

    @property
    def undoes_rows(self) -> bool:
        """Whether tokens may be computed twice without more: what layers of a draft model store of them is dropped."""
        return all(map(keeps_all, self.specs))

    @property
    def caches_prefixes(self) -> bool:
        """Whether requests may begin with cached prefixes: beside windows or states; vLLM copies blocks of models with
        both only in part."""
        kinds = set(map(type, self.specs))
        return kinds <= {SlidingWindowSpec, FullAttentionSpec} or kinds == {MambaSpec}

    @property
    def repeats_prompts(self) -> bool:
        """Whether prompts may be repeated: beside windows, or beside states. No model with both was tried."""
        return len({type(spec) for spec in self.specs if not keeps_all(spec)}) <= 1

    @property
    def evicted_layers(self) -> list[int]:
        """All evicted layers in their order."""
        return sorted([*self.unlisted, *(layer for group in self.evicted for layer in group)])

    def on_stage(self, stage: range) -> range:
        """The evicted layers of a pipeline stage, counted among all evicted ones."""
        layers = self.evicted_layers
        first = sum(layer < stage.start for layer in layers)
        return range(first, first + sum(layer in stage for layer in layers))

    def places(self, stage: range) -> int:
        """Places for layers in a block of a pipeline stage."""
        # There is one stage where there is a draft model.
        groups = (*self.evicted, *self.others)
        return max(sum(layer < 0 or layer in stage for layer in group) for group in groups)

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
        return tuple(_blocks_of_rows(spec, rows) for spec in self.specs)


def _blocks_of_rows(spec: KVCacheSpec, rows: int) -> int:
    """Blocks of a group for so many rows that are dropped after their step."""
    if keeps_all(spec):
        return 0  # a draft model need not have them
    return min(1, rows) if isinstance(spec, MambaSpec) else cdiv(rows, spec.block_size)


def layer_types(text_config: Any) -> Sequence[str]:
    """What the configuration of a text model says of each layer's attention; empty if all are alike."""
    return getattr(text_config, "layer_types", None) or ()


def _shape(vllm_config: Any, model: Any, parallel: Any) -> dict[str, Any]:
    """What a spec says of the KV of a layer of a model, on a rank of this many."""
    return {
        "block_size": vllm_config.cache_config.block_size,
        "num_kv_heads": model.get_num_kv_heads(parallel),
        "head_size": model.get_head_size(),
        "dtype": model.dtype,
    }


def _specs(vllm_config: Any, kind: str) -> list[KVCacheSpec]:
    """What vLLM will remember of a layer, as far as groups depend on it."""
    model = vllm_config.model_config
    shape = _shape(vllm_config, model, vllm_config.parallel_config)
    full = EvictedSpec(**shape)
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


def draft_layers(vllm_config: Any) -> tuple[tuple[int, KVCacheSpec], ...]:
    """The layers of a draft model with KV of its own, with numbers below 0, and their specs."""
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method not in DRAFTERS:
        return ()
    model = speculation.draft_model_config
    shape = _shape(vllm_config, model, speculation.draft_parallel_config)
    spec: KVCacheSpec = FullAttentionSpec(**shape)
    # Without types of layers vLLM takes the window of the other model.
    if set(layer_types(model.hf_text_config)) == {WINDOW}:
        spec = SlidingWindowSpec(sliding_window=model.get_sliding_window(), **shape)
    count = 1 if speculation.method == "mtp" else model.get_total_num_hidden_layers()
    return tuple((layer, spec) for layer in range(-count, 0))


def goes_first(vllm_config: Any) -> bool:
    """Whether the layers of a draft model are the first that vLLM hears of. Its runner gives the tables of the first
    group to a draft model that runs on its own; the last layer is one of the draft model for all other methods."""
    return bool(vllm_config.speculative_config.method == "draft_model")


@functools.lru_cache(maxsize=8)
def _beside_drafter(
    layers: tuple[tuple[int, KVCacheSpec], ...], drafter: tuple[tuple[int, KVCacheSpec], ...], first: bool
) -> LayerMap:
    """The groups of a model's layers beside those of a draft model."""
    evicted = [(layer, spec) for layer, spec in layers if is_evicted(spec)]
    others = [(layer, spec) for layer, spec in layers if not is_evicted(spec)]
    size = max(map(len, _grouped((*others, *drafter)).others))
    listed = [*evicted[:size], *others]
    groups = _grouped((*drafter, *listed) if first else (*listed, *drafter))
    return replace(groups, unlisted=tuple(layer for layer, _ in evicted[size:]))


@functools.lru_cache(maxsize=8)  # the front-end asks for every request
def _grouped(specs: tuple[tuple[int, KVCacheSpec], ...]) -> LayerMap:
    """Groups of layers, by their numbers, with these specs."""
    by_name = {str(index): spec for index, (_, spec) in enumerate(specs)}
    by_name = versions.load(versions.moves().unify_page_size)(by_name)
    groups = versions.load(versions.moves().groups_of_one_page_size)(by_name)
    layers = LayerMap._of(
        [(tuple(specs[int(name)][0] for name in group.layer_names), group.kv_cache_spec) for group in groups]
    )
    sizes = [
        Fraction(by_name[str(index)].page_size_bytes, spec.page_size_bytes)
        for index, (_, spec) in enumerate(specs)
        if is_evicted(spec)
    ]
    return replace(layers, enlarged=sizes[0]) if sizes else layers
