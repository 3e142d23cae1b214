"""Where the KV cache lives: a pool of pages, page tables with one row per (layer, KV head), and compaction.

The host knows how long every row is, because lengths change only by whole tokens and by compactions whose
sizes are the shapes of tensors. The device knows which page is where. So no step has to wait for the device.
"""

from vllm_kvevict.cache.format import PageMemory
from vllm_kvevict.cache.paged import PagedKVCache
from vllm_kvevict.cache.pool import PagePool
from vllm_kvevict.cache.steps import Extension, Settled
from vllm_kvevict.cache.tables import PageTables

__all__ = ["Extension", "PageMemory", "PagePool", "PageTables", "PagedKVCache", "Settled"]
