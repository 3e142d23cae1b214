"""Policies as command lines list them: POLICY[:NAME=VALUE,...][@NOTE]."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GRAMMAR = "POLICY[:NAME=VALUE,...][@NOTE]"
_ENTRY = re.compile(r"(?P<policy>[^:@\s]+)(:(?P<parameters>[^@\s]*))?(@(?P<note>.+))?")
_PARAMETER = re.compile(r"(\w+)=([^\s,=]+)")


@dataclass(frozen=True)
class Entry:
    """A policy with parameters.

    Attributes:
        policy: its name.
        texts: names and values of parameters, as they were written.
        note: what tells it from others with the same policy and parameters, such as another server.
    """

    policy: str
    texts: tuple[tuple[str, str], ...] = ()
    note: str = ""

    @property
    def parameters(self) -> dict[str, Any]:
        """Values by name: numbers as such, and words as text."""
        return {name: _value(text) for name, text in self.texts}

    @property
    def field(self) -> str:
        """The parameters as one text."""
        return ",".join(f"{name}={text}" for name, text in self.texts)

    def __str__(self) -> str:
        return self.policy + (f":{self.field}" if self.texts else "") + (f"@{self.note}" if self.note else "")


def parse(text: str) -> Entry:
    """Read one entry.

    Raises:
        ValueError: one sentence that quotes it.
    """
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {GRAMMAR}")
    found = []
    for part in [] if match["parameters"] is None else match["parameters"].split(","):
        parameter = _PARAMETER.fullmatch(part)
        if parameter is None:
            raise ValueError(f"{text!r} is not {GRAMMAR}: {part!r} is not NAME=VALUE")
        found.append((parameter[1], parameter[2]))
    names = [name for name, _ in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{text!r} names {twice[0]} twice")
    return Entry(match["policy"], tuple(found), match["note"] or "")


def checked(entries: Sequence[str], known: Sequence[str]) -> list[Entry]:
    """Read entries whose policies must be known, each once.

    Raises:
        ValueError: one sentence that quotes the entry, or lists the known ones.
    """
    found = [parse(text) for text in dict.fromkeys(entries)]
    for entry in found:
        if entry.policy not in known:
            raise ValueError(f"unknown policy {entry.policy!r} (choose from {', '.join(known)})")
    return found


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text
