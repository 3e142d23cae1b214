"""Compile a C++ kernel for the processor it runs on, once; later starts find it in the cache."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from vllm_kvevict.kernels import processor

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-std=c++17", "-shared", "-fPIC")
DIGEST = 64
"""Characters of the digest at a library's end."""
SCRATCH, OLD_SECONDS = ".build-", 3600
"""How folders of builds are called, and after how long one is left over."""


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
        flags = _flags(processor.levels()[level])
        library = cache_folder() / f"{name}-{level}-{_fingerprint(source, compiler, flags)}.so"
        if is_whole(library):
            with contextlib.suppress(OSError):
                return ctypes.CDLL(str(library))
        _build(compiler, flags, source, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"kernel {name} could not be compiled or loaded: {error}") from None


def is_whole(library: Path) -> bool:
    """Whether a library can be read and is what was compiled: loading one that was cut would end the process."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST]).hexdigest().encode() == content[-DIGEST:]


def _build(compiler: str, flags: Sequence[str], source: Path, library: Path) -> None:
    """Compile into a folder of our own, since workers may compile at the same time, and move the result."""
    library.parent.mkdir(parents=True, exist_ok=True)
    _remove_old_scratch(library.parent)
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=library.parent))
    try:
        # The compiler creates it, so that it has the permissions that the user's umask gives.
        compiled = scratch / library.name
        _compile(compiler, flags, source, str(compiled))
        with compiled.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.write(digest.encode())  # loaders ignore what follows a library
            file.flush()
            os.fsync(file.fileno())
        os.replace(compiled, library)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_old_scratch(folder: Path) -> None:
    """Remove what killed builds have left."""
    for left in folder.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > OLD_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def find_compiler() -> str | None:
    """Path of the C++ compiler: the one that CXX names, else g++ or c++."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def cache_folder() -> Path:
    """Where compiled kernels lie: ``vllm_kvevict`` in the user's cache folder.

    Raises:
        BuildError: the user has no home directory.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm_kvevict"
    except RuntimeError as error:
        raise BuildError(f"there is no folder for compiled kernels ({error}): set XDG_CACHE_HOME") from None


def _flags(level: processor.Level) -> list[str]:
    return [*FLAGS, *level.flags, f"-DLANES={level.lanes}"]


def _compile(compiler: str, flags: Sequence[str], source: Path, target: str) -> None:
    command, env = [compiler, *flags, str(source), "-o", target], {**os.environ, "LC_ALL": "C"}
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", env=env)
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else f"code {run.returncode}"
        reason = next((line for line in lines if "error" in line), last)
        raise BuildError(f"{compiler} could not compile {source.name}: {reason}")


def _fingerprint(source: Path, compiler: str, flags: Sequence[str]) -> str:
    """Changes with whatever changes the machine code."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    # -march=native looks at the processor.
    native = [platform.machine(), *sorted(processor.features())]
    parts = [source.read_text(), *flags, compiler, version, *native]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
