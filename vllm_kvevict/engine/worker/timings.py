"""Times of kernels that outlast the process, so that a server chooses the same kernels at every start.

Two kernels round differently. Where they are about as fast as each other, timing anew at each start would choose now
one, now the other, and the same request would have other logits after a restart. So the first start's times are kept
beside the compiled kernel, for all later starts and all ranks of a machine.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock
import torch
import vllm

from vllm_kvevict import machine
from vllm_kvevict.kernels import build

PATIENCE = 60
"""Seconds to wait for another rank that measures, which takes it less than one."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of processor time of each side's fastest step; both do the same work.

    Attributes:
        kernel: our kernel's.
        op: vLLM's attention's.
    """

    kernel: float
    op: float


def times_file(kernel: str, shape: object) -> Path:
    """Where the times of ``kernels/<kernel>.cpp`` for a shape are kept; another name for whatever may change them.

    Raises:
        BuildError: as of :func:`vllm_kvevict.kernels.build.load`.
    """
    library = build.library_file(kernel)
    parts = [library.stem, machine.cpu_model(), vllm.__version__, torch.__version__, repr(shape)]
    return library.with_name(f"times-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}.json")


def kept(file: Path, measure: Callable[[], Times]) -> Times:
    """The times that a file has, else those that are measured now, which it then has.

    Of ranks that start together one measures, and the others wait for it. Where the file cannot be written, each start
    measures.
    """
    if (times := _read(file)) is not None:
        return times
    with _one_at_a_time(file):
        times = _read(file)
        if times is None:
            times = measure()
            _write(file, times)
        return times


@contextlib.contextmanager
def _one_at_a_time(file: Path) -> Iterator[None]:
    """Wait while another process is in here for this file, where the file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):
            # Users may share the folder.
            stack.enter_context(filelock.FileLock(file.with_suffix(".lock"), timeout=PATIENCE, mode=0o666))
        yield


def _read(file: Path) -> Times | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        times = Times(**json.loads(file.read_text()))
        if min(times.kernel, times.op) > 0:
            return times
    return None


def _write(file: Path, times: Times) -> None:
    """Write the file whole, so that nobody reads half of it."""
    scratch = file.with_name(f"{build.SCRATCH}-{os.getpid()}-{file.name}")
    with contextlib.suppress(OSError):
        scratch.write_text(json.dumps(asdict(times)))
        scratch.replace(file)
