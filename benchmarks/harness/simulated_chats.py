"""What a cache alone could find of chats that go on: pages, and the order in which they go. No engine, no model.

Where a run finds less than this, the engine is short; where this is little, the memory is, or the order.

    blocks     stock vLLM: whole blocks from the first token on; the least recently used go first
    chains     what each turn keeps, behind the turns before it; chains go from their ends
    tails      also what a request holds uncompressed when it ends; all of it goes before any chain
    perfect    whatever a chat has sent or received before
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import takewhile

from benchmarks.harness.chats import EVICTING, Scenario
from benchmarks.harness.load import PAGE
from benchmarks.harness.scenarios import BLOCK, STOCK
from vllm_kvevict.policies import EvictionConfig

CHAINS, TAILS, PERFECT = "chains", "chains and tails", "perfect"
LEAST = 256
"""Tokens of a part that is evicted on its own, as servers have it by default."""


def found_shares(scenario: Scenario) -> dict[str, float]:
    """By cache, the share that it finds of all tokens that chats have sent or received before."""
    caches: dict[str, Blocks | Chains] = {
        STOCK: Blocks(scenario),
        CHAINS: Chains(scenario),
        TAILS: Chains(scenario, tails=True),
    }
    found = {
        name: sum(cache.ask(chat, turn) for chat, turn in scenario.order()) for name, cache in caches.items()
    }
    return {name: tokens / scenario.known_len for name, tokens in found.items()} | {PERFECT: 1.0}


class Blocks:
    """Stock vLLM's prefix cache, asked by one request at a time."""

    def __init__(self, scenario: Scenario):
        self._scenario = scenario
        # Those that nobody uses, by what is in them, the next to go first; at the beginning there is nothing in any.
        self._free: OrderedDict[Hashable, None] = OrderedDict()
        for _ in range(scenario.blocks):
            self._free[object()] = None

    def ask(self, chat: int, turn: int) -> int:
        """A request comes and goes; how many of its tokens are found."""
        scenario = self._scenario
        stored = scenario.prompt_len(turn) + scenario.answer_len - 1
        blocks: list[Hashable] = [scenario.beginning(chat, end) for end in range(BLOCK, stored + 1, BLOCK)]
        found = list(takewhile(self._free.__contains__, blocks[: (scenario.prompt_len(turn) - 1) // BLOCK]))
        for block in found:
            del self._free[block]
        for _ in range(len(found) * BLOCK, stored, BLOCK):
            self._free.popitem(last=False)
        # The end of a chat goes before its beginning, and a block that is not full before all.
        for block in reversed(blocks):
            self._free[object() if block in self._free else block] = None
        if stored % BLOCK:
            self._free[rest := object()] = None
            self._free.move_to_end(rest, last=False)
        return len(found) * BLOCK


@dataclass(eq=False)
class Nothing:
    """What all chats begin with; see :class:`Part`."""

    tokens: int = 0
    kept: int = 0
    children: int = 0


@dataclass(eq=False)
class Part:
    """What an eviction has left of a turn.

    Attributes:
        tokens: of the prompt, with all before it.
        kept: entries of each row, with those of the parts before.
        parent: the part before.
        columns: pages that it holds in each row.
        children: how many parts follow it.
        completed_by: the one of them whose first page has become its last one; None for none.
    """

    tokens: int
    kept: int
    parent: "Part | Nothing"
    columns: float
    children: int = 0
    completed_by: "Part | None" = None


@dataclass(frozen=True)
class Tail:
    """What a request has left uncompressed behind its last part: so many tokens, in so many pages of each row."""

    tokens: int
    columns: float


class Chains:
    """The cache of compressed turns, asked by one request at a time. Memory is counted in pages of a row.

    Args:
        tails: whether requests leave behind what they hold uncompressed when they end.
        policy: whose window is read again.
        least: tokens of a part.
    """

    def __init__(self, scenario: Scenario, tails: bool = False, policy: str = EVICTING, least: int = LEAST):
        self._scenario, self._has_tails, self._least = scenario, tails, least
        self._config = EvictionConfig(policy, keep_ratio=scenario.budget)
        self._columns = scenario.blocks * BLOCK / PAGE
        self._nothing = Nothing()
        self._parts: OrderedDict[Hashable, Part] = OrderedDict()
        self._tails: OrderedDict[Hashable, Tail] = OrderedDict()

    def ask(self, chat: int, turn: int) -> int:
        """A request comes, is evicted turn by turn, and goes; how many of its tokens are found."""
        scenario, ends = self._scenario, self._ends(turn)
        part = self._find(chat, ends)
        found, missing = part.tokens, [end for end in ends if end > part.tokens]
        if tail := self._tails.pop((chat, found), None):
            found += min(tail.tokens, self._most_used(found, missing, scenario.prompt_len(turn)))
        for end in missing:
            self._make_room(_columns(part, end - part.tokens))
            part = self._store(chat, end, part)
        left = scenario.prompt_len(turn) + scenario.answer_len - part.tokens
        self._make_room(_columns(part, left))
        if self._has_tails:
            # The last token of an answer is not stored.
            stored = _whole_pages(left - 1)
            self._tails[chat, part.tokens] = Tail(stored, _columns(part, stored))
        return found

    def _ends(self, turn: int) -> list[int]:
        """Of the parts of a prompt; short ones are evicted with the next."""
        ends: list[int] = []
        for end in self._scenario.ends(turn):
            if end - (ends[-1] if ends else 0) >= self._least:
                ends.append(end)
        return ends

    def _find(self, chat: int, ends: list[int]) -> Part | Nothing:
        """The last part that is there of a prompt, which counts as used now, as those before it do."""
        keys = [self._scenario.beginning(chat, end) for end in ends]
        known = list(takewhile(self._parts.__contains__, keys))
        for key in known:
            self._parts.move_to_end(key)
        return self._parts[known[-1]] if known else self._nothing

    def _most_used(self, begins: int, missing: list[int], prompt_len: int) -> int:
        """Tokens of a tail that a request need not read: not the prompt's last, nor those by which it is evicted."""
        if not missing:
            return _whole_pages(prompt_len - 1 - begins)
        n = missing[0] - begins
        return _whole_pages(n - max(1, self._config.for_part(n, begins).window_for(n)))

    def _store(self, chat: int, end: int, parent: Part | Nothing) -> Part:
        kept = self._config.budget_for(end - parent.tokens)
        part = Part(end, parent.kept + kept, parent, _columns(parent, kept))
        if isinstance(parent, Part) and parent.completed_by is None:
            parent.completed_by = part
            part.columns -= min(1.0, kept / PAGE)
        self._make_room(part.columns)
        parent.children += 1
        self._parts[self._scenario.beginning(chat, end)] = part
        return part

    def _make_room(self, columns: float) -> None:
        """Drop what goes first until a request has room for so many columns; what it uses was used last."""
        held = columns + sum(part.columns for part in self._parts.values())
        held += sum(tail.columns for tail in self._tails.values())
        while held > self._columns and self._tails:
            held -= self._tails.popitem(last=False)[1].columns
        while held > self._columns:
            last = (key for key, part in self._parts.items() if not part.children)
            if (key := next(last, None)) is None:
                return
            part = self._parts.pop(key)
            part.parent.children -= 1
            if isinstance(part.parent, Part) and part.parent.completed_by is part:
                part.parent.completed_by = None
            held -= part.columns


def _whole_pages(tokens: int) -> int:
    return max(0, tokens) // PAGE * PAGE


def _columns(parent: Part | Nothing, entries: int) -> float:
    """Pages in each row of so many entries behind a part, of which the last page, and a copy of the part's, is its own.

    Rows compete, so that they end anywhere in a page: on average half of one is full.
    """
    return _full(parent.kept + entries) - _full(parent.kept) + 1


def _full(entries: int) -> float:
    return max(0.0, entries / PAGE - 0.5)
