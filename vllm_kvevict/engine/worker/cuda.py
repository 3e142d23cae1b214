"""Pages and attention on NVIDIA GPUs: FlashAttention or vLLM's Triton attention, and our Triton kernels."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.cache.format import dtype_of
from vllm_kvevict.engine.config import ENGINE_DEFAULTS, KEY
from vllm_kvevict.engine.memory import FLOATS
from vllm_kvevict.engine.worker.attention import RaggedBuilder, RaggedImpl, block_sizes, with_scales
from vllm_kvevict.engine.worker.batch import Sequences
from vllm_kvevict.engine.worker.pages import AsComputed, InEightBits
from vllm_kvevict.kernels.layout import INT8, KVLayout
from vllm_kvevict.kernels.paged_decode import PagedDecode
from vllm_kvevict.kernels.quantise import Quantised, fields, scaled_signs
from vllm_kvevict.kernels.rotate_and_round import quantise, rotate
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
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*FLOATS, INT8]
    forward_includes_kv_cache_update = True

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return with_scales(spec)

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


class PagesInRows:
    """Pages whose keys and values are [page_size, head_dim] each, which vLLM's attention reads as pages of one head.

    Attributes:
        dtype: of queries.
        key_pages, value_pages: [pages, page_size, 1, head_dim].
        flash_attention: version of FlashAttention, None where vLLM's Triton attention reads the pages.
        mode, key_scales, value_scales: whether there are scales, and where, fp32 [pages, page_size, 1].
    """

    uses_triton = True

    storage: Tensor
    page_size: int
    dtype: torch.dtype
    key_pages: Tensor
    value_pages: Tensor
    flash_attention: int | None = None
    mode: KVQuantMode = KVQuantMode.NONE
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def append(self, keys: Any, values: Any, entry_slots: Tensor) -> None:
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
                kv_quant_mode=self.mode,
                k_scale_cache=self.key_scales,
                v_scale_cache=self.value_scales,
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
        sizes = self.page_size, requests, cache.num_kv_heads, group
        return PagedDecode(self.storage, *sizes, softcap, sms, self.dtype)

    def prefill_attention(self, cache: PagedKVCache, group: int) -> None:
        """None: vLLM's attention serves prompts."""


class CUDAPages(AsComputed, PagesInRows):
    """The pool as [pages, keys and values, page_size, head_dim].

    Args:
        storage: [pages, page_elements], contiguous.
        layout: of the entries.
        vllm_config: says which FlashAttention to use.
        group: as of :class:`vllm_kvevict.engine.worker.cpu.CPUPages`; the order here serves all attention.
    """

    def __init__(self, storage: Tensor, layout: KVLayout, vllm_config: Any, group: int | None = None):
        self.storage, self.page_size, self.dtype = storage, layout.page_size, storage.dtype
        head_dim = layout["key"].numbers
        pages = storage.view(storage.shape[0], 2, self.page_size, 1, head_dim)
        self.key_pages, self.value_pages = pages.unbind(1)
        if storage.dtype in FLASH_ATTENTION_DTYPES:
            with set_current_vllm_config(vllm_config):
                self.flash_attention = get_flash_attn_version(head_size=head_dim)

    def write(self, storage: Tensor, keys: Tensor, values: Tensor, entry_slots: Tensor) -> None:
        """Write entries into pages of any storage; arguments as of :meth:`Pages.write`."""
        write_entries(storage, self.page_size, keys.unsqueeze(1), values.unsqueeze(1), entry_slots)


class QuantisedCUDAPages(InEightBits, PagesInRows):
    """The pool in 8 bits.

    Args:
        storage: int8 [pages, page_bytes], contiguous.
        layout: of the entries.
    """

    mode = KVQuantMode.INT8_PER_TOKEN_HEAD
    store = staticmethod(write_entries)

    def __init__(self, storage: Tensor, layout: KVLayout):
        self.storage, self.page_size = storage, layout.page_size
        self.dtype = dtype_of(layout.computed_key)
        keys, values = fields(storage, self.page_size, keys_are_transposed=False)
        self.key_pages, self.value_pages = keys.numbers.unsqueeze(2), values.numbers.unsqueeze(2)
        self.key_scales, self.value_scales = keys.scales.unsqueeze(2), values.scales.unsqueeze(2)
        # It is kept, so that no CUDA graph waits for it.
        scaled_signs(layout["key"].numbers, storage.device)

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Quantised, Quantised]:
        """As of :meth:`Pages.encode`."""
        return quantise(keys, True), quantise(values, False)

    def attend(self, queries: Tensor, *arguments: Any) -> None:
        """As of :meth:`Pages.attend`."""
        super().attend(rotate(queries), *arguments)
