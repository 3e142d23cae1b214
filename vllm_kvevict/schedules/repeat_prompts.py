"""What stands before a chunk that the model repeats (KVzip, Kim et al. 2025, section 3.2). Owns nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

HINT = 8
"""Tokens before a chunk that tell the model where to begin, as in the authors' implementation."""

MOST_EXTRA_ROWS = 128
"""The most tokens that a chunk may have beside its own."""


@dataclass(frozen=True)
class RepeatPrompts:
    """Token ids that ask a model to repeat what it has read.

    Attributes:
        first: what stands before the first chunk.
        before: what stands before the hint of a later chunk.
        after: what stands between the hint and its chunk.
    """

    first: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def to_lists(self) -> list[list[int]]:
        """Their token ids, for keys."""
        return [list(self.first), list(self.before), list(self.after)]

    @property
    def overhead(self) -> int:
        """The most tokens that any chunk has beside its own."""
        return max(len(self.first), len(self.before) + HINT + len(self.after))

    def behind(self, prefix: Sequence[int]) -> "RepeatPrompts":
        """The same without the tokens at the beginning with which a prefix ends already.

        Where a prefix ends is not always where the chat's template was found to go on, such as with a header.
        """
        both = range(min(len(self.first), len(self.before), len(prefix)), 0, -1)
        for count in both:
            if tuple(prefix[-count:]) == self.first[:count] == self.before[:count]:
                return RepeatPrompts(self.first[count:], self.before[count:], self.after)
        return self

    def rows(self, tokens: Sequence[int], lo: int, hi: int) -> list[int]:
        """The extra tokens of a step that repeats a chunk; the chunk's own come last.

        Args:
            tokens: of the prefix, at least ``hi``.
            lo, hi: the chunk is ``tokens[lo:hi]``; 0 for the first one's ``lo``.
        """
        if lo == 0:
            return [*self.first, *tokens[:hi]]
        hint = tokens[max(lo - HINT, 0) : lo]
        return [*self.before, *hint, *self.after, *tokens[lo:hi]]
