"""Pages in 8 bits on a CPU: our kernels store entries, and attend to what is stored."""

from torch import Tensor

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.cache.format import dtype_of
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

    Raises:
        BuildError: a kernel cannot be compiled here.
    """

    uses_triton = False
    window_attention = None
    attend = None
    store = staticmethod(write_entries)

    def __init__(self, storage: Tensor, layout: KVLayout):
        self.storage, self.page_size = storage, layout.page_size
        self.dtype = dtype_of(layout.computed_key)
        self._quantise = Quantiser(self.dtype)
        # Without those that attend nothing can be served either: a server is to refuse that now.
        for kernel in ("decode_attention", "prefill_attention"):
            load(kernel)

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Quantised, Quantised]:
        """As of :meth:`Pages.encode`."""
        return self._quantise(keys, True), self._quantise(values, False)

    def decode_attention(self, cache: PagedKVCache, group: int, softcap: float) -> DecodeAttention:
        """Our kernel, which takes whatever is too short for the other one: prompts and drafts, too."""
        return DecodeAttention(self.storage, self.page_size, FEWEST_TOKENS - 1, self.dtype)

    def prefill_attention(self, cache: PagedKVCache, group: int) -> PrefillAttention:
        """Our kernel."""
        return PrefillAttention(self.dtype, self.storage, self.page_size)
