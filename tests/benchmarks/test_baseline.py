"""Another version of this package in an environment of its own; nothing is served."""

import argparse
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.harness.baseline import commit_of, installed


def git(folder: Path, *arguments: str) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *named, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def environment(tmp_path):
    """An environment whose Python is a script."""

    def make(python: str) -> str:
        folder = tmp_path / "other" / "bin"
        folder.mkdir(parents=True)
        for name, text in (("python", python), ("vllm", "")):
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        return str(folder.parent)

    return make


def test_the_package_beside_the_command_is_not_taken_for_the_installed_one(tmp_path, monkeypatch):
    (tmp_path / "vllm_kvevict").mkdir()
    (tmp_path / "vllm_kvevict" / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "another package")
    elsewhere = commit_of(tmp_path / "vllm_kvevict" / "__init__.py")
    monkeypatch.chdir(tmp_path)
    found = installed(sys.prefix)
    assert found.versions["vllm-kvevict"] == metadata.version("vllm-kvevict")
    assert elsewhere and found.commit != elsewhere
    # The control: Python that is not isolated would take it.
    code = "import importlib.util; print(importlib.util.find_spec('vllm_kvevict').origin)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()) == tmp_path / "vllm_kvevict" / "__init__.py"


def test_an_environment_without_the_package_is_refused_with_a_reason(environment):
    other = environment('echo "PackageNotFoundError: vllm-kvevict" >&2; exit 1')
    with pytest.raises(argparse.ArgumentTypeError, match=r"in .*other: PackageNotFoundError: vllm-kvevict"):
        installed(other)


def test_the_commit_is_that_of_the_checkout(tmp_path):
    file = tmp_path / "package.py"
    file.write_text("")
    git(tmp_path, "init", "-q")
    assert commit_of(file) is None  # such as one in the .venv of a checkout
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    assert git(tmp_path, "rev-parse", "HEAD").startswith(commit := commit_of(file))
    file.write_text("changed")
    assert commit_of(file) == f"{commit}-dirty"
