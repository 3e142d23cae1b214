"""Times of kernels that outlast the process, so that a server chooses the same kernels at every start.

Two kernels round differently. Where they are about as fast as each other, timing anew at each start would choose now
one, now the other, and the same request would have other logits after a restart. So the first start's times are kept
beside the compiled kernel, for all later starts and all ranks of a machine.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import vllm

from vllm_kvevict.kernels import build


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
    parts = [library.stem, vllm.__version__, torch.__version__, repr(shape)]
    return library.with_name(f"times-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}.json")


def kept(file: Path, measure: Callable[[], Times]) -> Times:
    """The times that a file has, else those that are measured now, which it then has.

    Where the file cannot be written, each start measures.
    """
    # Asked first, so that what another rank writes in this moment is not removed.
    if file.exists():
        times = _read(file)
        if times is not None:
            return times
        with contextlib.suppress(OSError):
            file.unlink()
    measured = measure()
    _write(file, measured)
    # Of ranks that start together the first to write decides for all.
    return _read(file) or measured


def _read(file: Path) -> Times | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        times = Times(**json.loads(file.read_text()))
        if min(times.kernel, times.op) > 0:
            return times
    return None


def _write(file: Path, times: Times) -> None:
    """Write the file, whole, unless another process has written it meanwhile."""
    with (
        contextlib.suppress(OSError),
        tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=build.SCRATCH) as scratch,
    ):
        json.dump(asdict(times), scratch)
        scratch.flush()
        Path(scratch.name).chmod(0o644)
        file.hardlink_to(scratch.name)
