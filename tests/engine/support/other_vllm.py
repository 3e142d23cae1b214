"""Other versions of vLLM for tests: links to the installed one, with some files changed or moved."""

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

from tests.engine.support.serving import ROOT

UNKNOWN = "0.99.0"
"""A version that nobody has tested."""


def installed() -> Path:
    """The folder of the vLLM that tests import."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def linked(origin: Path, copy: Path, changes: Mapping[str, str | None]) -> None:
    """Make a folder that has what another one has, by links.

    Args:
        changes: by the path of a file below ``origin`` its new content; None: it is left out.
    """
    copy.mkdir(parents=True)
    inner = {path.partition("/")[0] for path in changes if "/" in path}
    for path in origin.iterdir():
        if path.name in inner:
            below = {
                name.partition("/")[2]: x for name, x in changes.items() if name.startswith(f"{path.name}/")
            }
            linked(path, copy / path.name, below)
        elif path.name not in changes:
            (copy / path.name).symlink_to(path)
    for name, content in changes.items():
        if "/" not in name and content is not None:
            (copy / name).write_text(content)


def of_version(folder: Path, version: str, changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Make a vLLM that says it has this version.

    Returns:
        The environment of processes that import it.
    """
    text = (installed() / "_version.py").read_text()
    text = re.sub(r"^(__version__ = .*?)['\"].+?['\"]", rf"\1'{version}'", text, flags=re.M)
    linked(installed(), folder / "vllm", {"_version.py": text, **(changes or {})})
    return environment(folder)


def environment(*first: Path) -> dict[str, str]:
    """The environment of processes that import what is in these folders before all else, their own folder included."""
    path = [*map(str, first), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Compiled files lie beside the originals, where nothing that was changed may be put.
    return {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
