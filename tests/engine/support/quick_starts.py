"""Engines start and stop in a fraction of a second: what a process needs once is done once for all of them."""

import contextlib
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import Any
from unittest import mock

from vllm.distributed.device_communicators import shm_broadcast
from vllm.model_executor.models import registry
from vllm.triton_utils import dispatcher
from vllm.v1.engine import coordinator, core, utils
from vllm.v1.executor import multiproc_executor

PAUSE = 2e-4
"""Seconds between two looks at whether another process has written; vLLM looks all the time."""


@contextlib.contextmanager
def quick_starts() -> Iterator[None]:
    """For all engines of this process, and for workers that are forked from it."""
    with (
        mock.patch.object(dispatcher, "_rebind_kernels", _without_llvmlite(dispatcher._rebind_kernels)),
        mock.patch.object(dispatcher, "register_kernels", _once(dispatcher.register_kernels)),
        # A class of models is looked at in a process of its own, which imports vLLM anew, in case it brings up a GPU.
        mock.patch.object(registry, "_run_in_subprocess", lambda look: look()),
        # At an engine's end vLLM looks for garbage eight times, through all that was ever imported; what was frozen
        # before stays so instead, and the engine itself is never frozen.
        mock.patch.object(core, "freeze_gc_heap", lambda: None),
        mock.patch.object(gc, "unfreeze", lambda: None),
    ):
        yield


@contextlib.contextmanager
def forked_processes() -> Iterator[None]:
    """On CPUs vLLM starts engines and workers anew, whatever its settings say: for longer than most tests take, and
    without what a test has changed in this process. Here they are forked, and leave the processor to others while they
    wait for each other."""

    def forks() -> BaseContext:
        return multiprocessing.get_context("fork")

    with contextlib.ExitStack() as patches:
        for module in (coordinator, utils, multiproc_executor):
            patches.enter_context(mock.patch.object(module, "get_mp_context", forks))
        patches.enter_context(mock.patch.object(shm_broadcast, "sched_yield", lambda: time.sleep(PAUSE)))
        yield


Kernels = Mapping[str, Callable[..., Any]]


def _once(register: Callable[[Kernels], None]) -> Callable[[Kernels], None]:
    """To find who has a kernel, vLLM looks at every object of every module; afterwards all have the replaced one."""

    def register_new(overrides: Kernels) -> None:
        if not overrides.keys() <= dispatcher._registry.keys():
            register(overrides)

    return register_new


def _without_llvmlite(rebind: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
    """That look fails at an object of llvmlite's that seems to have any attribute. Drafts by ngram import it."""

    def rebind_others(overrides: list[Any]) -> None:
        module = sys.modules.pop("llvmlite.binding.ffi", None)
        try:
            rebind(overrides)
        finally:
            if module is not None:
                sys.modules["llvmlite.binding.ffi"] = module

    return rebind_others
