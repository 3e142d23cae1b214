"""Real text that every machine has: Python's language reference for prose, the standard library's sources for code.

Both differ between versions of Python. Whoever asks about them takes the answer from the text itself.
"""

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

MODULES = (
    *("argparse", "base64", "calendar", "cmd", "code", "colorsys", "configparser", "copy", "csv", "difflib"),
    *("doctest", "fileinput", "fractions", "ftplib", "functools", "gettext", "gzip", "heapq", "imaplib"),
    *("inspect", "locale", "mailbox", "mimetypes", "optparse", "pdb", "pickle", "pickletools", "platform"),
    *("plistlib", "poplib", "pprint", "quopri", "random", "shlex", "shutil", "smtplib", "socket"),
    *("socketserver", "statistics", "string", "subprocess", "tarfile", "textwrap", "tokenize", "trace"),
    *("tracemalloc", "turtle", "typing", "uuid", "warnings", "webbrowser"),
)
"""Those that this version of Python has are used."""
SENTENCE_WORDS = range(6, 41)
SHORTEST_NAME, LONGEST_VALUE = 4, 24
PARAMETERS = range(2, 7)


class TextError(ValueError):
    """The texts do not suffice; the message says for what."""


@cache
def sentences() -> tuple[str, ...]:
    """Sentences of the language reference in their order, none of them twice."""
    paragraphs = (paragraph for name in sorted(topics) for paragraph in re.split(r"\n\s*\n", topics[name]))
    return tuple(dict.fromkeys(sentence for paragraph in paragraphs for sentence in _sentences(paragraph)))


def _sentences(paragraph: str) -> Iterator[str]:
    """Sentences of a paragraph that is prose or an item of a list: no heading, table or code."""
    text = " ".join(paragraph.split()).removeprefix("* ")
    if not re.match(r"[A-Z]", text) or re.search(r"^\s*([*=+|~^-]{3}|>>>|\|)|::=", paragraph, re.M):
        return
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text):
        if sentence.endswith(".") and len(sentence.split()) in SENTENCE_WORDS:
            yield sentence


@dataclass(frozen=True)
class Fact:
    """Something that a source says once.

    Attributes:
        name: of a function or a constant; in no other place of all sources.
        value: its parameters, or what it is set to, as the source has it.
        module, line: where; the line counts from 0.
    """

    name: str
    value: str
    module: str
    line: int


@cache
def sources() -> dict[str, tuple[str, ...]]:
    """Lines of the standard library's modules by name.

    Raises:
        TextError: this Python came without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = {name: folder / f"{name}.py" for name in MODULES}
    found = {
        name: tuple(path.read_text("utf-8").splitlines()) for name, path in paths.items() if path.exists()
    }
    if not found:
        raise TextError(f"the standard library's sources are not in {folder}: leave out the tasks about code")
    return found


@cache
def signatures() -> tuple[Fact, ...]:
    """Functions whose parameters stand on one line; not methods, whose first parameter replies leave out."""
    found = []
    for module, lines in sources().items():
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                begin = re.fullmatch(rf"\s*def {node.name}\((.*)\):", lines[node.lineno - 1])
                if begin and len(begin[1].split(",")) in PARAMETERS and not re.match("self|cls", begin[1]):
                    found.append(Fact(node.name, begin[1], module, node.lineno - 1))
    return _unique(found)


@cache
def constants() -> tuple[Fact, ...]:
    """Names in capitals that a module sets to a number or a text, on one line."""
    found = []
    for module, lines in sources().items():
        for node in ast.parse("\n".join(lines)).body:
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=name)], value=ast.Constant(value=str() | int() | float())
                ):
                    line = lines[node.lineno - 1]
                    value = line.partition(" = ")[2].partition("  #")[0].strip()
                    if name.isupper() and node.lineno == node.end_lineno and is_short(value):
                        found.append(Fact(name, value, module, node.lineno - 1))
    return _unique(found)


def is_short(value: str) -> bool:
    """Whether a reply can be expected to repeat it."""
    return 1 < len(value) <= LONGEST_VALUE and "\\" not in value


def _unique(facts: list[Fact]) -> tuple[Fact, ...]:
    """Those whose name occurs once in its module and is no part of another fact."""
    times = Counter(fact.name for fact in facts)
    return tuple(
        fact
        for fact in facts
        if times[fact.name] == 1
        and len(fact.name) >= SHORTEST_NAME
        and fact.name not in fact.value  # which could be guessed
        and _mentions(fact) == 1
    )


def _mentions(fact: Fact) -> int:
    """Lines of its module that define the name or set it."""
    setting = re.compile(rf"(def {fact.name}\(|\b{fact.name}\s*=)")
    return sum(bool(setting.search(line)) for line in sources()[fact.module])
