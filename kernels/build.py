"""Compile a C++ kernel for the processor it runs on, once; later starts find it in the cache."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vllm_kvevict.kernels import processor

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-std=c++17", "-shared", "-fPIC")


class BuildError(RuntimeError):
    """A kernel could not be compiled; the message says why and what would help."""


def load(name: str) -> ctypes.CDLL:
    """The library of ``kernels/<name>.cpp`` for the level that :func:`processor.level` names.

    Raises:
        BuildError: no compiler, no folder for the result, a level that the processor has not, or the compiler refused.
    """
    try:
        return _load(name, processor.level())
    except ValueError as error:
        raise BuildError(f"kernel {name} was not compiled: {error}") from None


@functools.cache
def _load(name: str, level: str) -> ctypes.CDLL:
    source = Path(__file__).with_name(f"{name}.cpp")
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found: install g++, or set CXX to one")
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        flags = _flags(processor.levels()[level])
        library = folder / f"{name}-{level}-{_fingerprint(source, compiler, flags)}.so"
        if not library.exists():
            # Workers may compile at the same time: each writes a file of its own and the last name wins.
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as scratch:
                _compile(compiler, flags, source, scratch.name)
            os.replace(scratch.name, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"kernel {name} could not be compiled or loaded: {error}") from None


def find_compiler() -> str | None:
    """Path of the C++ compiler: the one that CXX names, else g++ or c++."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def cache_folder() -> Path:
    """Where compiled kernels lie: ``vllm_kvevict`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm_kvevict"


def _flags(level: processor.Level) -> list[str]:
    return [*FLAGS, *level.flags, f"-DLANES={level.lanes}"]


def _compile(compiler: str, flags: Sequence[str], source: Path, target: str) -> None:
    run = subprocess.run([compiler, *flags, str(source), "-o", target], capture_output=True, text=True)
    if run.returncode:
        os.unlink(target)
        reason = next((line for line in run.stderr.splitlines() if "error" in line), f"code {run.returncode}")
        raise BuildError(f"{compiler} could not compile {source.name}: {reason}")


def _fingerprint(source: Path, compiler: str, flags: Sequence[str]) -> str:
    """Changes with whatever changes the machine code."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    # -march=native looks at the processor.
    native = [platform.machine(), *sorted(processor.features())]
    parts = [source.read_text(), *flags, compiler, version, *native]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
