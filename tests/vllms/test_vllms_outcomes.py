"""The comparison of two runs of vLLM's tests: what it must find, and that the witness tells how each ended."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

import pytest

from tests.engine.support import bare
from tests.engine.support.serving import ROOT
from tests.vllms import __main__ as command
from tests.vllms import outcomes, sources
from tests.vllms.outcomes import Run
from vllm_kvevict.quality import checkpoint

TESTS = {"a": "passed", "b": "failed", "c": "passed"}


def with_package(**settings) -> Run:
    return Run(**{"tests": TESTS, "loaded": [7, 9], "hooked": [True, True], "ended": 1} | settings)


def without(**settings) -> Run:
    return Run(**{"tests": TESTS, "loaded": [0, 0], "hooked": [False, False], "ended": 1} | settings)


def test_runs_that_ended_alike():
    lines, alike = outcomes.report(with_package(), without(), least=2)
    assert alike
    assert lines == [
        "with the package (9 of its modules loaded): 3 tests, 2 passed, 1 failed",
        "without it (0 of its modules loaded): 3 tests, 2 passed, 1 failed",
        "all ended alike",
    ]


@pytest.mark.parametrize(
    ("ours", "line"),
    [
        ({**TESTS, "c": "error"}, "c: error with the package, passed without"),
        ({**TESTS, "d": "skipped"}, "d: skipped with the package, not run without"),
        ({"b": "failed", "c": "passed"}, "a: not run with the package, passed without"),
    ],
)
def test_one_test_that_differs_is_named(ours, line):
    lines, alike = outcomes.report(with_package(tests=ours), without(), least=2)
    assert not alike and lines[2:] == [line, "1 ended differently"]


@pytest.mark.parametrize(
    ("ours", "stock", "sentence"),
    [
        ({"loaded": [0, 0]}, {}, "the package was not loaded in the run with it"),
        ({}, {"loaded": [0, 1]}, "the package was loaded in the run without it"),
        ({}, {"hooked": [False, True]}, "the package was loaded in the run without it"),
        ({"ended": None}, {}, "the run with the package did not end"),
        ({}, {"ended": 4}, "the run without the package ended with pytest's exit code 4"),
    ],
)
def test_runs_that_say_nothing(ours, stock, sentence):
    lines, alike = outcomes.report(with_package(**ours), without(**stock), least=2)
    assert not alike and f"error: {sentence}" in lines


EXAMPLE = """
import os

def test_passes(): pass
def test_fails(): assert False
def test_differs(): assert "VLLM_PLUGINS" in os.environ
"""
PYTEST = """
import os, sys
import pytest
sys.path[:] = [name for name in sys.path if name != os.getcwd()]
os.chdir(sys.argv[1])
sys.path.insert(0, os.getcwd())
code = pytest.main(["-p", "no:unraisableexception", *sys.argv[2:]])
sys.stdout.flush()
os._exit(code)
"""
"""What ``python -m pytest`` does in a folder that is not that of the process it is forked from. At its end it looks for
no garbage in all that was imported, which takes longer than the rest."""


@pytest.fixture
def forked_runs(monkeypatch):
    """A run's Python is forked from one that has imported vLLM, and nothing of this project."""

    def run(words, cwd, env, **_):
        assert words[:3] == [sys.executable, "-m", "pytest"]
        alone = env | {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"
        }  # to import others' plugins takes longer than the tests
        return bare.run("-c", PYTEST, str(cwd), *words[3:], env=alone, cwd=ROOT)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.fixture
def example(tmp_path, monkeypatch):
    """A folder that stands in for vLLM's sources, which the command then uses."""
    folder = tmp_path / "sources"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests/__init__.py").touch()
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (folder / "tests/test_example.py").write_text(EXAMPLE)
    monkeypatch.setattr(command, "sources", lambda: folder)
    monkeypatch.setattr(command, "make_stand_ins", lambda folder: folder / "none")
    return folder


def test_two_real_runs_of_a_few_tests(example, forked_runs, capfd):
    """The package is loaded in one of them, and a test that sees that is found."""
    assert command.main(["tests/test_example.py", "--least", "1"]) == 1
    said = capfd.readouterr().out.splitlines()
    name = "tests/test_example.py::test_differs: failed with the package, passed without"
    assert said[-2:] == [name, "1 ended differently"]
    (example / "tests/test_example.py").write_text(EXAMPLE.replace("VLLM_PLUGINS", "HF_HOME"))
    assert command.main(["tests/test_example.py", "--least", "1"]) == 0
    assert capfd.readouterr().out.endswith("\nall ended alike\n")
    assert command.main(["tests/test_example.py", "--least", "3"]) == 1


def archive(path: Path, names: list[str]) -> str:
    """Write an archive of small files; its sha256."""
    with tarfile.open(path, "w:gz") as file:
        for name in names:
            member = tarfile.TarInfo(f"vllm-{sources.VERSION}/{name}")
            member.size = 4
            file.addfile(member, io.BytesIO(b"text"))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def published(tmp_path, monkeypatch):
    """The expected archive, where the package index is taken to have it."""
    path = tmp_path / sources.FILE
    names = ["tests/v1/test_a.py", "pyproject.toml", "vllm/code.py", "setup.py"]
    monkeypatch.setattr(sources, "SHA256", archive(path, names))
    monkeypatch.setattr(sources, "address_of", lambda index: path.as_uri())
    monkeypatch.setattr(sources, "_install", lambda folder: folder.mkdir())
    monkeypatch.setenv(checkpoint.CACHE, str(tmp_path / "cache"))
    return path


def test_the_tests_alone_are_unpacked_once(published):
    folder = sources.sources()
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"tests/v1/test_a.py", "pyproject.toml"} and (folder / "needed").is_dir()
    published.unlink()
    assert sources.sources() == folder


def test_an_index_page_says_where_the_archive_is(monkeypatch):
    files = [{"filename": name, "url": name} for name in ("another.tar.gz", sources.FILE)]
    pages = {"https://index/simple/vllm/": json.dumps({"files": files}).encode()}
    monkeypatch.setattr(
        urllib.request, "urlopen", lambda request, timeout: io.BytesIO(pages[request.full_url])
    )
    assert sources.address_of("https://index/simple") == f"https://index/simple/vllm/{sources.FILE}"


def test_another_archive_is_not_used(published, monkeypatch, capsys):
    monkeypatch.setattr(sources, "SHA256", "0" * 64)
    assert command.main([]) == 3
    assert "has the sha256" in capsys.readouterr().err.splitlines()[-1]
    assert not [path for path in checkpoint.cache().iterdir() if path.suffix != ".lock"]


def test_another_version_of_vllm_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(command, "VERSION", "0.31.0")
    assert command.main([]) == 3
    assert capsys.readouterr().err.startswith("the tests are those of vLLM 0.31.0, and 0.3")
