"""Compile a C++ kernel for the processor it runs on, once; later starts find it in the cache.

A library in the cache ends with a seal, its size and digest: a file that was cut or changed is compiled again, never
loaded. Whatever goes wrong is a :class:`BuildError`, since everything works without these kernels, too.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from vllm_kvevict.kernels import processor

logger = logging.getLogger("vllm.kv_eviction")
warn_once = functools.cache(logger.warning)

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-std=c++17", "-shared", "-fPIC")

LONGEST_BUILD = 3600
"""Seconds after which scratch files belong to a build that was killed."""

SCRATCH = "tmp"
"""How the names of files begin that are being written."""

_SEAL = struct.Struct("<Q32s")


class BuildError(RuntimeError):
    """A kernel could not be compiled; the message says why, in one line, and what would help."""


def load(name: str) -> ctypes.CDLL:
    """The library of ``kernels/<name>.cpp`` for the level that :func:`processor.level` names.

    Raises:
        BuildError: no compiler, no folder for the result, a level that the processor has not, the compiler refused, or
            the result cannot be loaded.
    """
    try:
        return _load(name, processor.level())
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BuildError(f"kernel {name} could not be compiled or loaded: {reason}") from None


def library_file(name: str) -> Path:
    """The file of the library that :func:`load` returns.

    Raises:
        BuildError: as of :func:`load`.
    """
    return Path(load(name)._name)


@functools.cache
def _load(name: str, level: str) -> ctypes.CDLL:
    source = Path(__file__).with_name(f"{name}.cpp")
    compiler, fault = find_compiler()
    if fault is not None:
        warn_once("KV eviction: %s", fault)  # not with each kernel
    if not compiler:
        raise BuildError("no C++ compiler was found: install g++, or set CXX to one")
    flags = _flags(processor.levels()[level])
    library = cache_folder() / f"{name}-{level}-{_fingerprint(source, compiler, flags)}.so"
    if _is_whole(library):
        # What another machine left in a shared folder may not load here.
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(library))
    _build(compiler, flags, source, library)
    return ctypes.CDLL(str(library))


def find_compiler() -> tuple[list[str], str | None]:
    """The words that call the C++ compiler: those of CXX, as make has them, else g++ or c++; empty where there is none.

    With them what is wrong with CXX, in one sentence, where it names a compiler that cannot be run.
    """
    given = os.environ.get("CXX", "")
    try:
        words = shlex.split(given)
    except ValueError:  # a quote that does not end
        words = [given]
    if words and (program := shutil.which(words[0])):
        return [program, *words[1:]], None
    found = [path for name in ("g++", "c++") if (path := shutil.which(name))][:1]
    if not words:
        return found, None
    instead = f"{found[0]} compiles the kernels" if found else "there is no g++ either"
    return found, f"CXX={given} names no program that can be run, so {instead}: correct it, or unset it"


def cache_folder() -> Path:
    """Where compiled kernels lie: ``vllm_kvevict`` in the user's cache folder.

    Raises:
        BuildError: the user has no home, and no variable names a folder.
    """
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise BuildError(
            "there is no home folder to keep compiled kernels in: set HOME, or XDG_CACHE_HOME to a folder"
        ) from None
    return Path(caches) / "vllm_kvevict"


def _flags(level: processor.Level) -> list[str]:
    return [*FLAGS, *level.flags, f"-DLANES={level.lanes}"]


def _build(compiler: Sequence[str], flags: Sequence[str], source: Path, library: Path) -> None:
    """Compile a library into the cache."""
    logger.info("KV eviction: %s is compiled by %s", source.name, shlex.join(compiler))
    folder = library.parent
    folder.mkdir(parents=True, exist_ok=True)
    _remove_old_scratch(folder)
    # Workers may compile at the same time: each in a folder of its own, and who is last replaces the others' result.
    # What cannot be cleaned up must not hide why the build failed.
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder, ignore_cleanup_errors=True) as scratch:
        compiled, sealed = Path(scratch, "compiled.so"), Path(scratch, "sealed.so")
        _compile(compiler, flags, source, str(compiled))
        _write_sealed(compiled.read_bytes(), sealed)
        os.replace(sealed, library)


def _remove_old_scratch(folder: Path) -> None:
    """Remove what killed builds left; others may be at work."""
    for path in folder.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < LONGEST_BUILD:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _compile(compiler: Sequence[str], flags: Sequence[str], source: Path, target: str) -> None:
    command = [*compiler, *flags, str(source), "-o", target]
    # What a compiler that is killed leaves is then found with our own scratch files.
    run = _run(command, TMPDIR=os.path.dirname(target))
    if run.returncode:
        reason = _reason(run.stderr) or f"code {run.returncode}"
        raise BuildError(f"{shlex.join(compiler)} could not compile {source.name}: {reason}")


def _run(command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a compiler that speaks English."""
    env = {**os.environ, "LC_ALL": "C", **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, errors="replace")


def _reason(messages: str) -> str | None:
    """The line of a compiler's messages that says what went wrong: its first error, else its last line."""
    # What only says that the linker failed comes after the linker's own words.
    says_nothing = ("collect2:", "linker command failed")
    lines = [line.strip() for line in messages.splitlines() if not any(text in line for text in says_nothing)]
    errors = [line for line in lines if "error" in line]
    return next(iter(errors or list(filter(None, lines))[-1:]), None)


def _write_sealed(code: bytes, path: Path) -> None:
    """Write a new file that every user whom the umask allows may load, and that is on the disk when this returns."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o777)) as file:
        file.write(code + _seal(code))
        file.flush()
        os.fsync(file.fileno())


def _is_whole(library: Path) -> bool:
    """Whether a library can be read, and is as it was written: loading a file that was cut ends the process."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return content[-_SEAL.size :] == _seal(content[: -_SEAL.size])


def _seal(code: bytes) -> bytes:
    """What follows a library in its file; loaders do not look there."""
    return _SEAL.pack(len(code), hashlib.sha256(code).digest())


def _fingerprint(source: Path, compiler: Sequence[str], flags: Sequence[str]) -> str:
    """Changes with whatever changes the machine code."""
    version = _run([*compiler, "--version"]).stdout
    # -march=native looks at the processor.
    native = [platform.machine(), *sorted(processor.features())]
    sources = [source, *sorted(source.parent.glob("*.h"))]
    parts = [*(path.read_text() for path in sources), *flags, *compiler, version, *native]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
