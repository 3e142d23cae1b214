"""What a device's pages can do; :class:`CPUPages` and :class:`CUDAPages` are the two there are."""

from typing import Any, Protocol

from torch import Tensor

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.worker.batch import Sequences
from vllm_kvevict.kernels.prefill_attention import PrefillAttention
from vllm_kvevict.schedules.inputs import WindowAttention


class Pages(Protocol):
    """The pool in the order in which a device's attention reads it."""

    uses_triton: bool
    """Whether the project's Triton kernels work on the pages."""

    @property
    def window_attention(self) -> WindowAttention | None:
        """What tokens receive of the window's attention, from pages; None where policies read the keys."""

    def write(self, storage: Tensor, keys: Tensor, values: Tensor, entry_slots: Tensor) -> None:
        """Write entries into pages of any storage.

        Args:
            storage: [pages, page_elements], as of :mod:`vllm_kvevict.kernels.layout`.
            keys, values: [N, head_dim].
            entry_slots: int64 [N], page * page_size + offset; what is negative is skipped.
        """

    def append(self, keys: Tensor, values: Tensor, entry_slots: Tensor) -> None:
        """Write a step's entries into the pool: keys, values [T, H, head_dim], slots int64 [T * H] as above."""

    def attend(
        self,
        queries: Tensor,
        output: Tensor,
        sequences: Sequences,
        scale: float,
        softcap: float,
        sinks: Tensor | None = None,
    ) -> None:
        """Causal attention of every sequence, whose queries are its last tokens.

        Args:
            queries: [N, group, head_dim], sequence after sequence.
            output: likewise, contiguous, filled in place.
            sinks: [group], logits beside those of the keys, which take a share of the attention and give nothing.
        """

    def decode_attention(self, cache: PagedKVCache, group: int, softcap: float) -> Any:
        """The project's kernel for decodes, None where :meth:`attend` serves them too; it knows no sinks."""

    def prefill_attention(self, cache: PagedKVCache, group: int) -> PrefillAttention | None:
        """The project's kernel for prompts, None where :meth:`attend` serves them; it leaves storing to `append`."""
