"""What README and docs show is there and may be typed as it stands. Their commands: `distribution/test_commands.py`;
their links: `test_site.py`."""

import itertools
import re

import pytest

from tests.documents import DOCUMENTS, ROOT, blocks

WAIT = "curl -s --retry 900 --retry-delay 1 --retry-connrefused http://localhost:8000/health"
"""Ends when the server that was started before answers."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_who_starts_a_server_waits_for_it(document):
    for block in blocks(document):
        lines = block.replace("\\\n", " ").splitlines()
        for line, following in itertools.pairwise(lines):
            assert not line.endswith("&") or following == WAIT, f"before {following}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_who_starts_an_examples_server_waits_for_it(path):
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert all(following == WAIT for line, following in itertools.pairwise(lines) if line.endswith("&"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_python_that_starts_an_engine_may_be_saved_as_a_file(document):
    for block in blocks(document, "python"):
        assert not re.search(r"\bLLM\(", block) or '\nif __name__ == "__main__":' in block


GUIDES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("ADDING-*.md"))]


def not_there(text: str) -> list[str]:
    """Files that a text names and that there are not, and names that it says are in one and that are not."""
    roots = (ROOT, ROOT / "vllm_kvevict", ROOT / "vllm_kvevict/engine")
    missing = []
    for name, path in re.findall(r"(?:`(\w+)`\s+in\s+)?`([\w/-]+(?:\.py|/))`", text):
        found = [root / path for root in roots if (root / path).exists()]
        if not found or (name and not re.search(rf"\b{name}\b", found[0].read_text())):
            missing.append(f"{name} in {path}" if name else path)
    return missing


def test_what_guides_name_is_there():
    told = "`LAYER_TYPES` in `engine/layers.py`, `cache/`, `of_old` in\n`engine/layers.py`, `engine/old.py`"
    assert not_there(told) == ["of_old in engine/layers.py", "engine/old.py"]
    missing = [f"{guide.name}: {name}" for guide in GUIDES for name in not_there(guide.read_text())]
    assert not missing, "\n".join(missing)


def test_the_schedule_of_the_guide_is_the_one_that_is_tested():
    tested = (ROOT / "tests/engine/served/test_new_schedule.py").read_text()
    shown = blocks(ROOT / "docs/ADDING-A-SCHEDULE.md", "python")
    assert shown and all(f"\n{block}" in tested for block in shown)


ARCHITECTURE = ROOT / "docs/ARCHITECTURE.md"


def test_the_small_ledger_works():
    (code,) = blocks(ARCHITECTURE, "python")
    exec(compile(code, str(ARCHITECTURE), "exec"), {})
    promises_nothing = code.replace("max(0, pages(self.prompt) - self.held)", "0")
    waits_for_nothing = code.replace("account.is_reported and self.fits(grows)", "True")
    for wrong in (promises_nothing, waits_for_nothing):
        assert wrong != code
        with pytest.raises(AssertionError):
            exec(compile(wrong, str(ARCHITECTURE), "exec"), {})


def parts_not_told(text: str) -> set[str]:
    """Files of the scheduler that a text does not name; `shared/__init__.py` and the like say nothing themselves."""
    folder = ROOT / "vllm_kvevict/engine/scheduler"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    return {name for name in files if not name.endswith("__init__.py") and f"{name}`" not in text}


def test_every_part_of_the_scheduler_is_told_of():
    text = ARCHITECTURE.read_text()
    assert parts_not_told(text.replace("gate.py", "")) == {"gate.py"}
    assert not parts_not_told(text)
