"""Pages and attention on a CPU: vLLM's paged op, and our kernels for decodes and for prompts."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.logger import init_logger
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.cache.format import dtype_of
from vllm_kvevict.engine.memory import FLOATS
from vllm_kvevict.engine.worker.attention import RaggedBuilder, RaggedImpl, block_sizes, with_scales
from vllm_kvevict.engine.worker.batch import Sequences
from vllm_kvevict.engine.worker.calibration import Shape, time_decodes, time_prefills
from vllm_kvevict.engine.worker.pages import AsComputed
from vllm_kvevict.engine.worker.timings import Times, kept, times_file
from vllm_kvevict.kernels import decode_attention, prefill_attention
from vllm_kvevict.kernels.build import BuildError
from vllm_kvevict.kernels.decode_attention import DecodeAttention
from vllm_kvevict.kernels.layout import INT8, KVLayout
from vllm_kvevict.kernels.prefill_attention import PrefillAttention
from vllm_kvevict.kernels.processor import level

logger = init_logger("vllm.kv_eviction")

TIMED_TOKENS = 512
"""New tokens of a request by which the kernel for prompts is timed, behind as many."""


class RaggedCPUBackend(CPUAttentionBackend):
    """Stands in for vLLM's CPU backend in workers that evict."""

    forward_includes_kv_cache_update = True

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*FLOATS, INT8]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return with_scales(spec)

    @staticmethod
    def get_impl_cls() -> type[RaggedImpl]:  # type: ignore[override]
        return RaggedImpl

    @staticmethod
    def get_builder_cls() -> type[RaggedBuilder]:  # type: ignore[override]
        return RaggedBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return block_sizes()


