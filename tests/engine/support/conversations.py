"""Requests of conversations: what each says begins with what an earlier one has said."""

import random
from dataclasses import dataclass
from typing import Any

from tests.engine.support.running import VOCAB, Ask


@dataclass
class Turn(Ask):
    """A request whose prompt is made of parts, each of them random tokens of a seed; all but the last are evicted."""

    parts: tuple[tuple[int, int], ...] = ()

    @property
    def prompt(self) -> list[int]:
        tokens = []
        for seed, length in self.parts:
            choose = random.Random(f"{self.seed} {seed}")
            tokens += [choose.randrange(8, VOCAB) for _ in range(length)]
        return tokens


def turn(policy: str, parts: tuple[tuple[int, int], ...], seed: int = 0, **fields: Any) -> Turn:
    """The request that says parts of a conversation.

    Args:
        parts: seed and length of each.
    """
    ends, tokens = [], 0
    for _, length in parts[:-1]:
        tokens += length
        ends.append(tokens)
    return Turn(
        tokens + parts[-1][1], policy, 0.3, turns=tuple(ends), max_tokens=8, seed=seed, parts=parts, **fields
    )


SPOKEN = ((1, 90), (2, 65), (3, 40), (4, 77), (5, 50), (6, 20))
"""A conversation; the second part ends neither with a page nor with a block."""
BRANCH = (*SPOKEN[:3], (14, 60), (15, 33))
EDITED = (SPOKEN[0], (12, 70), (13, 45))


def conversation(policy: str, seed: int = 0, **fields: Any) -> list[Turn]:
    """Turn by turn: the same again, with one part more each time; then a branch from its middle, and an edit."""
    turns = [
        turn(policy, (*SPOKEN[:count], SPOKEN[count]), seed, **fields) for count in range(1, len(SPOKEN))
    ]
    others = [turn(policy, BRANCH[: count + 1], seed, **fields) for count in (3, 4)]
    return [*turns, *others, turn(policy, EDITED, seed, **fields)]


def found_by(asks: list[Turn]) -> int:
    """Tokens that each request finds which earlier ones have left, of requests one after the other."""
    seen: set[tuple[Any, ...]] = set()
    total = 0
    for ask in asks:
        chains = [(ask.policy, ask.seed, ask.parts[:count]) for count in range(1, len(ask.parts))]
        known = [sum(length for _, length in parts) for *_, parts in (c for c in chains if c in seen)]
        total += max(known, default=0)
        seen.update(chains)
    return total
