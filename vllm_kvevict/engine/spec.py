"""What vLLM is told of the layers that are evicted: the memory they need, and that they need no blocks."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvevict.engine.config import require_options
from vllm_kvevict.engine.layers import EvictedSpec, LayerMap
from vllm_kvevict.engine.memory import layout_of, pages_of_place
from vllm_kvevict.engine.request_options import plan_for


@dataclass(frozen=True, kw_only=True)
class BoundedAttentionSpec(EvictedSpec):
    """Full attention whose longest prompt needs as much memory as the server's policy says: less than all of its KV if
    that is evicted as it comes, more if it is repeated.

    Attributes:
        others_are_cached: whether vLLM caches prefixes of layers beside these, which have no blocks that it could find.
    """

    others_are_cached: bool = False

    @classmethod
    def of(cls, spec: KVCacheSpec, others_are_cached: bool = False) -> "BoundedAttentionSpec":
        """The same layer, one that is evicted, with our bound."""
        fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(AttentionSpec)}
        return cls(**fields, others_are_cached=others_are_cached)

    @property
    def prefix_cacheable(self) -> bool:
        """Whether vLLM looks for these layers' blocks where it finds a prefix."""
        return not self.others_are_cached

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Bytes of one group's blocks that a prompt of ``max_model_len`` tokens needs at once on the fullest rank, and
        a share of those that other groups have for repeats."""
        tokens = vllm_config.model_config.max_model_len
        options = require_options(vllm_config)
        pages = pages_of_place(vllm_config, plan_for(options, tokens, most_output=1), tokens)
        layers = LayerMap.predicted(vllm_config)
        scratch = cdiv(sum(layers.scratch(vllm_config)), len(layers.evicted))
        return pages * layout_of(vllm_config, self).page_bytes + scratch * self.page_size_bytes


class NoBlocksManager(FullAttentionManager):
    """vLLM's manager of the groups that are evicted: their pages are the ledger's."""

    def get_num_blocks_to_allocate(self, *args: Any, **kwargs: Any) -> int:
        return 0

    def allocate_new_blocks(self, *args: Any, **kwargs: Any) -> list:
        return []


# Whatever process is told of such a layer imports this module, before it looks for the manager.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(BoundedAttentionSpec, NoBlocksManager)
