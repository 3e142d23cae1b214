"""What a rank has cached of prefixes, by the scheduler's messages: shared entries under the scheduler's numbers.

Owns which requests are to leave their prefix, and in check mode the checksum of each shared entry: no entry changes
from the step that makes it until it is dropped. That pages and request slots suffice is the scheduler's affair.
"""

from collections.abc import Iterable, Mapping, Sequence

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.engine.messages import StorePrefix
from vllm_kvevict.schedules.plan import Admission

STEPS_OF_A_ROUND, FEW_PAGES = 100, 256
"""Checksums of more cached pages than these few are compared in turns, all of them once in so many steps."""


class CachedPrefixes:
    """One per rank.

    Args:
        check: whether to keep a checksum of each prefix, to be compared by :meth:`verify` in turns, and before it is
            dropped.
    """

    def __init__(self, cache: PagedKVCache, check: bool):
        self.cache, self.loans = cache, cache.loans
        self._check = check
        self._checksums: dict[int, int] = {}
        self._steps = 0
        self._expected: dict[str, StorePrefix] = {}

    def expect(self, stores: Mapping[str, StorePrefix]) -> None:
        """Requests whose prefix is to be cached once it is evicted."""
        self._expected.update(stores)

    def remove(self, request_id: str) -> None:
        """A request has ended."""
        self._expected.pop(request_id, None)

    def freeze(self, request_slot: int, columns: Iterable[tuple[int, int]]) -> None:
        """Make uncompressed prefixes of a request's next columns: the number of each, and how many columns."""
        for part in columns:
            self.loans.freeze(part[0], request_slot, part[1])

    def store(self, request_id: str, request_slot: int) -> int:
        """A request was evicted and holds nothing but its prefix: keep what is new of that, if it is to be cached.

        Returns:
            Pages of the prefix before it that it fills.
        """
        store = self._expected.pop(request_id, None)
        if store is None:
            return 0
        if store.fills is not None:
            self._verify(store.fills)
            self._checksums.pop(store.fills, None)
        filled = self.loans.freeze(store.number, request_slot, fills=store.fills)
        self._verify(store.number)
        return filled

    def publish_tail(self, request_slot: int, number: int, dropped: int) -> None:
        """Keep what an ended request holds behind what it borrows, without its newest tokens, as a tail."""
        if dropped:
            self.cache.truncate([request_slot], [dropped])
        self.loans.freeze_tail(number, request_slot)

    def cut(self, tails: Mapping[int, int]) -> None:
        """Drop the newest tokens of tails: how many, by number."""
        for number, tokens in tails.items():
            self._verify(number)
            self.loans.cut(number, tokens)
            self._checksums.pop(number, None)

    def open(self, admission: Admission) -> int:
        """Begin a request with what is cached of it, if anything is, and return its slot."""
        if admission.tail is not None:
            self._verify(admission.tail)
            self._checksums.pop(admission.tail, None)
        compressed = [(number, None) for number in admission.prefixes]
        return self.cache.open(compressed or admission.segments, admission.tail)

    def drop(self, numbers: Sequence[int]) -> None:
        """End prefixes; pages of a compressed one that a single request borrows become its own."""
        for number in numbers:
            self._verify(number)
            self.loans.drop(number)
            self._checksums.pop(number, None)

    def verify(self) -> None:
        """Raise RuntimeError if pages are owned twice, or a prefix has changed since it was stored.

        Called once a step. With many pages a step compares a part of the prefixes, and all within a round.
        """
        self.cache.verify()
        self._steps += 1
        parts = STEPS_OF_A_ROUND if sum(self.loans.pages.values()) > FEW_PAGES else 1
        for number in self.loans:
            if number not in self._checksums or (self._steps + number) % parts == 0:
                self._verify(number)

    def _verify(self, number: int) -> None:
        if not self._check:
            return
        checksum = self.loans.checksum(number)
        # An uncompressed prefix is complete with the step that makes it.
        if checksum != self._checksums.setdefault(number, checksum):
            raise RuntimeError(f"kv eviction check: somebody has written to compressed prefix {number}")

    def holdings(self) -> dict[int, int]:
        """Pages by number."""
        return {number: len(self.loans[number].pages) for number in self.loans}
