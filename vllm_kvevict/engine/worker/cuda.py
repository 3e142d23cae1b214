"""Pages and attention on NVIDIA GPUs: FlashAttention or vLLM's Triton attention, and our Triton kernels."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.config import ENGINE_DEFAULTS, KEY
from vllm_kvevict.engine.memory import FLOATS
from vllm_kvevict.engine.worker.attention import RaggedBuilder, RaggedImpl, block_sizes
from vllm_kvevict.engine.worker.batch import Sequences
from vllm_kvevict.engine.worker.pages import AsComputed
from vllm_kvevict.kernels.layout import KVLayout
from vllm_kvevict.kernels.paged_decode import PagedDecode
from vllm_kvevict.kernels.window_attention import window_attention as attend_from_window
from vllm_kvevict.kernels.write_entries import write_entries

FLASH_ATTENTION_DTYPES = (torch.float16, torch.bfloat16)


class RaggedCUDABuilder(RaggedBuilder):
    """Batches of decodes alone can be replayed from a CUDA graph where our kernel serves them."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        layers = vllm_config.compilation_config.static_forward_context.values()
        has_sinks = any(getattr(getattr(layer, "impl", None), "sinks", None) is not None for layer in layers)
        if vllm_config.additional_config[KEY].get("kernels", ENGINE_DEFAULTS["kernels"]) and not has_sinks:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.NEVER


class RaggedCUDABackend(AttentionBackend):
    """vLLM's CUSTOM backend in engines that evict."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*FLOATS]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RaggedImpl]:
        return RaggedImpl

    @staticmethod
    def get_builder_cls() -> type[RaggedCUDABuilder]:
        return RaggedCUDABuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return block_sizes()

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 16 == 0 and head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= DeviceCapability(8, 0)


class CUDAPages(AsComputed):
    """The pool as [pages, keys and values, page_size, head_dim], which FlashAttention reads as pages of one head.

    Args:
        storage: [pages, page_elements], contiguous.
        layout: of the entries.
        vllm_config: says which FlashAttention to use.
        group: as of :class:`vllm_kvevict.engine.worker.cpu.CPUPages`; the order here serves all attention.
    """

    uses_triton = True

    def __init__(self, storage: Tensor, layout: KVLayout, vllm_config: Any, group: int | None = None):
        self.storage, self.page_size = storage, layout.page_size
        head_dim = layout["key"].numbers
        pages = storage.view(storage.shape[0], 2, self.page_size, 1, head_dim)
        self.key_pages, self.value_pages = pages.unbind(1)
        self.flash_attention = None
        if storage.dtype in FLASH_ATTENTION_DTYPES:
            with set_current_vllm_config(vllm_config):
                self.flash_attention = get_flash_attn_version(head_size=head_dim)

    def write(self, storage: Tensor, keys: Tensor, values: Tensor, entry_slots: Tensor) -> None:
        """Write entries into pages of any storage; arguments as of :meth:`Pages.write`."""
        write_entries(storage, self.page_size, keys.unsqueeze(1), values.unsqueeze(1), entry_slots)

    def append(self, keys: Tensor, values: Tensor, entry_slots: Tensor) -> None:
        """Write a step's entries into the pool; arguments as of :meth:`Pages.append`."""
        write_entries(self.storage, self.page_size, keys, values, entry_slots)

    def attend(
        self,
        queries: Tensor,
        output: Tensor,
        sequences: Sequences,
        scale: float,
        softcap: float,
        sinks: Tensor | None = None,
    ) -> None:
        """Causal attention of every sequence; arguments as of :meth:`Pages.attend`."""
        arguments: dict[str, Any] = {
            "q": queries,
            "k": self.key_pages,
            "v": self.value_pages,
            "out": output,
            "cu_seqlens_q": sequences.query_start_loc,
            "max_seqlen_q": sequences.longest_query,
            "seqused_k": sequences.seq_lens,
            "max_seqlen_k": sequences.longest,
            "softmax_scale": scale,
            "causal": True,
            "block_table": sequences.block_table,
            "softcap": softcap,
        }
        # FlashAttention 2 knows no sinks.
        if self.flash_attention is not None and sinks is None:
            from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

            flash_attn_varlen_func(**arguments, fa_version=self.flash_attention)
        else:
            from vllm.v1.attention.ops.triton_unified_attention import unified_attention

            unified_attention(
                **arguments,
                window_size=(-1, -1),
                q_descale=None,
                k_descale=None,
                v_descale=None,
                sinks=sinks,
            )

    def window_attention(
        self, query: Tensor, table: Tensor, n: int, scale: float, softcap: float, rows: str
    ) -> Tensor:
        """What tokens receive of the window's attention; see
        :data:`vllm_kvevict.schedules.inputs.WindowAttention`."""
        return attend_from_window(query, self.storage, self.page_size, table, n, scale, softcap, rows)

    def decode_attention(self, cache: PagedKVCache, group: int, softcap: float) -> PagedDecode:
        """Our kernel."""
        requests = cache.tables.kv_len.shape[0]
        sms = torch.cuda.get_device_properties(self.storage.device).multi_processor_count
        return PagedDecode(self.storage, self.page_size, requests, cache.num_kv_heads, group, softcap, sms)

    def prefill_attention(self, cache: PagedKVCache, group: int) -> None:
        """None: FlashAttention serves prompts."""
