"""The documents build into a site, strictly: no link is broken and no page is missing from its navigation."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """What ``make docs`` runs, in a repository's root."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, cwd=root, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    # A new page belongs into the navigation of mkdocs.yml; the message names it.
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def copy(tmp_path) -> Path:
    """The documents and what builds them, to be changed."""
    for path in ("docs", "docker", "benchmarks/results", "benchmarks/quality/needle", "tools", "examples"):
        shutil.copytree(ROOT / path, tmp_path / path)
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_pages_pictures_and_search(site):
    for document in (ROOT / "docs").glob("*.md"):
        assert (site / document.with_suffix(".html").name).is_file()
    for page in ("index.html", "CHANGELOG.html", "docker/index.html", "benchmarks/results/index.html"):
        assert (site / "repository" / page).is_file()
    found = json.loads((site / "search/search_index.json").read_text())["docs"]
    assert any("ada-snapkv" in entry["text"] for entry in found)


def test_what_pages_show_is_there(site):
    shown = 0
    for page in site.rglob("*.html"):
        for target in re.findall(r'<img [^>]*src="([^"]+)"', page.read_text()):
            assert (page.parent / target).is_file(), f"{page.name} shows {target}"
            shown += 1
    assert shown > 10


def test_nothing_is_loaded_from_elsewhere(site):
    loads = re.compile(r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="?(?:https?:)?//')
    assert loads.search('<script src="https://example.org/x.js">')
    assert not [page.name for page in site.rglob("*.html") if loads.search(page.read_text())]


def test_links_between_files_become_links_between_pages(site):
    links = re.findall(r'href="([^"]+)"', (site / "POLICIES.html").read_text())
    assert "repository/benchmarks/results/index.html" in links and "QUALITY.html" in links
    assert "<code>examples/custom_policy.py</code>" in (site / "POLICIES.html").read_text()
    links = re.findall(r'href="([^"]+)"', (site / "repository/CONTRIBUTING.html").read_text())
    assert "../POLICIES.html#adding-a-policy" in links


BROKEN = {
    "[there is no such page](NOWHERE.md)": "NOWHERE.md",
    "[nor such a file](../examples/nothing.py)": "examples/nothing.py",
    "[nor such a heading](MODELS.md#nowhere)": "#nowhere",
    "[nor in this page](#not-here)": "#not-here",
    "![nor such a picture](images/nothing.svg)": "images/nothing.svg",
}


def test_broken_links_and_a_page_missing_from_the_navigation_fail(copy):
    page = copy / "docs/GPU.md"
    page.write_text("\n\n".join([page.read_text(), *BROKEN]))
    (copy / "docs/NEW.md").write_text("# New\n")
    done = build(copy, copy / "site")
    assert done.returncode != 0
    for named in ("NEW.md", *BROKEN.values()):
        assert named in done.stdout + done.stderr
