"""Uncompressed prefixes that requests begin with: which segments there are, who uses them, which go first.

Only counts, as in the ledger: the pages are the workers', which know a segment by its number. A segment is a part of a
prompt, whole pages of all rows (:mod:`vllm_kvevict.cache.segments`); it follows its parent, from the first token on.

    prompt of A   |  1  |  2  | 3 |            of B   |  1  | part of 2 | 4 |

A request that begins with a segment uses all those before it as well. What nobody uses goes when its pages are needed:
the least recently used first, and none before those that follow it.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from vllm_kvevict.engine.scheduler.outbox import Outbox
from vllm_kvevict.schedules.bounds import last_that

Keys = Callable[[int], Hashable]
"""What identifies a prompt's first so many units of tokens, from 1 on."""


@dataclass(eq=False)
class Segment:
    """A part of a prompt.

    Attributes:
        number: what scheduler and workers call it.
        parent: the segment that it follows; None for a prompt's first tokens.
        start, stop: columns of the page tables, one for each ``page_size`` tokens.
        keys: by which it is found, one for each unit of tokens.
        users: requests that begin with it, or with one that follows it.
        lasting: those of them that are never evicted and use it to their end.
        children: segments that follow it.
        is_forgotten: whether no further request may begin with it.
        seen_on: ranks that were found to hold it, which is looked at in check mode only.
    """

    number: int
    parent: "Segment | None"
    start: int
    stop: int
    keys: list[Hashable] = field(default_factory=list)
    users: int = 0
    lasting: int = 0
    children: int = 0
    is_forgotten: bool = False
    seen_on: set[int] = field(default_factory=set)

    @property
    def columns(self) -> int:
        """How many it has."""
        return self.stop - self.start

    def parts(self, columns: int) -> tuple[tuple[int, int], ...]:
        """Number and columns of each segment that a request uses which begins with ``columns``, itself last."""
        found, stop = [], columns
        for segment in reversed(self.chain()):
            found.append((segment.number, stop - segment.start))
            stop = segment.start
        return tuple(reversed(found))

    def chain(self) -> list["Segment"]:
        """All segments from the first token on, itself last."""
        found: list[Segment] = []
        segment: Segment | None = self
        while segment is not None:
            found.append(segment)
            segment = segment.parent
        return found[::-1]


