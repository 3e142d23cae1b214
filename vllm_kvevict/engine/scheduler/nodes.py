"""Shared entries of each kind: a compressed prefix, a tail behind one, a segment of an uncompressed prefix.

Owns nothing. Only their owners in ``shared/`` write to them.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.scheduler.snapshots import Snapshot


def plus(*pages: Sequence[int]) -> list[int]:
    """The sums of page counts, for each rank."""
    return [sum(of_rank) for of_rank in zip(*pages, strict=True)]


@dataclass(eq=False)
class Node:
    """KV that belongs to no request.

    Attributes:
        kind: what it is, in words.
        number: what scheduler and workers call it.
        keys: by which it is found, one for each unit of its tokens.
        held: pages of each rank that it holds.
        is_ready: whether a request can begin with it now.
        parent: what of its kind it follows; None where it begins the prompt.
        children: how many of its kind follow it.
        refs: requests that use it: they begin with it, or with one that follows it.
        counted: what of it is in the sums of its :class:`Graph`.
        is_invalid: whether no further request may begin with it.
        evict_first: whether it is of use for a while only, so that it goes before others, however recently it was used.
        seen_on: ranks that were found to hold it, which is looked at in check mode only.
    """

    kind: ClassVar[str]
    number: int
    keys: list[Hashable]
    held: list[int]
    _: KW_ONLY
    is_ready: bool = False
    parent: Self | None = None
    children: int = 0
    refs: int = 0
    counted: Any = None
    is_invalid: bool = False
    evict_first: bool = False
    seen_on: set[int] = field(default_factory=set)

    def chain(self, until: Self | None = None) -> Iterator[Self]:
        """This one, its parent and so on, up to the one before ``until``."""
        node: Self | None = self
        while node is not None and node is not until:
            yield node
            node = node.parent


class Counted(NamedTuple):
    """Of a prefix: pages of each rank that it holds, which of them are nobody's own and no drop would free, which are
    in use, and which are free once all are dropped that may be. And whether it ends a conversation, and is stored."""

    held: list[int]
    pinned: list[int]
    used: list[int]
    freed: list[int]
    is_end: list[int]
    is_storing: list[int]


@dataclass(eq=False)
class Prefix(Node):
    """A prefix that is cached, or is going to be: what an eviction has left behind what its parent holds.

    Its key is as of :func:`vllm_kvevict.engine.scheduler.keys.prefix_keys`, and its parent known when it is stored.

    Attributes:
        tokens: of the prefix.
        producer: id and epoch of the request that reads it.
        in_turns: whether that is a turn of a conversation.
        tails: those behind it.
        fills: partial pages of its parent, of each rank, that are full with the beginning of this one.
        filled: its own partial pages of each rank that are full with what follows it.
        filled_by: those of its children that begin in these pages.
        filled_for: ids of requests that do, since the child is dropped with which they began; all are borrowers.
        kept: for each rank that has reported, the page count of a request that holds this prefix, as if it borrowed
            nothing.
        full_pages: its own of each rank that it fills itself, which all of its borrowers use.
        borrowers: ids of the requests that use them, and pages of no prefix that follows it.
        snapshot: what layers that are not evicted remember at its end. Without it, where there are such layers, no
            request begins with it, but with those that follow it.
        snapshot_is_lost: whether it had one.
        is_found: whether a request has begun with it since the last one that follows it was stored.
        storing: how many of itself and those that follow are being stored.
        is_shared: whether several requests use pages of it.
        shared: of how many of these that is so. None of them goes, nor what they follow.
    """

    kind = "compressed prefix"
    tokens: int
    producer: tuple[str, int]
    in_turns: bool
    tails: list["Tail"] = field(default_factory=list)
    fills: list[int] = field(init=False)
    filled: list[int] = field(init=False)
    full_pages: list[int] = field(init=False)
    filled_by: set["Prefix"] = field(default_factory=set)
    filled_for: set[str] = field(default_factory=set)
    kept: dict[int, PageCount] = field(default_factory=dict)
    borrowers: set[str] = field(default_factory=set)
    snapshot: Snapshot | None = None
    snapshot_is_lost: bool = False
    is_found: bool = False
    storing: int = 0
    is_shared: bool = False
    shared: int = 0

    def __post_init__(self) -> None:
        self.fills, self.filled, self.full_pages = ([0] * len(self.held) for _ in range(3))

    def follow(self, parent: Self | None, name: str) -> Self | None:
        """It is being stored for a request, behind another prefix.

        Returns:
            That one, if this one is to fill its partial pages: nobody does, or uses what is behind its own entries.
        """
        self.parent = parent
        if parent is None:
            return None
        parent.note_found(False)
        may_fill = not parent.filled_by and not parent.filled_for
        if may_fill:
            parent.be_filled([0] * len(self.held))
        elif name in parent.filled_for:
            self.fills = list(parent.filled)
        else:
            return None
        parent.filled_by.add(self)
        return parent if may_fill else None

    def note_sharing(self) -> int:
        """Look whether several requests use pages of it; 1 if that is so now, -1 if it is not any more, 0 as before."""
        before, self.is_shared = self.is_shared, self.page_refs > 1
        return self.is_shared - before

    @property
    def held_by_chain(self) -> list[int]:
        """Pages of each rank that it and its parents hold."""
        return plus(*(prefix.held for prefix in self.chain()))

    @property
    def borrowed(self) -> list[int]:
        """Pages of each rank that a request uses which begins with it, its parents' too."""
        return plus(self.borrowed_before, self.full_pages)

    @property
    def borrowed_before(self) -> list[int]:
        """Those of them that are its parents'."""
        before = self.parent.chain() if self.parent else ()
        return plus(self.fills, *(pages for prefix in before for pages in (prefix.full_pages, prefix.fills)))

    @property
    def page_refs(self) -> int:
        """How many requests use pages of it: none if they have copied all of them, since none is full."""
        return self.refs if any(self.lends()) else 0

    def lends(self, is_filled: bool = False) -> list[int]:
        """Pages of each rank that are its own and that are borrowed of it.

        Args:
            is_filled: whether a further one uses what is behind it in its last pages.
        """
        is_filled |= bool(self.filled_for) or any(prefix.refs for prefix in self.filled_by)
        return plus(self.full_pages, self.filled) if is_filled else list(self.full_pages)

    def pages_of(self, rank: int, count: PageCount) -> int:
        """Pages of a rank that are its own, of a request that holds it."""
        return count.pages - self.borrowed_before[rank]

    def keep(self, rank: int, count: PageCount, filled: int) -> None:
        """A rank has stored it, and filled so many pages of its parent with that; see the attributes."""
        self.kept[rank] = count
        self.is_ready = len(self.kept) == len(self.held)
        if filled:
            assert self.parent is not None
            self.fills[rank] = filled
            self.parent.be_filled(self.fills)
        self.full_pages[rank] = self.pages_of(rank, count) - count.partial

    def be_filled(self, pages: Sequence[int]) -> None:
        """So many of its own pages of each rank are full with what follows it."""
        self.filled = list(pages)

    def note_found(self, is_found: bool) -> None:
        """A request begins with it, or one that follows it is stored."""
        self.is_found = is_found

    def remember(self, snapshot: Snapshot | None) -> None:
        """What layers that are not evicted remember at its end; None where there are none."""
        self.snapshot, self.snapshot_is_lost = snapshot, False

    def lose_snapshot(self) -> None:
        """Memory was short of what they remember."""
        self.snapshot, self.snapshot_is_lost = None, True

    @property
    def has_lost_snapshot(self) -> bool:
        """Whether it is found no more since its snapshot went."""
        return self.is_ready and self.snapshot_is_lost

    @property
    def awaits_snapshot(self) -> bool:
        """Whether requests can begin with it as soon as its snapshot is complete."""
        return self.snapshot is not None and not self.snapshot.is_complete

    def lose(self, name: str) -> None:
        """A request does not go on right behind it any more."""
        self.borrowers.discard(name)
        self.filled_for.discard(name)

    def adopt(self, child: "Prefix") -> None:
        """A prefix behind it is gone: what used that goes on behind this one."""
        self.filled_by.discard(child)
        self.borrowers |= child.borrowers
        if any(child.fills):
            self.filled_for |= child.borrowers

    def pages_behind(self, tokens: int) -> list[int]:
        """Pages of each rank behind its full ones, with so many tokens of prompt and answer that are not evicted."""
        return [self.kept[rank].at(tokens) - shared for rank, shared in enumerate(self.borrowed)]


