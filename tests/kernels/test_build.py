"""Compiling a kernel: once, and with a reason when it cannot be done."""

import ctypes
import errno
import os

import pytest

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


def test_compiles_once(compiled):
    assert isinstance(build.load("decode_attention"), ctypes.CDLL)
    build._load.cache_clear()  # as another process
    build.load("decode_attention")
    assert len(compiled) == 1
    assert [path.suffix for path in build.cache_folder().iterdir()] == [".so"]


def test_other_flags_are_another_library(compiled, monkeypatch):
    build.load("decode_attention")
    build._load.cache_clear()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    build.load("decode_attention")
    assert len(compiled) == 2 and len(list(build.cache_folder().iterdir())) == 2


def test_a_level_is_compiled_for_and_named(compiled, monkeypatch):
    for number, (name, level) in enumerate(processor.levels().items(), 1):
        monkeypatch.setenv(processor.ENVIRONMENT, name)
        build.load("decode_attention")
        _, flags, _, _ = compiled[-1]
        assert len(compiled) == number
        assert f"-DLANES={level.lanes}" in flags and {*level.flags} <= {*flags}
    names = sorted(path.name.split("-")[1] for path in build.cache_folder().iterdir())
    assert names == sorted(processor.levels())


def test_a_level_that_the_processor_has_not(monkeypatch):
    monkeypatch.setenv(processor.ENVIRONMENT, "avx1024")
    with pytest.raises(build.BuildError, match=r"VLLM_KVEVICT_CPU_LEVEL must be one of .*, got 'avx1024'"):
        build.load("decode_attention")


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match=r"install g\+\+, or set CXX to one"):
        build.load("decode_attention")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("x.cpp:1: error: no such thing", "no such thing"),
        ("ld: error: no space", "ld: error: no space"),
        ("$LC_ALL: Fehler", "C: Fehler"),
    ],
    ids=["compiler", "linker", "another language"],
)
def test_a_compiler_that_fails(monkeypatch, tmp_path, said, reason):
    """It leaves no file, nor do we; the last line that it says is the reason, in English if it knows that."""
    compiler = tmp_path / "broken"
    compiler.write_text(f'#!/bin/sh\n[ $1 = --version ] || {{ echo "{said}" >&2; exit 1; }}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(build.BuildError, match=reason):
        build.load("decode_attention")
    assert list(build.cache_folder().iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"ELF", None])
def test_a_library_that_was_cut_is_built_again(compiled, content):
    """Loading half of one would end the process."""
    build.load("decode_attention")
    (library,) = build.cache_folder().iterdir()
    whole = library.read_bytes()
    cut = library.with_name("cut")
    cut.write_bytes(whole[: len(whole) // 2] if content is None else content)
    cut.replace(library)  # the one that is loaded stays as it is
    assert not build.is_whole(library)
    build._load.cache_clear()
    build.load("decode_attention")
    assert len(compiled) == 2 and build.is_whole(library)


def test_a_library_that_cannot_be_loaded_is_built_again(compiled, monkeypatch):
    """Such as one for another libc; nothing is wrong with its digest."""
    build.load("decode_attention")
    build._load.cache_clear()
    library, tried = ctypes.CDLL, []

    def fails_once(path):
        tried.append(path)
        if len(tried) == 1:
            raise OSError("version `GLIBC_9' not found")
        return library(path)

    monkeypatch.setattr(build.ctypes, "CDLL", fails_once)
    assert build.load("decode_attention") and len(tried) == len(compiled) == 2


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_others_may_read_what_the_umask_lets_them(umask):
    before = os.umask(umask)
    try:
        build.load("decode_attention")
    finally:
        os.umask(before)
    (library,) = build.cache_folder().iterdir()
    assert library.stat().st_mode & 0o777 == 0o777 & ~umask


def test_left_over_scratch_goes():
    folder = build.cache_folder()
    old, new = folder / ".build-old", folder / ".build-new"
    for left in (old, new):
        left.mkdir(parents=True)
    os.utime(old, (0, 0))
    build.load("decode_attention")
    assert not old.exists() and new.exists()


def test_a_full_disk_is_named(monkeypatch):
    def no_space(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build.os, "fsync", no_space)
    with pytest.raises(build.BuildError, match="No space left on device"):
        build.load("decode_attention")
    assert list(build.cache_folder().iterdir()) == []


def test_without_a_home(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(build.Path, "home", no_home)
    with pytest.raises(build.BuildError, match="set XDG_CACHE_HOME"):
        build.load("decode_attention")


def test_no_folder_for_the_result(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match="could not be compiled or loaded"):
        build.load("decode_attention")


def test_the_compiler_that_cxx_names_comes_first(monkeypatch):
    found = build.find_compiler()
    assert found is not None and "++" in found
    monkeypatch.setenv("CXX", "true")
    assert build.find_compiler() == build.shutil.which("true") != found
