"""What differs between the devices that vLLM's workers run on."""

import importlib
from dataclasses import dataclass
from typing import Any

from vllm.platforms import current_platform


@dataclass(frozen=True)
class Device:
    """Where eviction plugs into the workers of one kind of device.

    Attributes:
        worker: path of the worker class.
        backend_slot: entry of vLLM's attention backends that ours takes.
        backend: path of our attention backend.
        pages: path of the class that reads and writes pages, see :class:`vllm_kvevict.engine.worker.pages.Pages`.
        page_multiple: what page sizes must be a multiple of.
        is_asynchronous: whether the device runs behind the host. Then to learn how many entries the heads of a layer
            keep costs a wait, which is to happen once for all layers.
    """

    worker: str
    backend_slot: str
    backend: str
    pages: str
    page_multiple: int
    is_asynchronous: bool

    def load(self, path: str) -> Any:
        """The class of that path; imported on demand, since each device's modules import on that device only."""
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def register_backend(self) -> Any:
        """Put our attention backend into its entry, in this process; returns the entry."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        slot = AttentionBackendEnum[self.backend_slot]
        register_backend(slot, self.backend)
        return slot


# vLLM's CPU platform knows one backend only, so that one is replaced while a worker's layers are made.
CPU = Device(
    worker="vllm_kvevict.engine.worker.worker.EvictionCPUWorker",
    backend_slot="CPU_ATTN",
    backend="vllm_kvevict.engine.worker.cpu.RaggedCPUBackend",
    pages="vllm_kvevict.engine.worker.cpu.CPUPages",
    page_multiple=32,
    is_asynchronous=False,
)
CUDA = Device(
    worker="vllm_kvevict.engine.worker.worker.EvictionGPUWorker",
    backend_slot="CUSTOM",
    backend="vllm_kvevict.engine.worker.cuda.RaggedCUDABackend",
    pages="vllm_kvevict.engine.worker.cuda.CUDAPages",
    page_multiple=16,
    is_asynchronous=True,
)


def this_device() -> Device | None:
    """The kind of device vLLM uses in this process, None where eviction does not know it."""
    if current_platform.is_cpu():
        return CPU
    return CUDA if current_platform.is_cuda() else None
