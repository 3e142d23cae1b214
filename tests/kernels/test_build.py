"""Compiling a kernel: once, and with a reason when it cannot be done."""

import ctypes
import logging
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT
from vllm_kvevict.kernels import build, processor


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """An empty cache folder, and no library from an earlier test; none is run, so the compiler may be quick."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "FLAGS", ("-O0", *(flag for flag in build.FLAGS if flag != "-O3")))
    build._load.cache_clear()
    yield
    build._load.cache_clear()


@pytest.fixture
def compiled(monkeypatch):
    """The commands that were run."""
    commands = []
    compile_ = build._compile
    monkeypatch.setattr(build, "_compile", lambda *args: (commands.append(args), compile_(*args)))
    return commands


def test_compiles_once_for_each_header_and_flags(compiled, monkeypatch, tmp_path):
    source = Path(build.__file__)
    for path in source.parent.glob("*.[ch]*"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(build, "__file__", str(tmp_path / source.name))

    def compilations():
        """How many there were, once it was loaded by another process."""
        build._load.cache_clear()
        assert isinstance(build.load("decode_attention"), ctypes.CDLL)
        return len(compiled)

    assert compilations() == compilations() == 1
    with open(tmp_path / "vectors.h", "a") as header:
        header.write("// changed\n")
    assert compilations() == 2
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    assert compilations() == 3
    assert [path.suffix for path in build.cache_folder().iterdir()] == [".so"] * 3


def test_a_level_is_compiled_for_and_named(compiled, monkeypatch):
    for number, (name, level) in enumerate(processor.levels().items(), 1):
        monkeypatch.setenv(processor.ENVIRONMENT, name)
        build.load("decode_attention")
        _, flags, _, _ = compiled[-1]
        assert len(compiled) == number
        assert f"-DLANES={level.lanes}" in flags and {*level.flags} <= {*flags}
    names = sorted(path.name.split("-")[1] for path in build.cache_folder().iterdir())
    assert names == sorted(processor.levels())


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match=r"install g\+\+, or set CXX to one"):
        build.load("decode_attention")


def refusal() -> str:
    """The one line that says why there is no kernel."""
    with pytest.raises(build.BuildError) as error:
        build.load("decode_attention")
    (line,) = str(error.value).splitlines()
    return line


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Sets a compiler that runs a script of the shell; ``$target`` is the file that it should write."""

    def use(script: str) -> None:
        path = tmp_path / "compiler"
        find = 'for word; do [ "$before" = -o ] && target=$word; before=$word; done'
        path.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit\n{find}\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    return use


def test_a_compiler_that_fails(compiler):
    compiler("echo 'x.cpp:1: error: no such thing' >&2; exit 1")
    assert refusal().endswith("no such thing")
    assert list(build.cache_folder().iterdir()) == []


def test_no_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(
        "pwd.getpwuid", {}.__getitem__
    )  # a user whom the machine does not know, as in a container
    assert refusal() == (
        "there is no home folder to keep compiled kernels in: set HOME, or XDG_CACHE_HOME to a folder"
    )


QUICK = """echo 'extern "C" void decode_attention() {}' | g++ -x c++ -shared -fPIC - -o $target"""
"""Compiles something else, in no time."""


@pytest.mark.parametrize("size", [0, 1 << 14])
def test_no_space(size):
    """Files that may not grow, as on a full disk; such a compiler is killed."""
    ended = load_elsewhere(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1
    assert re.search("File too large|File size limit", ended.stderr)
    assert list(build.cache_folder().iterdir()) == []


def test_docs_name_the_folder_and_the_reasons(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    page = (ROOT / "docs/TROUBLESHOOTING.md").read_text()
    assert f"rm -r ~/{build.cache_folder().relative_to(Path.home())}\n" in page
    source = Path(build.__file__).read_text()
    for reason in ("no C++ compiler was found", "there is no home folder", "could not compile"):
        assert f"| `{reason}`" in page and reason in source
    assert "`noexec`" in page


# What another process finds in the cache: a library that is loaded here would not be loaded again.


def load_elsewhere(**settings) -> subprocess.CompletedProcess[str]:
    """Load the kernel in a process of its own, which ends with 1 and the reason if it cannot."""
    code = (
        f"from vllm_kvevict.kernels import build\nbuild.FLAGS = {build.FLAGS}\n"
        "try:\n    build.load('decode_attention')\n"
        "except build.BuildError as error:\n    raise SystemExit(str(error))"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, **settings)


@pytest.fixture
def library(compiler) -> Path:
    """The file of a library that another process compiled."""
    compiler(QUICK)
    ended = load_elsewhere()
    assert ended.returncode == 0, ended.stderr
    (path,) = build.cache_folder().glob("*.so")
    return path


@pytest.mark.parametrize("size", [0, 3000, -1], ids=["empty", "cut", "one byte less"])
def test_a_file_that_was_cut_is_compiled_again(library, size):
    whole = library.read_bytes()
    library.write_bytes(whole[:size])
    ended = load_elsewhere()
    assert ended.returncode == 0, ended.stderr
    assert library.read_bytes() == whole


def test_what_does_not_load_is_compiled_again(compiled, library, monkeypatch):
    """Such as a library of another machine, in a home that both have."""
    load, failures = ctypes.CDLL, ["libgomp.so.1: cannot open shared object file"]

    def load_later(path):
        if failures:
            raise OSError(failures.pop())
        return load(path)

    monkeypatch.setattr(build.ctypes, "CDLL", load_later)
    build.load("decode_attention")
    assert len(compiled) == 1
    build._load.cache_clear()
    failures += ["failed to map segment: Operation not permitted"] * 2  # as where nothing may be executed
    assert refusal().endswith("failed to map segment: Operation not permitted")
    assert len(compiled) == 2


def test_the_compiler_that_cxx_names_comes_first(monkeypatch):
    ((found,), fault) = build.find_compiler()
    assert "++" in found and fault is None
    monkeypatch.setenv("CXX", "true 'a b' -c")
    assert build.find_compiler() == ([shutil.which("true"), "a b", "-c"], None)
    for unset in ("", "  "):
        monkeypatch.setenv("CXX", unset)
        assert build.find_compiler() == ([found], None)


@pytest.fixture
def log(caplog, monkeypatch):
    """What the module logs, whatever vLLM has made of its loggers."""
    build.warn_once.cache_clear()
    monkeypatch.setattr(build.logger, "propagate", False)
    build.logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, build.logger.name):
        yield caplog
    build.logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("given", ["no-such-compiler", "no-such-compiler g++", "g++ 'a"])
def test_a_cxx_that_cannot_be_run_is_named_once(given, monkeypatch, log):
    (found, _) = build.find_compiler()
    monkeypatch.setenv("CXX", given)
    for name in ("decode_attention", "prefill_attention"):
        build.load(name)
    (line,) = [entry.getMessage() for entry in log.records if entry.levelno == logging.WARNING]
    assert line.startswith(
        f"KV eviction: CXX={given} names no program that can be run, so {found[0]} compiles"
    )
