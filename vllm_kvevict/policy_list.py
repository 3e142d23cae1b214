"""Policies as command lines list them, POLICY[:NAME=VALUE,...][@NOTE], and their parameters as requests give them."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

GRAMMAR = "POLICY[:NAME=VALUE,...][@NOTE]"
_ENTRY = re.compile(r"(?P<policy>[^:@\s]+)(:(?P<parameters>[^@\s]*))?(@(?P<note>.+))?")
_PARAMETER = re.compile(r"(\w+)=([^\s,=]+)")


@dataclass(frozen=True)
class PolicySpec:
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
        return values(self.texts)

    @property
    def field(self) -> str:
        """The parameters as one text."""
        return ",".join(f"{name}={text}" for name, text in self.texts)

    def __str__(self) -> str:
        return self.policy + (f":{self.field}" if self.texts else "") + (f"@{self.note}" if self.note else "")


def parse(text: str) -> PolicySpec:
    """Read one entry.

    Raises:
        ValueError: one sentence that quotes it.
    """
    match = _ENTRY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {GRAMMAR}")
    given = match["parameters"]
    try:
        texts = () if given is None else parse_parameters(given)
    except ValueError as error:
        raise ValueError(f"{text!r} is not {GRAMMAR}: {error}") from None
    return PolicySpec(match["policy"], texts, match["note"] or "")


def parse_parameters(text: str) -> tuple[tuple[str, str], ...]:
    """Read NAME=VALUE[,NAME=VALUE]: names and values, as they were written.

    Raises:
        ValueError: one sentence that quotes what is wrong.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        parameter = _PARAMETER.fullmatch(part)
        if parameter is None:
            raise ValueError(f"{part!r} is not NAME=VALUE")
        name, value = parameter.groups()
        if name in found:
            raise ValueError(f"it names {name} twice")
        found[name] = value
    return tuple(found.items())


def values(texts: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """What written parameters mean, by name: numbers as such, and words as text."""
    return {name: _value(text) for name, text in texts}


def checked(entries: Sequence[str], known: Sequence[str]) -> list[PolicySpec]:
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
    except (ValueError, RecursionError):  # the latter from brackets in brackets in brackets
        return text
    return value if isinstance(value, bool | int | float) else text
