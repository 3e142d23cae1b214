"""The prefixes that a rank has cached: its runs, by the numbers that the scheduler gives them."""

from collections.abc import Iterable, Mapping

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.cache.runs import Runs


class CachedPrefixes:
    """One per rank; the scheduler sees to it that pages and request slots suffice.

    Args:
        check: whether to keep a checksum of each prefix, to be compared by :meth:`verify` and before it is dropped.
    """

    def __init__(self, cache: PagedKVCache, check: bool):
        self.runs = Runs(cache)
        self._check = check
        self._checksums: dict[int, int] = {}
        self._by_number: dict[int, int] = {}
        self._expected: dict[str, int] = {}

    def expect(self, stores: Mapping[str, int]) -> None:
        """Requests whose prefix is to be cached once it is evicted, with its number."""
        self._expected.update(stores)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended."""
        for name in request_ids:
            self._expected.pop(name, None)

    def store(self, request_id: str, request_slot: int) -> None:
        """A request was evicted and holds nothing but its prefix: keep that, if it is to be cached."""
        number = self._expected.pop(request_id, None)
        if number is not None:
            self._by_number[number] = run = self.runs.freeze(request_slot)
            if self._check:
                self._checksums[number] = self.runs.checksum(run)

    def open(self, number: int) -> int:
        """Begin a request with a prefix, and return its slot."""
        return self.runs.fork(self._by_number[number])

    def drop(self, numbers: Iterable[int]) -> None:
        """End prefixes; pages that a request borrows become its own."""
        for number in numbers:
            self._verify(number)
            self.runs.drop(self._by_number.pop(number))
            self._checksums.pop(number, None)

    def verify(self) -> None:
        """Raise RuntimeError if a prefix has changed since it was stored."""
        for number in self._by_number:
            self._verify(number)

    def _verify(self, number: int) -> None:
        run = self._by_number[number]
        if self._check and self.runs.checksum(run) != self._checksums[number]:
            raise RuntimeError(f"kv eviction check: somebody has written to cached prefix {number}")

    def holdings(self) -> dict[int, int]:
        """Pages by number."""
        return {number: self.runs.cache.held(run) for number, run in self._by_number.items()}
