"""The best candidates of a whole model where no process holds all of it: a search for the cut.

Order keys (`select.order_keys`) are distinct, so the best `wanted` of them are exactly those from some number on: the
cut. Processes count their keys by their highest 16 bits. Whoever adds up these tallies knows with which of these digits
the cut begins, and asks for the next digit of the keys that begin so. Once few keys are left, it asks for them.

    round 1    tallies by the highest digit                     the cut begins with 3f12
    round 2    the keys that begin with 3f12, or tallies        the cut is 3f12 0a4c ...
    ...        four rounds at most, however long the prompt
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DIGITS = 4
"""Of a key, each of 16 bits."""
MOST_KEYS = 4096
"""Up to so many keys, of all processes together, are sent instead of counted."""
NOTHING = torch.iinfo(torch.int64).max
"""The cut that leaves nothing: no key is that large."""


@dataclass(frozen=True)
class CutQuery:
    """What every process is asked about its keys that begin with some digits.

    Attributes:
        known: how many digits that are.
        prefix: these digits, as a signed number: an int64 key shifted right by the bits of all other digits.
        sends_keys: whether the keys are asked for; else how many of them go on with which digit.
    """

    known: int = 0
    prefix: int = 0
    sends_keys: bool = False


@dataclass(frozen=True, eq=False)
class Tally:
    """What a process says to a question.

    Attributes:
        values: int64, the keys; or the digits, distinct, that some key goes on with.
        counts: int64, how many keys go on with each of these digits; empty where the keys were asked for.
    """

    values: np.ndarray
    counts: np.ndarray


NO_KEYS = Tally(np.zeros(0, np.int64), np.zeros(0, np.int64))
"""Of a process that leaves it to another one to count its keys."""


def tally(layers: Iterable[Tensor], question: CutQuery) -> Tally:
    """What a process says of its keys, int64 of any shape, layer by layer: more than one is never looked at."""
    counts = torch.zeros(1 << 16, dtype=torch.int64)
    found = []
    for keys in layers:
        inside = keys.flatten()
        if question.known:
            inside = inside[inside >> _bits_behind(question.known) == question.prefix]
        if question.sends_keys:
            found.append(inside.cpu())
            continue
        digits = (inside >> _bits_behind(question.known + 1)) & 0xFFFF
        if not question.known:
            digits = digits ^ 0x8000  # the sign: negative keys come last
        counts = counts.to(digits.device) + torch.bincount(digits, minlength=1 << 16)
    if question.sends_keys:
        return Tally(torch.cat(found).numpy(), NO_KEYS.counts)
    counts = counts.cpu()
    digits = counts.nonzero().flatten()
    return Tally(digits.numpy(), counts[digits].numpy())


class CutSearch:
    """Finds the cut from the tallies of all processes, each key counted once.

    Args:
        wanted: how many keys stay.

    Attributes:
        question: what to ask next.
        cut: exactly the keys from this number on stay; None until it is known.
    """

    def __init__(self, wanted: int):
        self.question = CutQuery()
        self.cut = None if wanted else NOTHING
        self._missing = wanted
        self._inside: int | None = None

    def on_tallies(self, tallies: Sequence[Tally]) -> None:
        """Take what all processes said to :attr:`question`.

        Raises:
            ValueError: there are fewer keys than are wanted, or others than in the round before.
        """
        if self.question.sends_keys:
            keys = np.sort(np.concatenate([one.values for one in tallies]))
            self._check(len(keys))
            self.cut = int(keys[-self._missing])
            return
        counts = np.zeros(1 << 16, np.int64)
        for one in tallies:
            counts[one.values] += one.counts
        self._check(int(counts.sum()))
        self._go_on(counts)

    def _check(self, keys: int) -> None:
        """Raise ValueError unless so many keys are possible."""
        if self._inside is not None and keys != self._inside:
            raise ValueError(f"{keys} keys were told of, there are {self._inside}")
        if keys < self._missing:
            raise ValueError(f"{self._missing} keys are wanted, there are {keys}")

    def _go_on(self, counts: np.ndarray) -> None:
        """Find the next digit of the cut in the counts by digit, and ask on unless all that begin so stay."""
        from_here = counts[::-1].cumsum()[::-1]  # keys with this digit or a higher one
        digit = int(np.flatnonzero(from_here >= self._missing)[-1])
        inside = int(counts[digit])
        self._missing -= int(from_here[digit]) - inside
        known = self.question.known + 1
        prefix = (self.question.prefix << 16) + (digit - 0x8000 if known == 1 else digit)
        if inside == self._missing:
            self.cut = prefix << _bits_behind(known)
        self.question = CutQuery(known, prefix, sends_keys=inside <= MOST_KEYS)
        self._inside = inside


def _bits_behind(known: int) -> int:
    """Bits of a key behind its first digits."""
    return 16 * (DIGITS - known)
