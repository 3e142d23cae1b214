"""vLLM's own tests, from its source distribution: fetched once, and kept beside the other fetched files."""

import json
import re
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

from vllm_kvevict.quality import checkpoint

VERSION = "0.32.0"
FILE = f"vllm-{VERSION}.tar.gz"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
NEEDED = "tblib==3.2.2"
"""What the tests import and vLLM does not bring."""
TAKEN = ("tests/", "pyproject.toml")
"""The parts that are unpacked; the second has the settings of pytest. vLLM's code is the installed one."""
INDEX = "https://pypi.org/simple"
JSON = "application/vnd.pypi.simple.v1+json"
SECONDS = 60


class SourceError(RuntimeError):
    """The tests cannot be had; one sentence says why."""


def sources() -> Path:
    """The folder that has vLLM's `tests`, and in `needed` what they import besides.

    Raises:
        SourceError: they are not there and cannot be fetched, or are not the expected ones.
    """
    target = checkpoint.cache() / f"vllm-{VERSION}-tests-{SHA256[:12]}"
    if target.is_dir():
        return target
    with checkpoint.alone(target) as scratch:
        if target.is_dir():  # somebody else was first
            return target
        archive = _fetch(scratch)
        _unpack(archive, scratch / "new")
        _install(scratch / "new/needed")
        (scratch / "new").rename(target)
    return target


def _fetch(where: Path) -> Path:
    """Fetch the archive as it is: to download a source distribution, pip would begin to build it."""
    archive = where / FILE
    print(f"{FILE} from the package index (45 MB, once)", file=sys.stderr)
    try:
        address = address_of(index())
        with urllib.request.urlopen(address, timeout=SECONDS) as answer, archive.open("wb") as file:
            while part := answer.read(1 << 20):
                file.write(part)
    except (OSError, ValueError) as error:
        raise SourceError(f"{FILE} cannot be had from the package index: {error}") from error
    try:
        checkpoint.check(archive, SHA256)
    except checkpoint.CheckpointError as error:
        raise SourceError(str(error)) from error
    return archive


def index() -> str:
    """The package index that pip is configured with."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(words, capture_output=True, text=True).stdout
    # Sorted: what the environment says, which counts most, comes first.
    found = re.search(r"^\S+\.index-url='(.+)'$", said, re.M)
    return found[1] if found else INDEX


def address_of(index: str) -> str:
    """Where an index has the archive.

    Raises:
        OSError: the index does not answer.
        ValueError: it does not list the archive.
    """
    page = f"{index.rstrip('/')}/vllm/"
    request = urllib.request.Request(page, headers={"Accept": JSON})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        page_content = json.load(answer)
    for file in page_content.get("files", ()):
        if file["filename"] == FILE:
            return urljoin(page, file["url"])
    raise ValueError(f"{page} does not list it")


def _unpack(archive: Path, folder: Path) -> None:
    def wanted(file: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        for member in file:
            member.name = member.name.partition("/")[2]
            if member.name.startswith(TAKEN):
                yield member

    with tarfile.open(archive) as file:
        file.extractall(folder, wanted(file), filter="data")


def _install(folder: Path) -> None:
    words = [
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--target",
        str(folder),
        NEEDED,
    ]
    if subprocess.run([sys.executable, "-m", "pip", *words]).returncode:
        raise SourceError(f"{NEEDED}, which vLLM's tests import, cannot be had from the package index")
