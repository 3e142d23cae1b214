"""Shared entries of each kind: a compressed prefix, a tail behind one, a segment of an uncompressed prefix.

Owns nothing. Only their owners write to them: :class:`CompressedPrefixes`, :class:`Tails`, :class:`SegmentCache`.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from vllm_kvevict.cache.counts import PageCount


@dataclass(eq=False)
class Entry:
    """KV that belongs to no request.

    Attributes:
        number: what scheduler and workers call it.
        is_invalid: whether no further request may begin with it.
        evict_first: whether it is of use for a while only, so that it goes before others, however recently it was used.
        seen_on: ranks that were found to hold it, which is looked at in check mode only.
    """

    number: int
    is_invalid: bool = field(default=False, kw_only=True)
    evict_first: bool = field(default=False, kw_only=True)
    seen_on: set[int] = field(default_factory=set, kw_only=True)


@dataclass(frozen=True)
class Counted:
    """Pages of each rank of a prefix: which are nobody's own and no drop would free, which are in use, and which are
    free once all are dropped that may be."""

    pinned: list[int]
    used: list[int]
    freed: list[int]


@dataclass(eq=False)
class Prefix(Entry):
    """A prefix that is cached, or is going to be: what an eviction has left behind what its parent holds.

    Attributes:
        key: as of :func:`vllm_kvevict.engine.scheduler.keys.prefix_keys`.
        tokens: of the prefix.
        producer: id and epoch of the request that reads it.
        in_turns: whether that is a turn of a conversation.
        held: pages of each rank that it holds.
        parent: the prefix that this one follows, known when it is stored; None where it begins the prompt.
        children: how many follow it.
        fills: partial pages of its parent, of each rank, that are full with the beginning of this one.
        filled: its own partial pages of each rank that are full with what follows it.
        filled_by: those of its children that begin in these pages.
        filled_for: ids of requests that do, since the child is dropped with which they began; all are borrowers.
        kept: for each rank that has reported, the page count of a request that holds this prefix, as if it borrowed
            nothing.
        full_pages: its own of each rank that it fills itself, which all of its borrowers use.
        borrowers: ids of the requests that use them, and pages of no prefix that follows it.
        refs: how many requests use them.
        storing: how many of itself and those that follow are being stored.
        is_shared: whether several requests use pages of it.
        shared: of how many of these that is so. None of them goes, nor what they follow.
        is_storing: whether the step that evicts it was dispatched.
        counted: what of it :class:`Totals` has added up.
    """

    key: Hashable
    tokens: int
    producer: tuple[str, int]
    in_turns: bool
    held: list[int]
    parent: "Prefix | None" = None
    children: int = 0
    fills: list[int] = field(init=False)
    filled: list[int] = field(init=False)
    filled_by: set["Prefix"] = field(default_factory=set)
    filled_for: set[str] = field(default_factory=set)
    kept: dict[int, PageCount] = field(default_factory=dict)
    full_pages: list[int] = field(default_factory=list)
    borrowers: set[str] = field(default_factory=set)
    refs: int = 0
    storing: int = 0
    is_shared: bool = False
    shared: int = 0
    is_storing: bool = False
    counted: "Counted" = field(init=False)

    def __post_init__(self) -> None:
        self.counted = Counted(*([0] * len(self.held) for _ in range(3)))
        self.fills, self.filled = [0] * len(self.held), [0] * len(self.held)

    def chain(self, until: "Prefix | None" = None) -> Iterator["Prefix"]:
        """This one, its parent and so on, up to the one before ``until``."""
        prefix: Prefix | None = self
        while prefix is not None and prefix is not until:
            yield prefix
            prefix = prefix.parent

    def follow(self, parent: "Prefix | None", name: str) -> "Prefix | None":
        """It is being stored for a request, behind another prefix.

        Returns:
            That one, if this one is to fill its partial pages: nobody does, or uses what is behind its own entries.
        """
        self.parent, self.is_storing = parent, True
        if parent is None:
            return None
        parent.count(children=1)
        may_fill = not parent.filled_by and not parent.filled_for
        if may_fill:
            parent.be_filled([0] * len(self.held))
        elif name in parent.filled_for:
            self.fills = list(parent.filled)
        else:
            return None
        parent.filled_by.add(self)
        return parent if may_fill else None

    def leave_parent(self) -> None:
        """It is gone."""
        if self.parent is not None:
            self.parent.count(children=-1)
            self.parent.filled_by.discard(self)

    def count(self, refs: int = 0, storing: int = 0, shared: int = 0, children: int = 0) -> None:
        """So many more, or fewer, requests use it, of it and those that follow are being stored and are shared, and
        follow it."""
        self.refs += refs
        self.children += children
        self.storing += storing
        self.shared += shared

    def note_sharing(self) -> int:
        """Look whether several requests use pages of it; 1 if that is so now, -1 if it is not any more, 0 as before."""
        before, self.is_shared = self.is_shared, self.page_refs > 1
        return self.is_shared - before

    def note(self, counted: "Counted") -> "Counted":
        """What of it is added up from now on; returns what was until now."""
        before, self.counted = self.counted, counted
        return before

    @property
    def held_by_chain(self) -> list[int]:
        """Pages of each rank that it and its parents hold."""
        return [sum(pages) for pages in zip(*(prefix.held for prefix in self.chain()), strict=True)]

    @property
    def borrowed(self) -> list[int]:
        """Pages of each rank that a request uses which begins with it, its parents' too."""
        return [sum(pages) for pages in zip(self.borrowed_before, self.full_pages, strict=True)]

    @property
    def borrowed_before(self) -> list[int]:
        """Those of them that are its parents'."""
        pages = list(self.fills)
        for prefix in self.chain():
            if prefix is not self:
                for rank, own in enumerate(prefix.full_pages):
                    pages[rank] += own + prefix.fills[rank]
        return pages

    @property
    def is_ready(self) -> bool:
        """Whether every rank has stored it."""
        return len(self.kept) == len(self.held)

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
        if not is_filled:
            return list(self.full_pages)
        return [sum(pages) for pages in zip(self.full_pages, self.filled, strict=True)]

    def pages_of(self, rank: int, count: PageCount) -> int:
        """Pages of a rank that are its own, of a request that holds it."""
        return count.pages - self.borrowed_before[rank]

    def keep(self, rank: int, count: PageCount, filled: int) -> None:
        """A rank has stored it, and filled so many pages of its parent with that; see the attributes."""
        self.kept[rank] = count
        if filled:
            assert self.parent is not None
            self.fills[rank] = filled
            self.parent.be_filled(self.fills)
        self.full_pages = self.full_pages or [0] * len(self.held)
        self.full_pages[rank] = self.pages_of(rank, count) - count.partial

    def be_filled(self, pages: Sequence[int]) -> None:
        """So many of its own pages of each rank are full with what follows it."""
        self.filled = list(pages)

    def lose(self, name: str) -> None:
        """A request does not go on right behind it any more."""
        self.borrowers.discard(name)
        self.filled_for.discard(name)

    def adopt(self, child: "Prefix") -> None:
        """What used a prefix behind it, which is gone, goes on behind this one."""
        self.borrowers |= child.borrowers
        if any(child.fills):
            self.filled_for |= child.borrowers


