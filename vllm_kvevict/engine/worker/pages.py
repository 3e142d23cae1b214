"""What a device's pages can do; those there are: :class:`CPUPages` and :class:`CUDAPages`, and in 8 bits
:class:`QuantisedCPUPages` and :class:`QuantisedCUDAPages`."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.worker.batch import Sequences
from vllm_kvevict.kernels.prefill_attention import PrefillAttention
from vllm_kvevict.kernels.quantise import Quantised
from vllm_kvevict.schedules.inputs import WindowAttention


class Attend(Protocol):
    """Causal attention of every sequence, whose queries are its last tokens."""

    def __call__(
        self,
        queries: Tensor,
        output: Tensor,
        sequences: Sequences,
        scale: float,
        softcap: float,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend.

        Args:
            queries: [N, group, head_dim], sequence after sequence.
            output: likewise, contiguous, filled in place.
            sinks: [group], logits beside those of the keys, which take a share of the attention and give nothing.
        """


class Pages(Protocol):
    """The pool in the order in which a device's attention reads it."""

    uses_triton: bool
    """Whether the project's Triton kernels work on the pages."""

    @property
    def window_attention(self) -> WindowAttention | None:
        """What tokens receive of the window's attention, from pages; None where policies read the keys."""

    def write(self, storage: Tensor, *entries_and_slots: Tensor) -> None:
        """Write entries into pages of any storage, as of :data:`vllm_kvevict.cache.format.Write`."""

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Any, Any]:
        """A step's keys and values, [T, H, head_dim] each, as they are stored: both can be sliced by tokens."""

    def fields(self, keys: Any, values: Any) -> Mapping[str, Tensor]:
        """Encoded keys and values by the names of their fields, [T, H, numbers] each."""

    def append(self, keys: Any, values: Any, entry_slots: Tensor) -> None:
        """Write a step's entries, encoded, into the pool.

        Args:
            entry_slots: int64 [T * H], page * page_size + offset; what is negative is skipped.
        """

    @property
    def attend(self) -> Attend | None:
        """Causal attention over the pool; None where the project's kernels serve all that there is."""

    def decode_attention(self, cache: PagedKVCache, group: int, softcap: float) -> Any:
        """The project's kernel for decodes, None where :meth:`attend` serves them too; it knows no sinks."""

    def prefill_attention(self, cache: PagedKVCache, group: int) -> PrefillAttention | None:
        """The project's kernel for prompts, None where :meth:`attend` serves them; it leaves storing to `append`."""


class InEightBits:
    """Pages whose entries are stored as integers with scales. They are quantised once, when their step has computed
    them; whoever sees them afterwards sees what is stored.

    Attributes:
        storage: int8 [pages, page_bytes], contiguous.
        page_size: entries per page.
        store: the device's kernel, called as :func:`vllm_kvevict.kernels.quantise.write_entries`.
    """

    storage: Tensor
    page_size: int
    store: Callable[[Tensor, int, Quantised, Quantised, Tensor], None]

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
        key, value = Quantised(keys.unsqueeze(1), key_scales), Quantised(values.unsqueeze(1), value_scales)
        self.store(storage, self.page_size, key, value, entry_slots)

    def append(self, keys: Quantised, values: Quantised, entry_slots: Tensor) -> None:
        """As of :meth:`Pages.append`."""
        self.store(self.storage, self.page_size, keys, values, entry_slots)

    def fields(self, keys: Quantised, values: Quantised) -> Mapping[str, Tensor]:
        """As of :meth:`Pages.fields`."""
        return {
            "key": keys.numbers,
            "key_scale": keys.scales.unsqueeze(-1),
            "value_scale": values.scales.unsqueeze(-1),
            "value": values.numbers,
        }


class AsComputed:
    """Pages whose entries are stored as the model computes them."""

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As of :meth:`Pages.encode`."""
        return keys, values

    def fields(self, keys: Tensor, values: Tensor) -> Mapping[str, Tensor]:
        """As of :meth:`Pages.fields`."""
        return {"key": keys, "value": values}
