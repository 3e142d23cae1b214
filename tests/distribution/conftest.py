"""The package as `python -m build` makes it, of a copy of the sources: nothing that lies around here gets into it."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "DESCRIPTION.md", "README.md", "LICENSE", "MANIFEST.in")
FOLDERS = ("vllm_kvevict", "kernels", "tests", "benchmarks")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "results", "needle", "out")


@dataclass(frozen=True)
class Built:
    """Paths of what was built; `direct` is the wheel that was not made from the source distribution."""

    sdist: Path
    wheel: Path
    direct: Path


def build(source: Path, out: Path, *words: str) -> None:
    """Run `python -m build`; with what is installed here, so that nothing is downloaded."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *words, str(source)]
    # A fixed date, else archives of the same content differ.
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    env.pop("PYTHONPATH", None)
    ended = subprocess.run(command, cwd=out.parent, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Source distribution and wheels."""
    folder = tmp_path_factory.mktemp("distribution")
    source = folder / "source"
    source.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=LEFT_OUT)
    build(source, folder / "dist")
    build(source, folder / "direct", "--wheel")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    (direct,) = (folder / "direct").glob("*.whl")
    return Built(sdist, wheel, direct)
