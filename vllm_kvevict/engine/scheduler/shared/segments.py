"""Segments, of which uncompressed prefixes are made: which there are, who reads and who uses them, which go first.

Owns them. A segment is a part of a prompt, whole pages of all rows; it follows its parent, from the first token on.

    prompt of A   |  1  |  2  | 3 |            of B   |  1  | part of 2 | 4 |

A request that begins with a segment uses all those before it as well. None goes before those that follow it.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence

from vllm_kvevict.engine.scheduler.keys import UnitKeys
from vllm_kvevict.engine.scheduler.nodes import Segment
from vllm_kvevict.engine.scheduler.outbox import Outbox
from vllm_kvevict.engine.scheduler.shared.entries import Entries
from vllm_kvevict.schedules.bounds import last_that


class SegmentCache(Entries[Segment]):
    """All segments of a server.

    Args:
        unit: columns that a prefix is a multiple of.
        longest: the most columns of a segment.
        most, outbox: as of :class:`Entries`.
        tell: told of how many columns more there are, or fewer.

    Attributes:
        columns: of all segments.
        pinned: columns of those that requests use.
        lasting: columns of those that requests use to their end.
    """

    def __init__(self, unit: int, longest: int, most: int, outbox: Outbox, tell: Callable[[int], None]):
        super().__init__(most, outbox)
        self.unit, self.longest, self._tell = unit, longest, tell
        self.columns = self.pinned = self.lasting = 0
        self._by_key: dict[Hashable, list[Segment]] = {}
        self._fresh: set[int] = set()
        """Numbers of those that the step which is being scheduled will leave."""
        self._readers: dict[Hashable, dict[str, None]] = {}
        self._read_by: dict[str, list[Hashable]] = {}

    def new_step_starts(self) -> None:
        """What earlier steps have left can be used from now on."""
        self._fresh.clear()

    # What a request can begin with.

    def find(self, keys: UnitKeys, most: int) -> tuple[Segment, int] | None:
        """The longest prefix of at most ``most`` units that a request can begin with: its last segment, and its
        columns. Changes nothing.

        What is known of a prefix is known of all shorter ones, since what comes before a segment cannot go before it.
        """
        units = last_that(lambda count: self._ready(keys(count)) is not None, 0, most)
        segment = self._ready(keys(units)) if units else None
        return None if segment is None else (segment, units * self.unit)

    def _ready(self, key: Hashable) -> Segment | None:
        segments = self._by_key.get(key, ())
        return next((segment for segment in segments if segment.number not in self._fresh), None)

    def soon(self, keys: UnitKeys, most: int) -> int:
        """Units of the longest prefix, at most ``most``, that will be there after the step that is being scheduled."""
        return last_that(lambda count: keys(count) in self._by_key, 0, most)

    def is_known(self, key: Hashable) -> bool:
        """Whether there is a prefix that is found by a key, or somebody reads it."""
        return key in self._by_key or key in self._readers

    def known(self, keys: UnitKeys, units: int) -> bool:
        """Whether there is a prefix of so many units, if only after the step that is being scheduled."""
        return keys(units) in self._by_key

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
        while start < stop and (not self.is_full or self.drop_columns(1, parent)):
            end = min(stop, start - start % self.longest + self.longest)
            found_by = [keys(count) for count in range(start // self.unit + 1, end // self.unit + 1)]
            segment = Segment(self.outbox.new_number(), parent, start, end, found_by)
            self._add(segment)
            self.outbox.freeze(request_id, segment.number, segment.columns)
            parent, start = segment, end
        return parent

    def _add(self, segment: Segment) -> None:
        self._keep(segment)
        self._fresh.add(segment.number)
        for key in segment.keys:
            self._by_key.setdefault(key, []).append(segment)
        if segment.parent is not None:
            segment.parent.children += 1
        self._count(segment, 1)
        self._tell(segment.columns)

    def cancel(self, numbers: Sequence[int]) -> Segment | None:
        """The next step makes no such segments after all, each the child of the one before; what they followed."""
        made = [self._stored[number] for number in numbers]
        for segment in reversed(made):
            self._remove(segment)
        return made[0].parent

    def retain(self, segment: Segment, lasting: bool) -> None:
        """A request uses a segment and those before it, to its end or until it is evicted."""
        for used in segment.chain():
            self._use(used, 1, lasting)

    def release(self, segment: Segment, lasting: bool) -> None:
        """A request does not use them any more. Drops those that are invalid, once nobody does."""
        for used in reversed(segment.chain()):
            self._use(used, -1, lasting)
            if used.is_invalid and not used.refs and not used.children:
                self._drop(used)

    def _use(self, segment: Segment, more: int, lasting: bool) -> None:
        self._count(segment, -1)
        segment.refs += more
        segment.lasting_refs += more * lasting
        self._count(segment, 1)

    def _count(self, segment: Segment, times: int) -> None:
        """Count a segment by who uses it, or count it no more."""
        columns = times * segment.columns
        self.columns += columns
        self.pinned += columns if segment.refs else 0
        self.lasting += columns if segment.lasting_refs else 0

    def droppable(self, keep: Segment | None = None) -> int:
        """Columns of all segments that nobody uses, without those that a further request would begin with."""
        return self.columns - self.columns_if_retained(keep)

    def columns_if_retained(self, segment: Segment | None) -> int:
        """Columns of all segments that requests use, if one more begins with ``segment``."""
        more = segment.chain() if segment else []
        return self.pinned + sum(part.columns for part in more if not part.refs)

    def lasting_if_retained(self, segment: Segment | None) -> int:
        """Columns of all segments that requests use to their end, if one more begins with ``segment`` and does."""
        more = segment.chain() if segment else []
        return self.lasting + sum(part.columns for part in more if not part.lasting_refs)

    def drop_columns(self, columns: int, keep: Segment | None = None) -> bool:
        """Drop segments that nobody uses until so many columns are free, or none is left but those of ``keep``; whether
        any went."""
        dropped = 0
        for segment in self._to_drop(keep) if columns > 0 else ():
            self._drop(segment)
            dropped += segment.columns
            if dropped >= columns:
                break
        return dropped > 0

    def _to_drop(self, keep: Segment | None = None) -> Iterator[Segment]:
        """What may go, in this order, if each is dropped before the next is asked for."""
        kept, passed = set(keep.chain() if keep else ()), set()
        for segment in list(self):
            passed.add(segment)
            last: Segment | None = segment
            # What one followed may go now; if it was used later, its turn comes later.
            while last in passed and not last.refs and not last.children and last not in kept:
                parent = last.parent
                yield last
                last = parent

    def invalidate(self) -> None:
        """No further request begins with what is there or is being read; what nobody uses is dropped."""
        for name in list(self._read_by):
            self.end(name)
        for segment in self:
            segment.is_invalid = True
        self._by_key.clear()
        self.drop_columns(self.columns)

    def _remove(self, segment: Segment) -> None:
        super()._remove(segment)
        if segment.parent is not None:
            segment.parent.children -= 1
        self._count(segment, -1)
        self._tell(-segment.columns)
        for key in () if segment.is_invalid else segment.keys:
            found = self._by_key[key]
            found.remove(segment)
            if not found:
                del self._by_key[key]
