"""Segments, of which uncompressed prefixes are made: which there are, who reads and who uses them, which go first.

Owns them. A segment is a part of a prompt, whole pages of all rows; it follows its parent, from the first token on.

    prompt of A   |  1  |  2  | 3 |            of B   |  1  | part of 2 | 4 |

A request that begins with a segment uses all those before it as well. None goes before those that follow it.
"""

import itertools
from collections.abc import Hashable, Sequence

from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.keys import UnitKeys
from vllm_kvevict.engine.scheduler.nodes import Segment, plus
from vllm_kvevict.engine.scheduler.outbox import Outbox
from vllm_kvevict.engine.scheduler.shared.graph import Graph
from vllm_kvevict.schedules.bounds import last_that


class SegmentCache(Graph[Segment]):
    """All segments of a server.

    Args:
        unit: columns that a prefix is a multiple of.
        longest: the most columns of a segment.
        most, outbox, books: as of :class:`Graph`.
    """

    def __init__(self, unit: int, longest: int, most: int, outbox: Outbox, books: Books):
        super().__init__(most, outbox, books, tuple([0] * len(books.ranks) for _ in range(3)))
        self.unit, self._longest = unit, longest
        self._clock = itertools.count(1)
        self._fresh: list[Segment] = []
        """Those that the step which is being scheduled will leave."""
        self._readers: dict[Hashable, dict[str, None]] = {}
        self._read_by: dict[str, list[Hashable]] = {}

    def new_step_starts(self) -> None:
        """What earlier steps have left can be used from now on."""
        for segment in self._fresh:
            segment.is_ready = True
        self._fresh.clear()

    # What a request can begin with.

    def find(self, keys: UnitKeys, most: int) -> tuple[Segment, int] | None:
        """The longest prefix of at most ``most`` units that a request can begin with: its last segment, and its
        columns. Changes nothing.
        """
        units = last_that(lambda count: self.lookup(keys(count)) is not None, 0, most)
        segment = self.lookup(keys(units)) if units else None
        return None if segment is None else (segment, units * self.unit)

    def is_known(self, key: Hashable) -> bool:
        """Whether there is a prefix that is found by a key, or somebody reads it."""
        return self.knows(key) or key in self._readers

    # Who is reading what will be there.

    def begin(self, request_id: str, keys: UnitKeys, units: int) -> None:
        """A request was admitted that reads so many units."""
        self._read_by[request_id] = [keys(count) for count in range(1, units + 1)]
        for key in self._read_by[request_id]:
            self._readers.setdefault(key, {})[request_id] = None

    def end(self, request_id: str) -> None:
        """It has read them, or will not."""
        for key in self._read_by.pop(request_id, ()):
            readers = self._readers[key]
            del readers[request_id]
            if not readers:
                del self._readers[key]

    def readers(self, keys: UnitKeys, most: int) -> tuple[list[str], int]:
        """Who reads the longest prefix of at most ``most`` units that anybody reads, and its units."""
        units = last_that(lambda count: keys(count) in self._readers, 0, most)
        return (list(self._readers[keys(units)]), units) if units else ([], 0)

    # From freezing to dropping.

    def store(
        self, request_id: str, parent: Segment | None, keys: UnitKeys, start: int, stop: int
    ) -> Segment | None:
        """A request's columns from ``start`` to ``stop``, multiples of the unit, become segments with the next step.

        Args:
            parent: the segment that ends at ``start``, or reaches beyond it; None for the first tokens.

        Returns:
            The last of them, which nobody uses yet; the parent if there is no room for any.
        """
        if parent is not None and parent.is_invalid:
            return parent
        while start < stop and (not self.is_full or self.drop_one(parent)):
            end = min(stop, start - start % self._longest + self._longest)
            found_by = [keys(count) for count in range(start // self.unit + 1, end // self.unit + 1)]
            held = [rank.rows * (end - start) for rank in self._books.ranks]
            segment = Segment(self.outbox.new_number(), found_by, held, start, end, parent=parent)
            self._index(segment)
            self.add(segment)
            self._fresh.append(segment)
            self.outbox.freeze(request_id, segment.number, segment.columns)
            parent, start = segment, end
        return parent

    def touch(self, node: Segment) -> None:
        super().touch(node)
        node.use(self.now())

    def now(self) -> int:
        """The time: how often it was asked for."""
        return next(self._clock)

    def _remove(self, node: Segment) -> None:
        super()._remove(node)
        if node.parent is not None:
            node.parent.use(node.used)  # by whoever used what followed it

    def cancel(self, numbers: Sequence[int]) -> Segment | None:
        """The next step makes no such segments after all, each the child of the one before; what they followed."""
        made = [self._stored[number] for number in numbers]
        for segment in reversed(made):
            self._remove(segment)
        return made[0].parent

    def retain(self, segment: Segment, lasting: bool) -> None:
        """A request uses a segment and those before it, to its end or until it is evicted."""
        self._use(segment, 1, lasting)

    def release(self, segment: Segment, lasting: bool) -> None:
        """A request does not use them any more. Drops those that are invalid, once nobody does."""
        self._use(segment, -1, lasting)
        for part in self.evictable(among=segment.chain()) if self._invalid else ():
            if part.is_invalid:
                self.drop(part)

    def _use(self, segment: Segment, more: int, lasting: bool) -> None:
        for used in segment.chain():
            used.lasting_refs += more * lasting
        self._count_refs(segment, more)

    def _counts(self, node: Segment) -> tuple[list[int], ...]:
        nothing = self._nothing[0]
        return node.held, node.held if node.refs else nothing, node.held if node.lasting_refs else nothing

    def droppable_pages(self, keep: Segment | None = None) -> list[int]:
        """Pages of each rank of all that nobody uses, without those that a further request would begin with."""
        return [held - used for held, used in zip(self.held, self.used(keep), strict=True)]

    def used(self, more: Segment | None = None, to_the_end: bool = False) -> list[int]:
        """Pages of each rank of all that requests use, if one more begins with a segment.

        Args:
            to_the_end: those alone that they use to their end, as this one does.
        """
        which = 2 if to_the_end else 1
        if more is None:
            return self.sums[which]
        return plus(
            self.sums[which], *(part.held for part in more.chain() if part.counted[which] != part.held)
        )

    def invalidate(self) -> bool:
        """As of :meth:`Graph.invalidate`, nor does any request wait for what is being read."""
        for name in list(self._read_by):
            self.end(name)
        return super().invalidate()
