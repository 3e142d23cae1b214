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
from vllm_kvevict.engine.frontend import checks, plugin
from vllm_kvevict.engine.worker import runtime, worker
from vllm_kvevict.engine.worker.batch import Sequences
from vllm_kvevict.engine.worker.cuda import CUDAPages
from vllm_kvevict.kernels.paged_decode import PagedDecode

SELECT = importlib.import_module("vllm_kvevict.policies.select")  # the package has a function of this name


class InterpretedPages(CUDAPages):
    """The pages of a GPU in a CPU's memory, for processes in which vLLM's own Triton kernels are interpreted, too."""

    def decode_attention(self, cache: PagedKVCache, group: int, softcap: float) -> PagedDecode:
        requests = cache.tables.kv_len.shape[0]
        sms = 1  # few programs, since the interpreter runs one after the other
        return PagedDecode(self.storage, self.page_size, requests, cache.num_kv_heads, group, softcap, sms)


class EmulatedPages(InterpretedPages):
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
            keys, values = (x[pages].flatten(0, 1)[:length, 0] for x in (self.key_pages, self.value_pages))
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


@contextlib.contextmanager
def emulated_gpu(pages: type[InterpretedPages] = EmulatedPages) -> Iterator[None]:
    """Engines started meanwhile do what they would do on a GPU, except for vLLM's own part."""
    device = devices.Device(
        worker=devices.CPU.worker,
        backend=devices.CPU.backend,
        pages=f"{__name__}.{pages.__name__}",
        page_multiple=devices.CUDA.page_multiple,
        is_asynchronous=devices.CUDA.is_asynchronous,
    )
    with interpreted(), pytest.MonkeyPatch.context() as patch:
        for module in (checks, config, memory, runtime, worker):
            patch.setattr(module, "this_device", lambda: device)
        patch.setattr(plugin, "CPU", device)
        patch.setattr(SELECT, "on_gpu", lambda tensor: True)
        yield
