"""How much of a CPU's memory vLLM asks for where the user does not say.

By itself it asks for 92 % of the machine's. Where so much is not free it does not start; where it is, vLLM fills it,
and the system ends a process as soon as other programs grow.
"""

from vllm.config import CacheConfig
from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

logger = init_logger("vllm.kv_eviction")

SHARE = 0.5
"""Of the free memory; the rest is for other programs."""


def ask_for_half_of_what_is_free(cache: CacheConfig) -> None:
    """Lower the share of the memory that vLLM asks for."""
    if cache.kv_cache_memory_bytes is not None:
        return
    if cache.gpu_memory_utilization != CacheConfig.gpu_memory_utilization:
        return
    nodes = map(get_memory_node_info, get_visible_memory_node())
    share = SHARE * min(node.available_memory / node.total_memory for node in nodes)
    cache.gpu_memory_utilization = share
    logger.info(
        "KV eviction: vLLM takes half of the memory that is free, %.0f %% of the machine's: set "
        "--gpu-memory-utilization or --kv-cache-memory-bytes to choose how much",
        100 * share,
    )