class CPUPages(AsComputed):
    """The pool as vLLM's paged CPU op stores and reads it, in an order of a page that depends on the processor.

    With AMX the op has another order for bfloat16, which our kernels cannot read. The constructor times both: where our
    kernels are faster than the op is with that, pages have the order of other dtypes, which all can read.

    Args:
        storage: [pages, page_elements], contiguous.
        layout: of the entries.
        vllm_config: of the server, which says how many drafts a step may have; None: no drafts.
        group: query heads of a KV head, where our kernels may serve prompts and decodes; None: they may not.
    """

    uses_triton = False
    window_attention = None

    def __init__(self, storage: Tensor, layout: KVLayout, vllm_config: Any, group: int | None = None):
        # What is timed depends on a rank's own heads.
        self.layout, self.head_dim = replace(layout, model_rows=layout.rows), layout["key"].numbers
        self.most_drafts = vllm_config.num_speculative_tokens if vllm_config else 0
        # vLLM names the orders of pages after instruction sets.
        self.isa, usual = (
            _get_attn_isa(dtype, layout.page_size, self.head_dim) for dtype in (storage.dtype, torch.float32)
        )
        self.kernels_won = False
        if self.isa != usual:
            # Linux gives a process AMX when it asks, and vLLM leaves that to the first matrix product.
            may_use_amx = torch.cpu._init_amx()
            self.kernels_won = bool(may_use_amx and group and _both_are_faster(Shape(layout, group)))
            if self.kernels_won or not may_use_amx:
                self.isa = usual
        self.key_pages, self.value_pages = self._views(storage)

    def write(self, storage: Tensor, keys: Tensor, values: Tensor, entry_slots: Tensor) -> None:
        """As of :meth:`Pages.write`."""
        self._write(*self._views(storage), keys, values, entry_slots)

    def append(self, keys: Tensor, values: Tensor, entry_slots: Tensor) -> None:
        """As of :meth:`Pages.append`."""
        self._write(
            self.key_pages,
            self.value_pages,
            keys.reshape(-1, self.head_dim),
            values.reshape(-1, self.head_dim),
            entry_slots,
        )

    def attend(
        self,
        queries: Tensor,
        output: Tensor,
        sequences: Sequences,
        scale: float,
        softcap: float,
        sinks: Tensor | None = None,
    ) -> None:
        """As of :meth:`Pages.attend`."""
        group = queries.shape[1]
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=self.key_pages,
            value_cache=self.value_pages,
            output=output,
            query_start_loc=sequences.query_start_loc,
            seq_lens=sequences.seq_lens,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=sequences.block_table,
            softcap=softcap,
            # Lengths differ from layer to layer, so this cannot be made once per step.
            scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
                num_reqs=sequences.seq_lens.shape[0],
                num_heads=group,
                num_kv_heads=1,
                head_dim=self.head_dim,
                seq_lens=sequences.seq_lens,
                dtype=queries.dtype,
                query_start_loc=sequences.query_start_loc,
                causal=True,
                sliding_window_size=-1,
                isa=self.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            ),
            s_aux=None if sinks is None else sinks.float().contiguous(),
        )

    def decode_attention(self, cache: PagedKVCache, group: int, softcap: float) -> DecodeAttention | None:
        """Our kernel, or None where vLLM's op serves decodes too: where the kernel cannot, or is slower."""
        if softcap or not cache.memory.keys_are_transposed:
            return None
        if not decode_attention.supports(cache.storage.dtype, cache.page_size, cache.head_dim):
            return None
        try:
            if not (self.kernels_won or self._decodes_faster(group, 1)):
                return None
            most_new_tokens = 1
            if self.most_drafts and self._decodes_faster(group, 1 + self.most_drafts):
                most_new_tokens = 1 + self.most_drafts
            return DecodeAttention(cache.storage, cache.page_size, most_new_tokens)
        except BuildError as error:
            logger.warning("KV eviction: decoding uses vLLM's attention, which is slower: %s", error)
            return None

    def prefill_attention(self, cache: PagedKVCache, group: int) -> PrefillAttention | None:
        """Our kernel, or None where vLLM's op serves prompts: where the kernel cannot, or is slower."""
        dtype, page_size = cache.storage.dtype, cache.page_size
        if not cache.memory.keys_are_transposed:
            return None
        if not prefill_attention.supports(dtype, page_size, cache.head_dim):
            return None
        try:
            if self.kernels_won or _is_faster("reading prompts", *_prompt_times(Shape(self.layout, group))):
                return PrefillAttention(dtype, cache.storage, page_size)
        except BuildError as error:
            logger.warning("KV eviction: reading prompts uses vLLM's attention, which is slower: %s", error)
        return None

    def _decodes_faster(self, group: int, new_tokens: int) -> bool:
        """Whether our decode kernel beats vLLM's op on this machine, for the server's shape."""
        shape = Shape(self.layout, group, new_tokens)
        what = "decoding" if new_tokens == 1 else f"decoding with {new_tokens - 1} drafts"
        file = times_file("decode_attention", shape)
        return _is_faster(what, file, kept(file, lambda: time_decodes(shape, self._likewise)))

    def _likewise(self, storage: Tensor) -> "CPUPages":
        """Other pages, in the order of these."""
        pages = CPUPages(storage, self.layout, None)
        pages.isa = self.isa
        return pages

    def _views(self, storage: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a storage as the op wants them, [pages, 1 head, page_size, head_dim] each."""
        pages = storage.view(storage.shape[0], 1, -1, self.head_dim)
        keys, values = pages.chunk(2, dim=2)
        return keys, values

    def _write(
        self, key_pages: Tensor, value_pages: Tensor, keys: Tensor, values: Tensor, entry_slots: Tensor
    ) -> None:
        ops.cpu_attn_reshape_and_cache(
            keys.unsqueeze(1), values.unsqueeze(1), key_pages, value_pages, entry_slots, self.isa
        )


def _prompt_times(server: Shape) -> tuple[Path, Times]:
    """Times of reading prompts, and their file. Raises BuildError as the kernel's constructor."""
    # Of one KV head, since all do the same.
    shape = replace(server, layout=replace(server.layout, rows=1, model_rows=1), new_tokens=TIMED_TOKENS)
    file = times_file("prefill_attention", shape)
    return file, kept(file, lambda: time_prefills(shape, lambda x: CPUPages(x, shape.layout, None)))


def _both_are_faster(shape: Shape) -> bool:
    """Whether both our kernels beat vLLM's op over pages in its order for AMX; the log says by how much."""
    key = shape.layout["key"]
    if not all(
        kernel.supports(dtype_of(key), shape.layout.page_size, key.numbers)
        for kernel in (decode_attention, prefill_attention)
    ):
        return False
    try:
        file, prompts = _prompt_times(shape)
        decodes = kept(
            times_file("decode_attention", (shape, "amx")),
            lambda: time_decodes(shape, lambda x: CPUPages(x, shape.layout, None)),
        )
    except BuildError as error:
        logger.warning(
            "KV eviction: reading prompts uses vLLM's attention, as does decoding, which is slower: %s", error
        )
        return False
    both = prompts.kernel <= prompts.op and decodes.kernel <= decodes.op
    logger.log(
        logging.INFO if both else logging.WARNING,
        "KV eviction: reading prompts and decoding use %s: vllm-kvevict's kernels, compiled for %s, take %.2f and %.2f "
        "times as long as vLLM's attention with AMX here, and pages have one order for both (kept in times-*.json in "
        "%s: remove them to time again)",
        "vllm-kvevict's kernels" if both else "vLLM's attention",
        level(),
        prompts.kernel / prompts.op,
        decodes.kernel / decodes.op,
        file.parent,
    )
    return both


def _is_faster(what: str, file: Path, times: Times) -> bool:
    """Whether our kernel beats vLLM's op; the log says by how much, and which file keeps the times."""
    where = (
        f"kept in {file}: remove it to time again" if file.exists() else f"{file.parent} cannot be written"
    )
    found = what, level(), times.kernel / times.op, where
    if times.kernel <= times.op:
        logger.info(
            "KV eviction: %s uses vllm-kvevict's kernel, compiled for %s, which takes %.2f times as long as vLLM's "
            "attention here (%s)",
            *found,
        )
        return True
    logger.warning(
        "KV eviction: %s uses vLLM's attention, because vllm-kvevict's kernel, compiled for %s, takes %.2f times as "
        "long here (%s)",
        *found,
    )
    return False
