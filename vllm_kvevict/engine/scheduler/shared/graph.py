"""What all kinds of shared KV have in common: nodes by number and key, what follows what, who uses it, what goes.

Each kind is a graph of its own, with its own rules. It owns its nodes, as counts alone: the pages are the workers',
which know a node by its number. A node that others follow does not go; what nobody uses goes when its pages are needed,
the least recently used first.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any, Generic, TypeVar

from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.keys import UnitKeys
from vllm_kvevict.engine.scheduler.nodes import Node
from vllm_kvevict.engine.scheduler.outbox import Outbox
from vllm_kvevict.schedules.bounds import last_that

N = TypeVar("N", bound=Node)


class Graph(Generic[N]):
    """All nodes of one kind.

    Args:
        most: how many there may be at once.
        outbox: where the workers are told what to make and to drop.
        books: where it is counted how many pages of each rank they hold.
        nothing: what a node that is gone adds to the sums: a list of zeros for each of them.

    Attributes:
        sums: over what :meth:`_counts` says of each node; kept up to date, since chains may be long and many.
        held: the first of them, pages of each rank that nodes hold.
    """

    def __init__(self, most: int, outbox: Outbox, books: Books, nothing: tuple[list[int], ...]):
        self.most, self.outbox, self._books, self._nothing = most, outbox, books, nothing
        self.sums: Any = deepcopy(nothing)
        self.held: list[int] = self.sums[0]
        self._stored: OrderedDict[int, N] = OrderedDict()
        """By number, in the order in which they go."""
        self._invalid: dict[int, N] = {}
        """Those of them that no further request may begin with."""
        self._by_key: dict[Hashable, list[N]] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def __iter__(self) -> Iterator[N]:
        return iter(self._stored.values())

    def __contains__(self, node: N) -> bool:
        return node.number in self._stored

    @property
    def is_full(self) -> bool:
        """Whether there may be no further one."""
        return len(self) >= self.most

    # What there is.

    def knows(self, key: Hashable) -> bool:
        """Whether there is a node with a key, or is going to be."""
        return key in self._by_key

    def lookup(self, key: Hashable) -> N | None:
        """A node with a key that a request can begin with now."""
        for node in self._by_key.get(key, ()):
            if node.is_ready:
                return node
        return None

    def longest(self, keys: UnitKeys, most: int) -> int:
        """Units of the longest prefix, at most ``most``, that there is or is going to be.

        Where one is, all shorter ones are, since no node goes before those that follow it.
        """
        return last_that(lambda count: self.knows(keys(count)), 0, most)

    # From adding to dropping.

    def touch(self, node: N) -> None:
        """A node counts as used now. Modifies the order alone."""
        self._stored.move_to_end(node.number, last=not node.evict_first)

    def _index(self, node: N) -> None:
        """A node is found by its keys."""
        for key in node.keys:
            self._by_key.setdefault(key, []).append(node)

    def _unindex(self, node: N, keys: Sequence[Hashable]) -> None:
        """A node is not found any more by some of its keys."""
        for key in () if node.is_invalid else keys:
            found = self._by_key[key]
            found.remove(node)
            if not found:
                del self._by_key[key]

    def add(self, node: N) -> None:
        """A node is there from now on, and used."""
        self._stored[node.number] = node
        self.touch(node)
        self._link(node, 1)

    def drop(self, node: N) -> None:
        """The workers drop a node before the next step."""
        self.outbox.drop(node.number)
        self._remove(node)

    def _remove(self, node: N) -> None:
        self._unindex(node, node.keys)
        self._invalid.pop(node.number, None)
        if self._stored.pop(node.number, None) is not None:
            self._link(node, -1)

    def _link(self, node: N, more: int) -> None:
        """A node follows its parent (1), or does not any more (-1)."""
        if node.parent is not None:
            node.parent.children += more
            self._count(node.parent)
        self._count(node)

    def _count_refs(self, node: N, more: int, until: N | None = None) -> None:
        """A node and those before it, up to one that is retained already, have a reference more (1) or less (-1)."""
        for used in node.chain(until):
            used.refs += more
            self._count(used)

    def hold(self, node: N, pages: list[int]) -> None:
        """A node now holds so many pages of each rank."""
        node.held = pages
        self._count(node)

    def _counts(self, node: N) -> tuple[list[int], ...]:
        """What a node adds to each of the sums."""
        return (node.held,)

    def _count(self, node: N) -> None:
        """What a node holds, or who uses or follows it, has changed."""
        before = node.counted or self._nothing
        node.counted = now = self._counts(node) if node in self else self._nothing
        for total, added, removed in zip(self.sums, now, before, strict=True):
            if added != removed:
                for index, count in enumerate(added):
                    total[index] += count - removed[index]
        if now[0] != before[0]:
            self._books.cache([added - removed for added, removed in zip(now[0], before[0], strict=True)])

    # What goes.

    def evictable(self, keep: N | None = None, among: Iterable[N] | None = None) -> Iterator[N]:
        """What may go, in this order, if each is dropped before the next is asked for; of compressed prefixes others
        may (:meth:`CompressedPrefixes.droppable`).

        Args:
            keep: what stays, with all before it.
            among: the nodes that are looked at, in their order; None: all.
        """
        kept, passed = set(keep.chain() if keep else ()), set()
        for node in list(self if among is None else among):
            passed.add(node)
            last: N | None = node
            # What one followed may go now; if it was used later, its turn comes later.
            while last in passed and not last.refs and not last.children and last not in kept:
                parent = last.parent
                yield last
                last = parent

    def drop_one(self, keep: N | None = None) -> bool:
        """Drop what goes next; whether there was any."""
        node = next(self.evictable(keep), None)
        if node is not None:
            self.drop(node)
        return node is not None

    def drop_until(self, is_enough: Callable[[], bool], keep: N | None = None) -> None:
        """Drop what may go until there is enough room."""
        for node in self.evictable(keep):
            if is_enough():
                return
            self.drop(node)

    def drop_invalid(self) -> None:
        """Drop what no further request may begin with, as soon as it can be."""
        for node in self.evictable() if self._invalid else ():
            if node.is_invalid:
                self.drop(node)

    def invalidate(self) -> bool:
        """No further request begins with what is there; what nobody uses is dropped. Whether nobody uses any."""
        self._by_key.clear()
        for number, node in sorted(self._stored.items()):
            node.is_invalid, self._invalid[number] = True, node
        self.drop_invalid()
        return not any(node.refs for node in self)

    def check(self, begun: Iterable[N | None]) -> None:
        """Check mode: references, edges, keys and sums are what they are if all are counted anew.

        Args:
            begun: the last node that each request uses.

        Raises:
            RuntimeError: naming a node that was counted wrongly.
        """
        refs = Counter(node for last in begun if last is not None for node in last.chain())
        children = Counter(node.parent for node in self if node.parent is not None)
        for node in {*self, *refs, *children}:
            now, counted = (
                (refs[node], children[node], self._counts(node)),
                (node.refs, node.children, node.counted),
            )
            is_found = node.is_invalid or all(node in self._by_key.get(key, ()) for key in node.keys)
            if now != counted or node not in self or not is_found:
                raise RuntimeError(f"kv eviction check: {node.kind} {node.number} is {now}, not {counted}")
        for node in itertools.chain.from_iterable(self._by_key.values()):
            if node.is_ready and node not in self:
                raise RuntimeError(f"kv eviction check: {node.kind} {node.number} is found, and was dropped")
        sums = zip(self._nothing, *(node.counted for node in self), strict=True)
        if [list(map(sum, zip(*counts, strict=True))) for counts in sums] != list(self.sums):
            raise RuntimeError(f"kv eviction check: shared entries do not sum to {self.sums}")
