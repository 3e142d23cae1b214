"""The prefixes that a rank has cached, compressed or not: its runs and segments, by the numbers of the scheduler."""

from collections.abc import Iterable, Mapping, Sequence

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.cache.runs import Runs
from vllm_kvevict.cache.segments import Segments
from vllm_kvevict.schedules.plan import Admission

STEPS_OF_A_ROUND, FEW_PAGES = 100, 256
"""Checksums of more cached pages than these few are compared in turns, all of them once in so many steps."""


class CachedPrefixes:
    """One per rank; the scheduler sees to it that pages and request slots suffice.

    Args:
        check: whether to keep a checksum of each prefix, to be compared by :meth:`verify` in turns, and before it is
            dropped.
    """

    def __init__(self, cache: PagedKVCache, check: bool):
        self.runs = Runs(cache)
        self.segments = Segments(cache)
        self._check = check
        self._checksums: dict[int, int] = {}
        self._steps = 0
        self._by_number: dict[int, int] = {}
        self._expected: dict[str, int] = {}

    def expect(self, stores: Mapping[str, int]) -> None:
        """Requests whose prefix is to be cached once it is evicted, with its number."""
        self._expected.update(stores)

    def forget(self, request_id: str, request_slot: int) -> None:
        """A request has ended."""
        self._expected.pop(request_id, None)
        self.segments.end_loan(request_slot)

    def freeze(self, request_slot: int, segments: Iterable[tuple[int, int]]) -> None:
        """Make segments, number and columns of each, of a request's pages."""
        for number, columns in segments:
            self.segments.freeze(number, request_slot, columns)

    def store(self, request_id: str, request_slot: int) -> None:
        """A request was evicted and holds nothing but its prefix: keep that, if it is to be cached."""
        self.segments.end_loan(request_slot)
        number = self._expected.pop(request_id, None)
        if number is not None:
            self._by_number[number] = run = self.runs.freeze(request_slot)
            if self._check:
                self._checksums[number] = self.runs.checksum(run)

    def open(self, admission: Admission) -> int:
        """Begin a request with what is cached of it, if anything is, and return its slot."""
        if admission.prefix is not None:
            return self.runs.fork(self._by_number[admission.prefix])
        if admission.segments:
            return self.segments.begin(admission.segments)
        return self.runs.cache.open()

    def drop(self, numbers: Sequence[int]) -> None:
        """End prefixes, and pages of one that a request borrows become its own; or segments."""
        for number in numbers:
            self._verify(number)
            if number in self.segments:
                self.segments.drop(number)
            else:
                self.runs.drop(self._by_number.pop(number))
            self._checksums.pop(number, None)

    def verify(self) -> None:
        """Raise RuntimeError if pages are owned twice, or a prefix or segment has changed since it was stored.

        Called once a step. With many pages a step compares a part of the prefixes, and all within a round.
        """
        self.runs.cache.verify(self.segments.all_pages())
        self.segments.verify()
        self._steps += 1
        parts = STEPS_OF_A_ROUND if self.runs.pages + self.segments.pages > FEW_PAGES else 1
        for number in (*self._by_number, *self.segments.numbers):
            if number not in self._checksums or (self._steps + number) % parts == 0:
                self._verify(number)

    def _verify(self, number: int) -> None:
        if not self._check:
            return
        checksum = self._checksum(number)
        # A segment is complete with the step that makes it.
        if checksum != self._checksums.setdefault(number, checksum):
            raise RuntimeError(f"kv eviction check: somebody has written to cached prefix {number}")

    def _checksum(self, number: int) -> int:
        if number in self.segments:
            return self.segments.checksum(number)
        return self.runs.checksum(self._by_number[number])

    def holdings(self) -> dict[int, int]:
        """Pages by number."""
        runs = {number: self.runs.cache.held(run) for number, run in self._by_number.items()}
        return runs | {number: self.segments.held(number) for number in self.segments.numbers}