@dataclass(eq=False)
class Tail(Entry):
    """What a request that has ended held behind a compressed prefix, uncompressed.

    Attributes:
        parent: that prefix, which stays as long as the tail does.
        keys: by which it is found, one for each unit of its tokens.
        end: tokens of the prompt and answer up to its last one.
        held: pages of each rank that it holds.
    """

    parent: Prefix
    keys: list[Hashable]
    end: int
    held: list[int]

    def pages_until(self, tokens: int) -> list[int]:
        """Pages of each rank behind the prefix's full ones, with so many tokens of prompt and answer."""
        kept = [self.parent.kept[rank].at(tokens) for rank in range(len(self.parent.held))]
        return [pages - shared for pages, shared in zip(kept, self.parent.borrowed, strict=True)]

    def cut(self, tokens: int, units: int) -> None:
        """It ends after so many tokens of prompt and answer, and has so many units."""
        self.end, self.keys = tokens, self.keys[:units]

    def hold(self, pages: Sequence[int]) -> list[int]:
        """It holds so many pages of each rank; returns what it did until now."""
        before, self.held = self.held, list(pages)
        return before


@dataclass(eq=False)
class Segment(Entry):
    """A part of a prompt.

    Attributes:
        parent: the segment that it follows; None for a prompt's first tokens.
        start, stop: columns of the page tables, one for each ``page_size`` tokens.
        keys: by which it is found, one for each unit of tokens.
        refs: requests that begin with it, or with one that follows it.
        lasting_refs: those of them that are never evicted and use it to their end.
        children: segments that follow it.
    """

    parent: "Segment | None"
    start: int
    stop: int
    keys: list[Hashable]
    refs: int = 0
    lasting_refs: int = 0
    children: int = 0

    @property
    def columns(self) -> int:
        """How many it has."""
        return self.stop - self.start

    def parts(self, columns: int) -> tuple[tuple[int, int], ...]:
        """Number and columns of each segment that a request uses which begins with ``columns``, itself last."""
        chain = self.chain()
        stops = [*(part.start for part in chain[1:]), columns]
        return tuple((part.number, stop - part.start) for part, stop in zip(chain, stops, strict=True))

    def chain(self) -> list["Segment"]:
        """All segments from the first token on, itself last."""
        found: list[Segment] = []
        segment: Segment | None = self
        while segment is not None:
            found.append(segment)
            segment = segment.parent
        return found[::-1]
