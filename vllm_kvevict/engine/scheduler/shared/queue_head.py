"""Requests at the head of the queue that the next steps may begin, and the memory that they will need.

Whoever is evicted leaves a copy for others only where these need no memory for themselves. A step may evict many, and
the queue may be long, so it is looked at once per step.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from vllm_kvevict.engine.scheduler.shared.segments import Keys


@dataclass(frozen=True)
class Waiting:
    """A request that is not admitted.

    Attributes:
        name: its id.
        tokens: to be read.
        pages: of each rank, the most that it holds until it is read.
        keys, units: by which it finds uncompressed prefixes, and the most units that it may begin with.
    """

    name: str
    tokens: int
    pages: Sequence[int]
    keys: Keys
    units: int

    def begins_with(self, keys: Keys, units: int) -> bool:
        """Whether it begins with what a request leaves that has so many units; both may be longer than that."""
        shared = min(self.units, units)
        return shared > 0 and self.keys(shared) == keys(shared)


class QueueHead:
    """The first waiting requests, as they were when the step began, without those that it admitted since."""

    def __init__(self, waiting: Iterable[Waiting], num_ranks: int):
        self.tokens = 0
        self.pages = [0] * num_ranks
        self._by_name: dict[str, Waiting] = {}
        self._by_first_unit: dict[Hashable, list[Waiting]] = {}
        for request in waiting:
            self._by_name[request.name] = request
            self._count(request, 1)
            if request.units:
                self._by_first_unit.setdefault(request.keys(1), []).append(request)

    def remove(self, name: str) -> None:
        """A request was admitted."""
        request = self._by_name.pop(name, None)
        if request is not None:
            self._count(request, -1)

    def _count(self, request: Waiting, times: int) -> None:
        self.tokens += times * request.tokens
        for rank, pages in enumerate(request.pages):
            self.pages[rank] += times * pages

    def besides(self, name: str, keys: Keys, units: int) -> tuple[int, list[int]]:
        """What all need but a request itself and those that begin with what it leaves.

        Args:
            name, keys, units: of the request.

        Returns:
            Tokens to be read, and pages of each rank.
        """
        tokens, pages = self.tokens, list(self.pages)
        for request in self._sharers(name, keys, units):
            tokens -= request.tokens
            pages = [more - fewer for more, fewer in zip(pages, request.pages, strict=True)]
        return tokens, pages

    def _sharers(self, name: str, keys: Keys, units: int) -> Iterator[Waiting]:
        if name in self._by_name:
            yield self._by_name[name]
        for request in self._by_first_unit.get(keys(1), ()) if units else ():
            is_waiting = request.name in self._by_name and request.name != name
            if is_waiting and request.begins_with(keys, units):
                yield request
