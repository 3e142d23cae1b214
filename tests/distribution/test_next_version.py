"""The newest supported vLLM over the installed compiled operations: made once, of what was expected, or not at all."""

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from vllm_kvevict.compatibility import series, supported

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools/vllm-next.sh"


def run(cache: Path, registry: Path) -> subprocess.CompletedProcess[str]:
    """Run the script where only a folder of wheels can be installed from."""
    cut_off = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(registry), "PIP_CONFIG_FILE": os.devnull}
    env = {**os.environ, **cut_off, "VLLM_KVEVICT_CACHE": str(cache)}
    return subprocess.run([str(SCRIPT)], env=env, capture_output=True, text=True, timeout=120)


def version() -> str:
    """The version that the script asks for."""
    (line,) = [line for line in SCRIPT.read_text().splitlines() if line.startswith("version=")]
    return line.removeprefix("version=")


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    folder = tmp_path / "registry"
    folder.mkdir()
    return folder


def test_without_a_registry_it_says_so(tmp_path, registry):
    ended = run(tmp_path / "cache", registry)
    assert ended.returncode == 3 and not ended.stdout
    said = f"vllm-next: vllm {version()} cannot be had from the package registry, so nothing can be tested with it"
    assert ended.stderr.splitlines()[-1] == said
    assert not list((tmp_path / "cache").iterdir())


def test_another_wheel_of_that_name_is_not_used(tmp_path, registry):
    name = f"vllm-{version()}"
    with zipfile.ZipFile(registry / f"{name}-cp38-abi3-manylinux_2_28_x86_64.whl", "w") as wheel:
        wheel.writestr("vllm/__init__.py", "raise SystemExit('not expected')")
        about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version()}\n"
        wheel.writestr(f"{name}.dist-info/METADATA", about)
        wheel.writestr(
            f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: cp38-abi3-manylinux_2_28_x86_64\n"
        )
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    ended = run(tmp_path / "cache", registry)
    assert ended.returncode == 1 and not ended.stdout
    assert "has another sha256 than" in ended.stderr and "it is not used" in ended.stderr
    assert not list((tmp_path / "cache").iterdir())


def test_it_is_the_newest_supported_version():
    assert series(version()) == supported()[-1]
