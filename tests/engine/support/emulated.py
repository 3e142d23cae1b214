"""What runs on a GPU, on this machine's CPU: Triton kernels in Triton's interpreter, FlashAttention as plain torch."""

import contextlib
import importlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.interpreting import interpreted
from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine import config, devices, memory
from vllm_kvevict.engine.frontend import checks, kv_dtype, plugin
from vllm_kvevict.engine.worker import runtime, worker
from vllm_kvevict.engine.worker.batch import Sequences
from vllm_kvevict.engine.worker.cuda import CUDAPages, PagesInRows, QuantisedCUDAPages
from vllm_kvevict.kernels.paged_decode import PagedDecode

SELECT = importlib.import_module("vllm_kvevict.policies.select")  # the package has a function of this name


class Interpreted(PagesInRows):
    """The pages of a GPU in a CPU's memory, for processes in which vLLM's own Triton kernels are interpreted, too."""

    def decode_attention(self, cache: PagedKVCache, group: int, softcap: float) -> PagedDecode:
        sizes = self.page_size, cache.tables.kv_len.shape[0], cache.num_kv_heads, group
        sms = 1  # few programs, since the interpreter runs one after the other
        return PagedDecode(self.storage, *sizes, softcap, sms, self.dtype)


class Emulated(Interpreted):
    """The same with attention in plain torch."""

    def attend(
        self,
        queries: Tensor,
        output: Tensor,
        sequences: Sequences,
        scale: float,
        softcap: float,
        sinks: Tensor | None = None,
    ) -> None:
        starts = sequences.query_start_loc.tolist()
        assert max(b - a for a, b in itertools.pairwise(starts)) == sequences.longest_query
        for i, length in enumerate(sequences.seq_lens.tolist()):
            assert length <= sequences.longest
            pages = sequences.block_table[i, : -(-length // self.page_size)].long()
            keys, values = (x[pages].flatten(0, 1)[:length, 0] for x in self._readable())
            mine = slice(starts[i], starts[i + 1])
            logits = torch.einsum("qgd,kd->gqk", queries[mine], keys) * scale
            if softcap:
                logits = softcap * (logits / softcap).tanh()
            rows = logits.shape[1]
            hidden = torch.ones(rows, length, dtype=torch.bool).triu_(length - rows + 1)
            logits = logits.masked_fill_(hidden, float("-inf"))
            if sinks is not None:
                beside = sinks.view(-1, 1, 1).expand(-1, rows, 1).to(logits.dtype)
                logits = torch.cat([logits, beside], -1)
            weights = logits.softmax(-1)[..., :length]
            output[mine] = torch.einsum("gqk,kd->qgd", weights, values)

    def _readable(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all pages, in floats."""
        if self.key_scales is None or self.value_scales is None:
            return self.key_pages, self.value_pages
        return self.key_pages * self.key_scales[..., None], self.value_pages * self.value_scales[..., None]


class InterpretedPages(CUDAPages, Interpreted):
    """In the model's dtype."""


class EmulatedPages(CUDAPages, Emulated):
    """Likewise."""


class InterpretedPagesInt8(QuantisedCUDAPages, Interpreted):
    """In 8 bits."""


class EmulatedPagesInt8(QuantisedCUDAPages, Emulated):
    """Likewise."""


@contextlib.contextmanager
def emulated_gpu(is_attention_interpreted: bool = False) -> Iterator[None]:
    """Engines started meanwhile do what they would do on a GPU, except for vLLM's own part."""
    pages = "InterpretedPages" if is_attention_interpreted else "EmulatedPages"
    device = devices.Device(
        worker=devices.CPU.worker,
        backend=devices.CPU.backend,
        pages=f"{__name__}.{pages}",
        quantised_pages=f"{__name__}.{pages}Int8",
        page_multiple=devices.CUDA.page_multiple,
        is_asynchronous=devices.CUDA.is_asynchronous,
    )
    with interpreted(), pytest.MonkeyPatch.context() as patch:
        for module in (checks, config, kv_dtype, memory, runtime, worker):
            patch.setattr(module, "this_device", lambda: device)
        patch.setattr(plugin, "CPU", device)
        patch.setattr(SELECT, "on_gpu", lambda tensor: True)
        yield
