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


def block_lines(block: str) -> list[str]:
    """Each command as it stands in a block, with the variables before it."""
    return [line for line in block.replace("\\\n", " ").splitlines() if words_of(line)]


def lines(document: Path) -> list[str]:
    """Each command of a document as it stands there."""
    return [line for block in blocks(document) for line in block_lines(block)]


def words_of(line: str) -> list[str]:
    """Words of a command, without comments, variables before it, and `&`; of `NAME="$(command)"` those within."""
    line = re.sub(r'^[A-Z_]+="\$\((.*)\)"$', r"\1", line)
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words[:-1] if words and words[-1] == "&" else words


def commands(document: Path) -> list[list[str]]:
    """Words of each command of a document."""
    return [words_of(line) for line in lines(document)]
