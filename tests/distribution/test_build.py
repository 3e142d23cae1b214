"""Wheel and source distribution: complete, free of what is not the package, and described as they should be."""

import email
import email.message
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from vllm_kvevict import __version__

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> email.message.Message:
    (text,) = (data for name, data in contents(wheel).items() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(text)


def sources() -> set[str]:
    """All files of the package here, by their paths in a wheel."""
    places = {"vllm_kvevict": ROOT / "vllm_kvevict", "vllm_kvevict/kernels": ROOT / "kernels"}
    return {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in places.items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_the_wheel_holds_the_package_and_nothing_else(built):
    names = {name for name in contents(built.wheel) if ".dist-info/" not in name}
    assert names == sources()
    # These are no Python: they are there by `package-data` alone.
    assert {Path(name).name for name in names} >= {
        "py.typed",
        "words.txt",
        "decode_attention.cpp",
        "vectors.h",
    }
    assert built.wheel.stat().st_size < 1 << 20


def test_the_source_distribution_builds_the_same_wheel(built):
    assert contents(built.wheel) == contents(built.direct)


def test_the_source_distribution_has_nothing_else(built):
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in names if name.split("/")[0] in ("tests", "benchmarks", "docs", "docker")]


def test_metadata(built):
    found = metadata(built.wheel)
    assert (found["Name"], found["Version"]) == ("vllm-kvevict", __version__)
    assert found["License-Expression"] == "Apache-2.0" and found["Requires-Python"] == ">=3.11"
    classifiers = found.get_all("Classifier")
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)} <= set(classifiers)
    assert not [text for text in classifiers if text.startswith("License ::")]  # the expression says it
    assert found.get_all("Project-URL") is None
    assert set(found.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])


def test_vllm_is_no_requirement(built):
    required = metadata(built.wheel).get_all("Requires-Dist")
    plain = [re.split(r"[^\w-]", text)[0] for text in required if "extra ==" not in text]
    assert sorted(plain) == ["numpy", "torch"]
    assert [text for text in required if re.match("vllm[<=>]", text)]  # the extra


def headings(text: str, level: int) -> list[str]:
    return re.findall(rf"^{'#' * level} (.*)$", text, re.M)


def test_the_changelog_begins_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    first = headings(text, 2)[0]
    assert re.fullmatch(rf"{re.escape(__version__)} \((not released yet|\d{{4}}-\d\d-\d\d)\)", first)
    assert headings(text, 3)[:3] == ["Added", "Changed", "Refused"]


def test_the_description_stands_by_itself(built):
    found = metadata(built.wheel)
    text = (ROOT / PROJECT["readme"]).read_text()
    assert (
        found["Description-Content-Type"] == "text/markdown" and found.get_payload().strip() == text.strip()
    )
    assert not re.search(r"(\]\(|(href|src)=[\"'])(?!https?://|mailto:|#)", text)
    assert len(text.split()) < 400


@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_twine_accepts_it(kind, built):
    command = [sys.executable, "-m", "twine", "check", "--strict", str(getattr(built, kind))]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
