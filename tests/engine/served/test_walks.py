"""The walks of ARCHITECTURE name only files that their requests pass."""

import re

import pytest

from tests.documents import ROOT
from tests.engine.support.walks import walks

TEXT = (ROOT / "docs/ARCHITECTURE.md").read_text()


def told(text: str) -> dict[str, list[str]]:
    """The files that each walk names, by the policy in its heading."""
    section = text.partition("\n## The walk of a request\n")[2].partition("\n## ")[0]
    _, *parts = section.split("\n### ")
    return {re.findall("`(.+?)`", part)[0]: re.findall(r"`([\w/]+\.py)`", part) for part in parts}


def full_name(name: str) -> str:
    """A file below the package, of which a walk may leave out `engine`, and `shared` its folder."""
    name = f"scheduler/{name}" if name.startswith("shared/") else name
    return f"engine/{name}" if name.startswith(("frontend/", "scheduler/", "worker/")) else name


@pytest.mark.engine
def test_walks_pass_the_files_that_they_name(models) -> None:
    passed, named = walks(models("llama")), told(TEXT)
    assert passed.keys() == named.keys()
    for policy, names in named.items():
        files = {full_name(name) for name in names}
        assert files and files <= passed[policy].keys(), sorted(files - passed[policy].keys())
    assert "schedules/repeat.py" in passed["kvzip"] and "schedules/repeat.py" not in passed["take"]
