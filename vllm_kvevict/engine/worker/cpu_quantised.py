"""Pages in 8 bits on a CPU: our kernels store entries, and attend to what is stored.

Entries are quantised once, when their step has computed them; whoever sees them afterwards sees what is stored.
"""

from typing import Any

import torch
from torch import Tensor

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.worker.pages import InEightBits
from vllm_kvevict.kernels.build import load
from vllm_kvevict.kernels.decode_attention import DecodeAttention
from vllm_kvevict.kernels.layout import KVLayout
from vllm_kvevict.kernels.prefill_attention import FEWEST_TOKENS, PrefillAttention
from vllm_kvevict.kernels.quantise import Quantised, Quantiser, write_entries


class QuantisedCPUPages(InEightBits):
    """The pool as our kernels store and read it, as of :class:`vllm_kvevict.engine.worker.pages.Pages`.

    Args:
        storage: int8 [pages, page_bytes], contiguous.
        layout: of the entries.
        vllm_config: of the server, which says how many drafts a step may have.

    Raises:
        BuildError: a kernel cannot be compiled here.
    """

    uses_triton = False
    window_attention = None
    attend = None

    def __init__(self, storage: Tensor, layout: KVLayout, vllm_config: Any):
        self.storage, self.layout = storage, layout
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        self.most_drafts = vllm_config.num_speculative_tokens
        self._quantise = Quantiser(self.dtype)
        # Without those that attend nothing can be served either: a server is to refuse that now.
        for kernel in ("decode_attention", "prefill_attention"):
            load(kernel)

    def write(
        self,
        storage: Tensor,
        keys: Tensor,
        key_scales: Tensor,
        value_scales: Tensor,
        values: Tensor,
        entry_slots: Tensor,
    ) -> None:
        """As of :meth:`Pages.write`, entries as they are stored."""
        key, value = Quantised(keys, key_scales.squeeze(-1)), Quantised(values, value_scales.squeeze(-1))
        write_entries(storage, self.layout.page_size, key, value, entry_slots)

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Quantised, Quantised]:
        """As of :meth:`Pages.encode`."""
        return self._quantise(keys, True), self._quantise(values, False)

    def append(self, keys: Quantised, values: Quantised, entry_slots: Tensor) -> None:
        """As of :meth:`Pages.append`."""
        write_entries(self.storage, self.layout.page_size, keys, values, entry_slots)

    def decode_attention(self, cache: PagedKVCache, group: int, softcap: float) -> DecodeAttention:
        """Our kernel, which also takes prompts that are too short for the other one."""
        most_new_tokens = max(FEWEST_TOKENS - 1, 1 + self.most_drafts)
        return DecodeAttention(self.storage, self.layout.page_size, most_new_tokens, self.dtype)

    def prefill_attention(self, cache: PagedKVCache, group: int) -> PrefillAttention:
        """Our kernel."""
        return PrefillAttention(self.dtype, self.storage, self.layout.page_size)
