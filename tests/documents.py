"""The code blocks of README and docs, for the tests that run them."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "DESCRIPTION.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docker").glob("*.md")),
)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def blocks(document: Path, language: str = "") -> list[str]:
    """Texts of a document's fenced blocks in some language; "" is that of commands, as "bash" is."""
    names = ("", "bash", "sh", "console") if not language else (language,)
    return [text for name, text in _BLOCK.findall(document.read_text()) if name in names]


def lines(document: Path) -> list[str]:
    """Each command as it stands there, with the variables before it."""
    joined = "\n".join(blocks(document)).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line]


def commands(document: Path) -> list[list[str]]:
    """Words of each command, without comments, variables before it, and `&`."""
    found = []
    for block in blocks(document):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                found.append(words[:-1] if words[-1] == "&" else words)
    return found


def first_commands(document: Path) -> list[str]:
    """What a new user types: the lines of the document's first block that installs the package."""
    for block in blocks(document):
        if block.startswith("pip install"):
            return block.splitlines()
    raise ValueError(f"{document.name} does not say how to install the package")
