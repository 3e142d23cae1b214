"""Hooks of mkdocs.yml: pages from outside docs/, and links that hold on the site.

The documents link to each other as files of the repository. On the site a file of docs/ keeps its path, and another
document of the repository is found at its path below repository/. There is no public address of the sources, so a link
to one of them becomes its name.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = "repository"
PICTURES = ("benchmarks/results/*.png", "benchmarks/results/quality/needle*/report/*.png")
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docker/README.md",
    "benchmarks/results/README.md",
    "benchmarks/results/quality/needle*/report.md",
    "benchmarks/quality/needle/README.md",
)
# Code is matched first, so that what looks like a link there stays as it is.
_CODE_OR_LINK = re.compile(r"^```.*?^```|`[^`\n]*`(?!\])|(!?)\[([^\[\]]*)\]\(([^)\s]+)\)", re.M | re.S)
_ADDRESS = re.compile(r"[a-z]+:|#")


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).resolve().parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents outside docs/ and the pictures that they show."""
    root = _root(config)
    for pattern in (*PAGES, *PICTURES):
        for path in sorted(root.glob(pattern)):
            uri = f"{OUTSIDE}/{path.relative_to(root).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def _in_repository(uri: str) -> str:
    """Where a page of the site lies in the repository."""
    return uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else f"docs/{uri}"


def _on_site(path: str) -> str:
    """Where a file of the repository would lie on the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages, or into text."""
    here = PurePosixPath(_in_repository(page.file.src_uri)).parent

    def rewritten(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        if target is None or _ADDRESS.match(target):
            return match[0]
        path, mark, anchor = target.partition("#")
        path = os.path.normpath(here / path)
        uri = _on_site(path)
        if files.get_file_from_path(uri):
            link = os.path.relpath(uri, PurePosixPath(page.file.src_uri).parent)
            return f"{picture}[{text}]({link}{mark}{anchor})"
        if picture or not (_root(config) / path).exists():
            return match[0]  # broken, which the strict build reports
        name = PurePosixPath(path)
        named = text.strip("`") in (path, target, name.name, name.stem)
        return f"`{text.strip('`')}`" if named else f"{text} (`{path}`)"

    # Nested lists are indented by two spaces in the repository, by four on the site.
    return re.sub(r"^  - ", "    - ", _CODE_OR_LINK.sub(rewritten, markdown), flags=re.M)
