"""Runs as lines of text, and as digests of these."""

import hashlib
from collections.abc import Mapping, Sequence

Digests = dict[str, tuple[int, str]]
"""By run, how many lines it has, and their digest."""


def digests(lines: Mapping[str, Sequence[str]]) -> Digests:
    """Of the lines of each run."""
    return {name: (len(of_run), _digest(of_run)) for name, of_run in lines.items()}


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def differences(before: Mapping[str, Sequence[object]], after: Mapping[str, Sequence[object]]) -> list[str]:
    """A sentence for each run that is not as before."""
    found = []
    for name in {**before, **after}:
        if name not in after:
            found.append(f"{name} was not run")
        elif name not in before:
            found.append(f"{name} is not in the record")
        elif list(before[name]) != list(after[name]):
            found.append(f"{name} differs: {before[name][0]} lines before, {after[name][0]} now")
    return found
