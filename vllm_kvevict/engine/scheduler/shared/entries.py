"""What both kinds of shared KV have in common: entries by number, in the order of their use.

Each kind owns its entries, as counts alone: the pages are the workers', which know an entry by its number. An entry
that is in use does not go; what nobody uses goes when its pages are needed, the least recently used first.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from vllm_kvevict.engine.scheduler.nodes import Entry
from vllm_kvevict.engine.scheduler.outbox import Outbox

E = TypeVar("E", bound=Entry)


class Entries(Generic[E]):
    """All entries of one kind.

    Args:
        most: how many there may be at once.
        outbox: where the workers are told what to make and to drop.
    """

    def __init__(self, most: int, outbox: Outbox):
        self.most, self.outbox = most, outbox
        self._stored: OrderedDict[int, E] = OrderedDict()
        """By number, in the order in which they go."""

    def __len__(self) -> int:
        return len(self._stored)

    def __iter__(self) -> Iterator[E]:
        return iter(self._stored.values())

    @property
    def is_full(self) -> bool:
        """Whether there may be no further one."""
        return len(self) >= self.most

    def touch(self, entry: E) -> None:
        """An entry counts as used now. Modifies the order alone."""
        self._stored.move_to_end(entry.number, last=not entry.evict_first)

    def _keep(self, entry: E) -> None:
        """An entry is there from now on, and used."""
        self._stored[entry.number] = entry
        self.touch(entry)

    def _drop(self, entry: E) -> None:
        """The workers drop an entry before the next step."""
        self.outbox.drop(entry.number)
        self._remove(entry)

    def _remove(self, entry: E) -> None:
        self._stored.pop(entry.number, None)
