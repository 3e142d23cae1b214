"""Stands in for the package that vLLM reads suffix drafts from, with its interface: tests need no more of it."""

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

NAME = "arctic_inference"
ENDS = (3, 2, 1)
"""Tokens at the end of what is known that drafts follow, the most first."""


class SuffixDecodingCache:
    """Drafts are what followed the last tokens before, in the request itself or in an answer that has ended."""

    def __init__(self, max_tree_depth: int, max_cached_requests: int):
        self.active_requests: set[str] = set()
        self.cached_requests: set[str] = set()
        self._texts: dict[str, list[int]] = {}

    def start_request(self, name: str, prompt: Any) -> None:
        self.active_requests.add(name)
        self._texts[name] = [int(token) for token in prompt]

    def add_active_response(self, name: str, tokens: Any) -> None:
        self._texts[name] += map(int, tokens)

    def stop_request(self, name: str) -> None:
        self.active_requests.remove(name)
        self.cached_requests.add(name)

    def evict_cached_response(self, name: str) -> None:
        self.cached_requests.remove(name)
        del self._texts[name]

    def speculate(self, name: str, pattern: Any, max_spec_tokens: int, **limits: Any) -> Any:
        known = [int(token) for token in pattern]
        for end in ENDS:
            for text in (self._texts[name], *self._texts.values()):
                for at in range(len(text) - end - 1, -1, -1):
                    if text[at : at + end] == known[-end:]:
                        return SimpleNamespace(token_ids=text[at + end : at + end + max_spec_tokens])
        return SimpleNamespace(token_ids=[])


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM find it in this process."""
    package, module = ModuleType(NAME), ModuleType(f"{NAME}.suffix_decoding")
    package.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    module.SuffixDecodingCache = SuffixDecodingCache  # type: ignore[attr-defined]
    for found in (package, module):
        monkeypatch.setitem(sys.modules, found.__name__, found)
