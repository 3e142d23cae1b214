"""A server that is only imagined, as ``vllm-kvevict sizing`` describes it; needs no vLLM."""

from dataclasses import dataclass

from vllm_kvevict.kernels.layout import INT8, KVLayout


@dataclass(frozen=True, kw_only=True)
class Server:
    """A model and what ``vllm serve`` makes of it; ``memory`` in bytes per rank, sizes of pages and steps in tokens."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_len: int
    memory: int
    dtype: str
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    page_size: int = 32
    block_size: int = 128
    max_num_batched_tokens: int = 2048

    @property
    def layout(self) -> KVLayout:
        """What a rank stores."""
        heads = max(1, self.kv_heads // self.tensor_parallel_size)
        is_quantised = self.kv_cache_dtype == INT8
        return KVLayout.of_heads(
            self.page_size, heads, self.kv_heads, self.head_dim, self.dtype, is_quantised
        )
