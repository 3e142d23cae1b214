"""Prefixes that requests share compressed: which there are, who begins with one, who uses it, which go.

Owns them. A prefix takes only memory that nobody was promised, and none goes that two requests use.

    reading    a request was admitted that reads the prefix; others that begin with it wait for that
       |
    storing    the step that evicts it was dispatched; every rank keeps an entry of what is left, and reports
       |
    ready      all ranks have reported; who begins with the prefix borrows its pages
       |
    dropped    its pages are needed, or the cache was reset; a single request that uses it keeps the pages
"""

from collections.abc import Hashable, Iterator, Sequence

from vllm.logger import init_logger
from vllm.v1.request import Request

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.outbox import Outbox, TakenBack
from vllm_kvevict.engine.scheduler.requests import Requests
from vllm_kvevict.engine.scheduler.shared.entries import Entries
from vllm_kvevict.engine.scheduler.shared.prefixes import Prefix
from vllm_kvevict.engine.scheduler.shared.segments import SegmentCache

logger = init_logger("vllm.kv_eviction")


class CompressedPrefixes(Entries[Prefix]):
    """Those that are being read, storing or ready; as entries count those that are storing or ready.

    Attributes:
        held: pages of each rank that prefixes hold.
    """

    def __init__(self, outbox: Outbox, requests: Requests, books: Books, segments: SegmentCache):
        most = min((rank.most_prefixes for rank in books.ranks), default=0)
        super().__init__(most, outbox)
        self._requests, self._books, self._segments = requests, books, segments
        self.held = [0] * len(books.ranks)
        self._dropped = 0
        self._by_key: dict[Hashable, Prefix] = {}
        self._by_producer: dict[tuple[str, int], Prefix] = {}
        # Of these there are few, also where thousands are cached: whatever is asked in every step looks at them alone.
        self._borrowed: dict[int, Prefix] = {}
        self._forgotten: dict[int, Prefix] = {}

    @property
    def _storing(self) -> list[Prefix]:
        return [prefix for prefix in self._by_producer.values() if prefix.is_storing]

    @property
    def num_ready(self) -> int:
        """How many are ready, also those that no further request may begin with."""
        return len(self) - len(self._storing)

    @property
    def awaits_reports(self) -> bool:
        """Whether some are storing."""
        return bool(self._storing)

    # Who begins with one.

    def known(self, request: Request) -> Prefix | None:
        """The prefix that a request may begin with or wait for, if there is one. Changes nothing."""
        return self._by_key.get(self._requests.key(request))

    def find(self, request: Request) -> Prefix | None:
        """The prefix that a request can begin with now. Modifies the order: one that is ready counts as used.

        One that does not fit the pool together with the rest of the prompt is not used: the request reads all of its
        prompt, and the prefix is dropped if its pages are needed.
        """
        prefix = self.known(request)
        if prefix is None or not prefix.is_ready:
            return None
        self.touch(prefix)
        if request.num_tokens - prefix.tokens < self._requests.fewest_read:
            return None
        for rank, capacity in enumerate(self._books.ranks):
            own = prefix.kept[rank].at(request.num_tokens) - prefix.full_pages[rank]
            if prefix.held[rank] + own > capacity.pages:
                logger.debug_once(
                    "KV eviction: request %s reads its prefix again, because the rest of its prompt does not fit the "
                    "pool together with the compressed prefix",
                    request.request_id,
                )
                return None
        return prefix

    def begin(self, request: Request, account: Account) -> None:
        """A request was admitted: it borrows a prefix, or others may wait for the one that it reads."""
        if account.prefix is not None:
            self.borrow(account.prefix, request.request_id)
            return
        key, known = self._requests.key(request), self.known(request)
        if known is None and key is not None:
            producer, phase = (request.request_id, account.epoch), account.plan.prompt
            assert phase is not None, "a prefix that is kept whole has no key"
            prefix = Prefix(self.outbox.new_number(), key, phase.end, producer, [0] * len(self.held))
            self._by_key[key] = self._by_producer[producer] = prefix
        elif known is not None and known.is_ready:
            self.touch(known)

    # From reading to ready.

    def produced_by(self, name: str, epoch: int, tokens: int) -> Prefix | None:
        """The prefix of so many tokens that an admission of a request stores, None if it stores none or it is ready."""
        prefix = self._by_producer.get((name, epoch))
        return prefix if prefix is not None and prefix.tokens == tokens else None

    def store(self, name: str, account: Account) -> None:
        """Cache what the step that is being scheduled leaves of a prefix, if there is room for that.

        Until the reports it takes copies of the pages that are not full, at most one for each row. They go where nobody
        was promised anything, and in the place of prefixes that nobody uses now.
        """
        prefix = self._by_producer.get((name, account.epoch))
        if prefix is None:
            return
        copies = [rank.rows for rank in self._books.ranks]
        if not self._make_room_for(copies):
            logger.debug(
                "KV eviction: the prefix of request %s is not cached, because it does not fit the pool", name
            )
            self._cancel(prefix)
            return
        prefix.is_storing = True
        self._stored[prefix.number] = prefix
        self.outbox.store(name, prefix.number)
        self._count(prefix, copies)

    def _make_room_for(self, pages: Sequence[int]) -> bool:
        while self.is_full or any(more > left for more, left in zip(pages, self._books.free, strict=True)):
            if not self.is_full and self._segments.drop_columns(1):
                continue
            unused = self.next_to_drop(None, even_borrowed=False)
            if unused is None:
                return False
            self.drop(unused)
        return True

    def on_report(self, prefix: Prefix, rank: int, count: PageCount, partial_pages: int) -> None:
        """A rank has stored a prefix.

        Args:
            count: of what it keeps.
            partial_pages: its pages that are not full, which each borrower copies.
        """
        prefix.keep(rank, count, partial_pages)
        held = list(prefix.held)
        held[rank] = count.pages
        self._count(prefix, held)
        if prefix.is_ready:
            del self._by_producer[prefix.producer]

    def _cancel(self, prefix: Prefix) -> None:
        """A prefix will not be stored after all; who waits for it need not any more."""
        del self._by_producer[prefix.producer]
        self._remove(prefix)

    def _count(self, prefix: Prefix, pages: Sequence[int]) -> None:
        """A prefix now holds so many pages of each rank."""
        more = [now - before for now, before in zip(pages, prefix.held, strict=True)]
        self._books.cache(more)
        self.held = [sum(pair) for pair in zip(self.held, more, strict=True)]
        prefix.held = list(pages)

    # From ready to dropped.

    def borrow(self, prefix: Prefix, name: str) -> None:
        """A request uses pages of a prefix."""
        prefix.borrowers.add(name)
        self._borrowed[prefix.number] = prefix

    def part_from(self, name: str, account: Account, untold: TakenBack) -> None:
        """Part an account that ends from the prefix that it borrows, or reads for others.

        Args:
            untold: what the workers were not told of it.
        """
        if account.prefix is not None:
            account.prefix.borrowers.discard(name)
            if not account.prefix.borrowers:
                self._borrowed.pop(account.prefix.number, None)
            self.drop_forgotten()
        prefix = self._by_producer.get((name, account.epoch))
        if prefix is None:
            return
        is_dispatched = prefix.is_storing and not untold.is_store
        if not is_dispatched or account.is_undecided or untold.is_answer:
            self._cancel(prefix)
            return
        # Until its step is done the request has the pages; then the prefix does.
        unreported = [0 if rank in prefix.kept else held for rank, held in enumerate(account.held)]
        self._count(prefix, [sum(pair) for pair in zip(prefix.held, unreported, strict=True)])

    def droppable(self, forgotten: bool = False) -> Iterator[Prefix]:
        """Prefixes that may be dropped: at first those that nobody borrows, then those that one request does.

        The least recently used come first. Changes nothing.

        Args:
            forgotten: only those that no further request may begin with.
        """
        prefixes = self._forgotten if forgotten else self._stored
        for borrowers in (0, 1):
            for prefix in prefixes.values():
                if prefix.num_users == borrowers and self._may_drop(prefix):
                    yield prefix

    def _may_drop(self, prefix: Prefix) -> bool:
        """Not with two users, nor if a request begins with it that was admitted just now."""
        is_new = not prefix.borrowers.isdisjoint(self.outbox.admitted)
        return prefix.is_ready and prefix.num_users <= 1 and not is_new

    def next_to_drop(self, untouchable: Prefix | None, even_borrowed: bool) -> Prefix | None:
        """The prefix that goes next to make room, but for one; it frees something. Changes nothing."""
        for prefix in self.droppable():
            if prefix.num_users and not even_borrowed:
                return None  # those that nobody borrows came before
            if prefix is not untouchable and any(map(prefix.freed, range(len(self.held)))):
                return prefix
        return None

    def droppable_pages(self, untouchable: Prefix | None = None) -> list[int]:
        """Pages of each rank that are free once all are dropped that may be, apart from one. Changes nothing."""
        pages = list(self.held)
        for prefix in {*self._borrowed.values(), *self._storing, *([untouchable] if untouchable else [])}:
            goes = prefix is not untouchable and self._may_drop(prefix)
            for rank, held in enumerate(prefix.held):
                pages[rank] -= held - (prefix.freed(rank) if goes else 0)
        return pages

    def drop(self, prefix: Prefix) -> None:
        """Drop a prefix; what one request borrows of it becomes that request's own."""
        self._dropped += not prefix.is_forgotten
        self._drop(prefix)
        for name in prefix.borrowers:
            account = self._requests.accounts[name]
            self._books.hold(account, account.own_prefix())

    def take_dropped(self) -> int:
        """How many were dropped to make room since the last call; those of a reset do not count. Counts anew."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def _remove(self, prefix: Prefix) -> None:
        super()._remove(prefix)
        self._count(prefix, [0] * len(self.held))
        self._borrowed.pop(prefix.number, None)
        self._forgotten.pop(prefix.number, None)
        if not prefix.is_forgotten:
            del self._by_key[prefix.key]

    def forget(self) -> bool:
        """No further request begins with what is cached, or waits for what is being read or stored.

        Returns:
            Whether no request uses any, or will go on with what it is leaving as one.
        """
        for prefix in list(self._by_key.values()):
            if not prefix.is_storing:
                self._cancel(prefix)
                continue
            prefix.is_forgotten = True
            self._forgotten[prefix.number] = prefix
        self._by_key.clear()
        self.drop_forgotten()
        return not any(prefix.borrowers or self._producer_goes_on(prefix) for prefix in self)

    def _producer_goes_on(self, prefix: Prefix) -> bool:
        name, epoch = prefix.producer
        account = None if prefix.is_ready else self._requests.accounts.get(name)
        return account is not None and account.epoch == epoch

    def drop_forgotten(self) -> None:
        """Drop prefixes that no further request may begin with, as soon as they can be."""
        for prefix in list(self.droppable(forgotten=True)):
            self.drop(prefix)

    # What they hold.

    def pinned(self, more: Prefix | None = None) -> list[int]:
        """Pages of each rank that are not counted as any borrower's and that no drop would free.

        Args:
            more: one that a further request would borrow.
        """
        pages = [0] * len(self.held)
        for prefix in {*self._borrowed.values(), *([more] if more else [])}:
            is_shared = any(prefix.full_pages) and len(prefix.borrowers) + (prefix is more) > 1
            held = prefix.held if is_shared else prefix.full_pages
            pages = [sum(pair) for pair in zip(pages, held, strict=True)]
        return pages

    def in_use(self) -> list[int]:
        """Pages of each rank in prefixes that requests borrow or that are being stored."""
        used = [prefix.held for prefix in {*self._borrowed.values(), *self._storing}]
        return [sum(pages) for pages in zip(*used, strict=True)] or [0] * len(self.held)