@dataclass(eq=False)
class Tail(Node):
    """What a request that has ended held behind a compressed prefix, uncompressed.

    Attributes:
        prefix: that one, which stays as long as the tail does.
        end: tokens of the prompt and answer up to its last one.
    """

    kind = "tail"
    prefix: Prefix
    end: int

    def cut(self, tokens: int, units: int) -> None:
        """It ends after so many tokens of prompt and answer, and has so many units."""
        self.end, self.keys = tokens, self.keys[:units]


@dataclass(eq=False)
class Segment(Node):
    """A part of a prompt.

    Attributes:
        start, stop: columns of the page tables, one for each ``page_size`` tokens.
        lasting_refs: requests that use it, are never evicted and use it to their end.
        used: when it, or one that followed it and is gone, was last, by the clock of :class:`SegmentCache`.
    """

    kind = "segment"
    start: int
    stop: int
    lasting_refs: int = 0
    used: int = 0

    @property
    def columns(self) -> int:
        """How many it has."""
        return self.stop - self.start

    def use(self, now: int) -> None:
        """It is used at a time."""
        self.used = max(self.used, now)

    def parts(self, columns: int) -> tuple[tuple[int, int], ...]:
        """Number and columns of each segment that a request uses which begins with ``columns``, itself last."""
        chain = list(self.chain())
        stops = [columns, *(part.start for part in chain)]
        parts = [(part.number, stop - part.start) for part, stop in zip(chain, stops, strict=False)]
        return tuple(reversed(parts))
