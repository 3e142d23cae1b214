"""Which versions of vLLM this package works with; needs no vLLM."""

from pathlib import Path

VERSIONS = Path(__file__).parent / "engine" / "versions"
"""A module for each version: adding one is what makes a version supported."""


def supported() -> list[str]:
    """The supported versions, ``"0.32"`` for all of 0.32, in ascending order."""
    names = [path.stem.removeprefix("v") for path in VERSIONS.glob("v[0-9]*.py")]
    return [".".join(name) for name in sorted((name.split("_") for name in names), key=_numbers)]


def _numbers(parts: list[str]) -> list[int]:
    return [int(part) for part in parts]


def series(found: str) -> str:
    """The version without what comes after its second number: ``"0.32"`` for ``"0.32.1+cpu"``."""
    return ".".join(found.split(".")[:2])


def refusal(found: str) -> str | None:
    """Why eviction does not run in this version of vLLM, in one sentence; None where it does."""
    known = supported()
    if series(found) in known:
        return None
    listed = " and ".join(filter(None, [", ".join(known[:-1]), known[-1]]))
    return f"--kv-eviction supports vLLM {listed}, found {found}: install one of these"
