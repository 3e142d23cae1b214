"""The token rows that stand before a chunk when a prompt is repeated: they ask the model to repeat it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIELD = "kv_repeat_rows"
"""Where a request carries them, in its ``extra_args``: three lists of token ids."""
HINT = 8
"""Tokens before a chunk that tell the model where to begin."""
MOST_EXTRA_ROWS = 128
"""Rows before a chunk at most, the hint's among them."""


@dataclass(frozen=True)
class RepeatPrompts:
    """Token ids of the two ways to ask for a chunk.

    Attributes:
        first: before the first chunk.
        before, after: before later chunks, around the last tokens before the chunk.
    """

    first: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def overhead(self) -> int:
        """Rows before a chunk, at most."""
        return max(len(self.first), len(self.before) + HINT + len(self.after))

    def rows(self, tokens: Sequence[int], start: int, stop: int) -> list[int]:
        """Token ids of the rows that repeat ``tokens[start:stop]``."""
        chunk = tokens[start:stop]
        if not start:
            return [*self.first, *chunk]
        return [*self.before, *tokens[max(0, start - HINT) : start], *self.after, *chunk]


def repeat_prompts_of(extra_args: Mapping[str, Any] | None) -> RepeatPrompts:
    """What a request carries."""
    lists = (extra_args or {}).get(FIELD, ((), (), ()))
    return RepeatPrompts(*map(tuple, lists))
