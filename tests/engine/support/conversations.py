"""Requests that begin like others: questions about a document, and turns of conversations."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

from tests.engine.support.running import VOCAB, Ask

Part = tuple[int, int]
"""Which one, and how many tokens it has."""


def said(seed: int, *parts: Part) -> list[int]:
    """Tokens of parts, each the same wherever it is said."""
    tokens = []
    for part, length in parts:
        choose = random.Random(f"{seed} {part}")
        tokens += [choose.randrange(8, VOCAB) for _ in range(length)]
    return tokens


def questions(
    policy: str, seed: int, lengths: Sequence[int], document: int = 200, **fields: Any
) -> list[Ask]:
    """Requests of these lengths about a document of so many tokens."""
    budget = None if policy == "full" else 0.3
    return [
        Ask(
            length,
            policy,
            budget,
            seed=seed,
            tokens=said(seed, (0, document), (index, length - document)),
            **fields,
        )
        for index, length in enumerate(lengths, 1)
    ]


def turn(policy: str, parts: Sequence[Part], seed: int = 0, **fields: Any) -> Ask:
    """The request that says parts of a conversation; all but the last are evicted."""
    *ends, length = itertools.accumulate(length for _, length in parts)
    tokens = said(seed, *parts)
    return Ask(length, policy, 0.3, turns=tuple(ends), max_tokens=8, seed=seed, tokens=tokens, **fields)


SPOKEN = ((1, 90), (2, 65), (3, 40), (4, 77), (5, 50), (6, 20))
"""A conversation; the second part ends neither with a page nor with a block."""
BRANCH = (*SPOKEN[:3], (14, 60), (15, 33))
EDITED = (SPOKEN[0], (12, 70), (13, 45))


def conversation(policy: str, seed: int = 0, **fields: Any) -> list[Ask]:
    """Turn by turn: the same again, with one part more each time; then a branch from its middle, and an edit."""
    turns = [turn(policy, SPOKEN[: count + 1], seed, **fields) for count in range(1, len(SPOKEN))]
    others = [turn(policy, BRANCH[: count + 1], seed, **fields) for count in (3, 4)]
    return [*turns, *others, turn(policy, EDITED, seed, **fields)]


def found_by(asks: Sequence[Ask]) -> int:
    """Tokens that requests of one policy find which earlier ones have left, one after the other."""
    seen: set[tuple[int, ...]] = set()
    total = 0
    for ask in asks:
        begins = [tuple(ask.tokens[:end]) for end in ask.turns]
        total += max((len(tokens) for tokens in begins if tokens in seen), default=0)
        seen.update(begins)
    return total