class SegmentCache:
    """All segments of a server.

    Args:
        unit: columns that a prefix is a multiple of.
        longest: the most columns of a segment.
        most: how many segments there may be.
        next_number: gives numbers that nothing else on the workers has.
        outbox: where the workers are told what to freeze and to drop.

    Attributes:
        columns: of all segments.
        pinned: columns of those that requests use.
        lasting: columns of those that requests use to their end.
    """

    def __init__(self, unit: int, longest: int, most: int, next_number: Callable[[], int], outbox: Outbox):
        self.unit, self.longest, self.most = unit, longest, most
        self.columns = self.pinned = self.lasting = 0
        self._next_number, self.outbox = next_number, outbox
        self._segments: dict[int, Segment] = {}
        """By number, the least recently used first."""
        self._by_key: dict[Hashable, list[Segment]] = {}
        self._fresh: set[int] = set()
        """Numbers of those that the step which is being scheduled will leave."""
        self._readers: dict[Hashable, dict[str, None]] = {}
        self._read_by: dict[str, list[Hashable]] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def new_step_starts(self) -> None:
        """What earlier steps have left can be used from now on."""
        self._fresh.clear()

    # What a request can begin with.

    def find(self, keys: Keys, most: int) -> tuple[Segment, int] | None:
        """The longest prefix of at most ``most`` units that a request can begin with: its last segment, and its
        columns. Changes nothing.

        What is known of a prefix is known of all shorter ones, since what comes before a segment cannot go before it.
        """
        units = last_that(lambda count: self._ready(keys(count)) is not None, 0, most)
        segment = self._ready(keys(units)) if units else None
        return None if segment is None else (segment, units * self.unit)

    def touch(self, segment: Segment) -> None:
        """A segment counts as used now, and so do those before it. Modifies the order."""
        self._segments[segment.number] = self._segments.pop(segment.number)

    def _ready(self, key: Hashable) -> Segment | None:
        segments = self._by_key.get(key, ())
        return next((segment for segment in segments if segment.number not in self._fresh), None)

    def soon(self, keys: Keys, most: int) -> int:
        """Units of the longest prefix, at most ``most``, that will be there after the step that is being scheduled."""
        return last_that(lambda count: keys(count) in self._by_key, 0, most)

    def known(self, keys: Keys, units: int) -> bool:
        """Whether there is a prefix of so many units, if only after the step that is being scheduled."""
        return keys(units) in self._by_key

    # Who is reading what will be there.

    def begin(self, request_id: str, keys: Keys, units: int) -> None:
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

    def readers(self, keys: Keys, most: int) -> tuple[list[str], int]:
        """Who reads the longest prefix of at most ``most`` units that anybody reads, and its units."""
        units = last_that(lambda count: keys(count) in self._readers, 0, most)
        return (list(self._readers[keys(units)]), units) if units else ([], 0)

    # From freezing to dropping.

    def store(
        self,
        request_id: str,
        parent: Segment | None,
        keys: Keys,
        start: int,
        stop: int,
        users: int,
        lasting: int,
    ) -> Segment | None:
        """A request's columns from ``start`` to ``stop``, multiples of the unit, become segments with the next step.

        Args:
            parent: the segment that ends at ``start``, or reaches beyond it; None for the first tokens.
            users, lasting: 1 or 0, whether the request goes on with them, to its end.

        Returns:
            The last of them; the parent if there is no room for any.
        """
        if parent is not None and parent.is_forgotten:
            return parent
        while start < stop and self._make_room(parent):
            end = min(stop, start - start % self.longest + self.longest)
            segment = Segment(self._next_number(), parent, start, end, users=users, lasting=lasting)
            segment.keys = [keys(count) for count in range(start // self.unit + 1, end // self.unit + 1)]
            self._add(segment)
            self.outbox.freeze(request_id, segment.number, segment.columns)
            parent, start = segment, end
        return parent

    def _add(self, segment: Segment) -> None:
        self._segments[segment.number] = segment
        self._fresh.add(segment.number)
        for key in segment.keys:
            self._by_key.setdefault(key, []).append(segment)
        if segment.parent is not None:
            segment.parent.children += 1
        self.columns += segment.columns
        self.pinned += segment.columns * min(segment.users, 1)
        self.lasting += segment.columns * min(segment.lasting, 1)

    def _make_room(self, parent: Segment | None) -> bool:
        """See to it that there may be one segment more."""
        return len(self) < self.most or self.drop_oldest(parent)

    def cancel(self, numbers: Sequence[int]) -> Segment | None:
        """The next step makes no such segments after all, each the child of the one before; what they followed."""
        made = [self._segments[number] for number in numbers]
        for segment in reversed(made):
            self._remove(segment)
        return made[0].parent

    def borrow(self, segment: Segment, lasting: bool) -> None:
        """A request uses a segment and those before it, to its end or until it is evicted."""
        for used in segment.chain():
            self._use(used, 1, int(lasting))

    def give_back(self, segment: Segment, lasting: bool) -> None:
        """A request does not use them any more."""
        for used in reversed(segment.chain()):
            self._use(used, -1, -int(lasting))
            if used.is_forgotten and not used.users and not used.children:
                self._drop(used)

    def _use(self, segment: Segment, more: int, lasting: int) -> None:
        self.pinned -= segment.columns * min(segment.users, 1)
        self.lasting -= segment.columns * min(segment.lasting, 1)
        segment.users += more
        segment.lasting += lasting
        self.pinned += segment.columns * min(segment.users, 1)
        self.lasting += segment.columns * min(segment.lasting, 1)

    def droppable(self, keep: Segment | None = None) -> int:
        """Columns of all segments that nobody uses, without those that a further request would begin with."""
        return self.columns - self.with_user(keep)

    def with_user(self, segment: Segment | None) -> int:
        """Columns of all segments that requests use, if one more begins with ``segment``."""
        more = segment.chain() if segment else []
        return self.pinned + sum(part.columns for part in more if not part.users)

    def with_lasting(self, segment: Segment | None) -> int:
        """Columns of all segments that requests use to their end, if one more begins with ``segment`` and does."""
        more = segment.chain() if segment else []
        return self.lasting + sum(part.columns for part in more if not part.lasting)

    def drop_oldest(self, keep: Segment | None = None) -> bool:
        """Drop one segment, as of :meth:`drop_columns`.

        Returns:
            Whether there was one.
        """
        for segment in self._to_drop(keep):
            self._drop(segment)
            return True
        return False

    def drop_columns(self, columns: int, keep: Segment | None = None) -> None:
        """Drop segments that nobody uses until so many columns are free, or none is left but those of ``keep``.

        The least recently used goes first, and none before those that follow it.
        """
        if columns <= 0:
            return
        for segment in self._to_drop(keep):
            self._drop(segment)
            columns -= segment.columns
            if columns <= 0:
                return

    def _to_drop(self, keep: Segment | None = None) -> Iterator[Segment]:
        """What may go, in this order, if each is dropped before the next is asked for."""
        kept, passed = set(keep.chain() if keep else ()), set()
        for segment in list(self._segments.values()):
            passed.add(segment)
            last: Segment | None = segment
            # What one followed may go now; if it was used later, its turn comes later.
            while last in passed and not last.users and not last.children and last not in kept:
                parent = last.parent
                yield last
                last = parent

    def forget(self) -> None:
        """No further request begins with what is there or is being read; what nobody uses is dropped."""
        for name in list(self._read_by):
            self.end(name)
        for segment in self._segments.values():
            segment.is_forgotten = True
        self._by_key.clear()
        self.drop_columns(self.columns)

    def _drop(self, segment: Segment) -> None:
        self.outbox.drop(segment.number)
        self._remove(segment)

    def _remove(self, segment: Segment) -> None:
        del self._segments[segment.number]
        if segment.parent is not None:
            segment.parent.children -= 1
        self.columns -= segment.columns
        self.pinned -= segment.columns * min(segment.users, 1)
        self.lasting -= segment.columns * min(segment.lasting, 1)
        for key in () if segment.is_forgotten else segment.keys:
            found = self._by_key[key]
            found.remove(segment)
            if not found:
                del self._by_key[key]


def keys_of(block_hashes: Sequence[Hashable], blocks: int) -> Keys:
    """The keys of a request, by vLLM's hashes of its blocks, each of which includes those before it.

    Args:
        blocks: of a unit.
    """
    return lambda count: block_hashes[count * blocks - 1]
