"""Where the supported versions of vLLM differ in names alone: a module for each version, and which one runs here.

Behaviour that differs is dealt with where it matters, in a way that holds for all versions, without asking which one
it is. All else is imported from places that all versions have.
"""

import importlib
from typing import Any

from vllm_kvevict.compatibility import series
from vllm_kvevict.engine.versions.moves import Moves as Moves

_chosen: Moves | None = None


def of(version: str) -> Moves:
    """The places of a supported version."""
    module = importlib.import_module(f"{__name__}.v{series(version).replace('.', '_')}")
    places: Moves = module.MOVES
    return places


def choose(version: str) -> None:
    """Take the places of the version that runs in this process, before anything asks for one."""
    global _chosen
    _chosen = of(version)


def moves() -> Moves:
    """The places of the version that runs in this process."""
    assert _chosen is not None, "no supported version of vLLM was found"
    return _chosen


def load(place: str) -> Any:
    """What is at a place, imported now: some import the whole front-end."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
