"""One engine with KV eviction per process: attention layers and connectors find their runtime by the process."""

import gc
import os
import weakref
from typing import Any

from vllm_kvevict.engine.config import KVEvictionError


class _Engine:
    """The engine of this process, or of the one that it was forked off from."""

    def __init__(self, worker: Any):
        self.worker = weakref.ref(worker)
        self.process = os.getpid()
        self.started = False

    @property
    def is_here(self) -> bool:
        """Whether it is up, in this very process."""
        return self.started and self.process == os.getpid() and self.worker() is not None


_engine: _Engine | None = None


def check_alone() -> None:
    """Refuse an engine beside another one.

    Raises:
        KVEvictionError: one sentence that says what to do.
    """
    if _engine is not None and _engine.is_here:
        # One that was dropped without being shut down refers to itself, and vLLM hides it from the collector.
        gc.unfreeze()
        gc.collect()
    if _engine is not None and _engine.is_here:
        raise KVEvictionError(
            "--kv-eviction: another engine with KV eviction already runs in this process, so end it first or give "
            "each a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1)"
        )


def begin(worker: Any) -> None:
    """A worker starts here; nothing refers to it but this, weakly."""
    global _engine
    _engine = _Engine(worker)


def mark_started() -> None:
    """The scheduler has heard of all ranks: from now on the engine of this process counts as running."""
    if _engine is not None:
        _engine.started = True


def end(worker: Any) -> bool:
    """A worker ended; whether it was the one of this process."""
    global _engine
    if _engine is None or _engine.worker() is not worker:
        return False
    _engine = None
    return True
