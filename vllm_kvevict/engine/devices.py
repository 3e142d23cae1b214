"""What differs between the devices that vLLM's workers run on."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.platforms import current_platform

from vllm_kvevict.engine import hooks


@dataclass(frozen=True)
class Device:
    """Where eviction plugs into the workers of one kind of device.

    Attributes:
        worker: path of the worker class.
        backend: path of our attention backend.
        pages: path of the class that reads and writes pages, see :class:`vllm_kvevict.engine.worker.pages.Pages`.
        quantised_pages: likewise, pages in 8 bits.
        page_multiple: what page sizes must be a multiple of.
        is_asynchronous: whether the device runs behind the host. Then to learn how many entries the heads of a layer
            keep costs a wait, which is to happen once for all layers.
    """

    worker: str
    backend: str
    pages: str
    quantised_pages: str
    page_multiple: int
    is_asynchronous: bool

    def load(self, path: str) -> Any:
        """The class of that path; imported on demand, since each device's modules import on that device only."""
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def register_backend(self) -> Any:
        """Make our attention backend known in this process; returns vLLM's name for it."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, self.backend)
        if current_platform.is_cpu():
            _let_cpu_platform_choose()
        return AttentionBackendEnum.CUSTOM


@functools.cache
def _let_cpu_platform_choose() -> None:
    """Let vLLM's CPU platform, which has one backend for all layers, take ours where a layer's kind asks for it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def make(its_own: Callable[..., Any]) -> Callable[..., Any]:
        def choose(selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> Any:
            if selected_backend is AttentionBackendEnum.CUSTOM:
                return selected_backend.get_path()
            return its_own(selected_backend, attn_selector_config, num_heads)

        return choose

    # This process has one platform.
    hooks.wrap("vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls", make, of=current_platform)


CPU = Device(
    worker="vllm_kvevict.engine.worker.worker.EvictionCPUWorker",
    backend="vllm_kvevict.engine.worker.cpu.RaggedCPUBackend",
    pages="vllm_kvevict.engine.worker.cpu.CPUPages",
    quantised_pages="vllm_kvevict.engine.worker.cpu_quantised.QuantisedCPUPages",
    page_multiple=32,
    is_asynchronous=False,
)
CUDA = Device(
    worker="vllm_kvevict.engine.worker.worker.EvictionGPUWorker",
    backend="vllm_kvevict.engine.worker.cuda.RaggedCUDABackend",
    pages="vllm_kvevict.engine.worker.cuda.CUDAPages",
    quantised_pages="vllm_kvevict.engine.worker.cuda.QuantisedCUDAPages",
    page_multiple=16,
    is_asynchronous=True,
)


def this_device() -> Device | None:
    """The kind of device vLLM uses in this process, None where eviction does not know it."""
    if current_platform.is_cpu():
        return CPU
    return CUDA if current_platform.is_cuda() else None
