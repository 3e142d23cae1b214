"""All KV that stays for later requests, of each kind: who begins with what, who waits for it, what goes to make room.

Owns the kinds, and who was found to wait in this step. A compressed prefix comes before segments: it is worth as many
tokens with a part of the pages. What goes first are segments, then tails, then compressed prefixes.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from functools import partial

from vllm.v1.request import Request

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.messages import Report
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.admission import Found
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.nodes import Prefix, plus
from vllm_kvevict.engine.scheduler.outbox import Outbox, TakenBack
from vllm_kvevict.engine.scheduler.requests import Requests
from vllm_kvevict.engine.scheduler.shared.compressed import CompressedPrefixes
from vllm_kvevict.engine.scheduler.shared.graph import Graph
from vllm_kvevict.engine.scheduler.shared.tails import Tails
from vllm_kvevict.engine.scheduler.shared.uncompressed import UncompressedPrefixes
from vllm_kvevict.engine.scheduler.terms import Need


class SharedStore:
    """What is shared, for the requests of a ledger.

    Args:
        waiting, is_on, block: as of :class:`UncompressedPrefixes`.

    Attributes:
        compressed, tails, uncompressed: its kinds.
        kinds: the graphs of all their nodes.
    """

    def __init__(
        self,
        outbox: Outbox,
        requests: Requests,
        books: Books,
        waiting: Callable[[], Iterable[Request]],
        is_on: bool,
        block: int,
    ):
        self._requests, self._books = requests, books
        self.tails = Tails(outbox, requests, books)
        self.uncompressed = UncompressedPrefixes(outbox, requests, books, waiting, is_on, block, self.tails)
        self._segments = self.uncompressed.segments
        self.compressed = CompressedPrefixes(outbox, requests, books, self._segments, self.tails)
        self.kinds: tuple[Graph, ...] = self.compressed, self._segments, self.tails
        self._found: Counter[str] = Counter()
        """Tokens with which requests began, by kind, as metrics name them."""
        self._awaited: set[Hashable] = set()
        """By what is found what requests wait for that vLLM has asked about in this step."""
        self._awaited_by: dict[str, Hashable] = {}
        """The same by waiting request, of the last step that asked."""

    def new_step_starts(self) -> None:
        """What earlier steps have left can be used, and who waits is found out anew."""
        self.uncompressed.new_step_starts()
        self._books.others.snapshots.new_step_starts()
        self._awaited.clear()

    # Who begins with what.

    def find(self, request: Request, most: int | None = None) -> Found | None:
        """What a waiting request begins with. Modifies the order: it counts as used.

        Args:
            most: tokens of it, if there are no compressed ones.
        """
        prefix = self.compressed.find(request)
        if prefix is not None:
            tail, more = self.tails.find(request, prefix) or (None, 0)
            return Found(prefix.tokens + more, prefix, tail)
        segments = self.uncompressed.find(request, most)
        if segments is None:
            return None
        segment, columns = segments
        return Found(columns * self._requests.options.page_size, segment=segment)

    def begin(self, request: Request, account: Account) -> None:
        """A request was admitted: it uses what it begins with, and others may wait for what it reads."""
        self.tails.adopt(account)
        self.compressed.begin(request, account)
        self.uncompressed.begin(request, account)
        if account.epoch == 1:
            self._count_found(account)

    def _count_found(self, account: Account) -> None:
        """A request begins with tokens that it has found."""
        prefix = account.prefix
        if prefix is None:
            self._found["uncompressed"] += account.tokens
        else:
            self._found["turns" if account.plan.in_turns else "prefix"] += prefix.tokens
            self._found["tail"] += account.tokens - prefix.tokens

    def take_statistics(self) -> tuple[int, int, int, dict[str, int]]:
        """Those of :meth:`CompressedPrefixes.take_statistics`, and tokens with which requests have begun since the last
        call, by kind."""
        found, self._found = +self._found, Counter()
        return *self.compressed.take_statistics(), dict(found)

    def tokens_of(self, account: Account) -> int:
        """Tokens that another request with the same prefix need not compute."""
        if account.is_invalid:
            return 0
        if account.prefix is not None:
            return account.prefix.tokens
        return self.uncompressed.columns_of(account) * self._requests.options.page_size

    # Who waits.

    def is_awaited(self, request: Request) -> bool:
        """Whether somebody else is reading what a waiting request begins with.

        The reader of a compressed prefix gets its priority, if that is more urgent.

        Thousands may wait for the same, so that is found out once in a step: vLLM asks in its order, and who comes
        later waits for the same reader with all the more reason.
        """
        name = request.request_id
        if self._awaited_by.get(name) in self._awaited:
            return True
        is_asked = self.uncompressed.is_on and not request.skip_reading_prefix_cache
        key = self._awaited_key(request) if is_asked else None
        if key is None:
            self._awaited_by.pop(name, None)
            return False
        self._awaited_by[name] = key
        self._awaited.add(key)
        return True

    def _awaited_key(self, request: Request) -> Hashable | None:
        """By what is found what a waiting request begins with and somebody else is reading; None if nobody is.
        Modifies the order, and who is urgent."""
        prefix = self.compressed.known(request)
        if prefix is None:
            return self.uncompressed.awaited(request)
        if prefix.is_ready and not prefix.awaits_snapshot:
            if not prefix.has_lost_snapshot:
                self.compressed.touch(prefix)
            return None
        self._inherit_priority(prefix, request)
        return prefix.number

    def _inherit_priority(self, prefix: Prefix, waiting: Request) -> None:
        """Whoever reads a prefix gets the priority of the most urgent request that waits for it."""
        producer = self._requests.in_flight.get(prefix.producer[0])
        if producer is not None:
            producer.priority = min(producer.priority, waiting.priority)

    # What a request gives and gets as it grows.

    def numbers_of(self, account: Account) -> tuple[tuple[int, ...], int | None, tuple[tuple[int, int], ...]]:
        """What a request begins with, as workers call it: prefixes, the tail, segments; as of :class:`Admission`."""
        prefix, tail, segment = account.prefix, account.tail, account.segment
        prefixes = () if prefix is None else tuple(entry.number for entry in prefix.chain())[::-1]
        segments = segment.parts(self.uncompressed.columns_of(account)) if segment else ()
        return prefixes, None if tail is None else tail.number, segments

    def before_growth(self, request: Request, account: Account, tokens: int, is_new: bool) -> Need | None:
        """Drop until every rank has room for an account at ``tokens`` tokens; None if none has.

        What it has read stays for others, and is copied, if that takes only idle pages. For a new request nothing is
        dropped in vain. Before one that runs is preempted, all goes that nobody uses; a prefix that somebody does only
        if that is enough.

        Returns:
            What the account needs then: more, if the prefix that it borrowed from is its own now.
        """
        if account.is_reading:
            self.uncompressed.let_copy_if_idle(request, account, tokens)
        need, books = account.need_at(tokens), self._books
        if books.fits(account, need):
            return need
        new = account if is_new else None
        untouchable, kept = (None, None) if new is None else (new.prefix, new.segment)
        snapshot = None if new is None or new.prefix is None else new.prefix.snapshot
        of_snapshots = books.others.pages_without_snapshots(snapshot)
        is_enough = books.fits(account, need, plus(self.droppable_pages(new), of_snapshots))
        if is_new and not is_enough:
            return None
        fits = partial(books.fits, account, need)
        self._segments.drop_until(fits, kept)
        self.tails.make_room(fits, new)
        while not books.fits(account, need):
            if not self.compressed.drop_next(untouchable, is_enough):
                return None
            need = account.need_at(tokens)
        return need

    def drop_next(self, new: Account | None) -> bool:
        """Drop what goes next to make room for blocks of other layers, but for what a new request begins with; whether
        there was any."""
        untouchable, kept = (None, None) if new is None else (new.prefix, new.segment)
        return self._segments.drop_one(kept) or self.compressed.drop_next(untouchable, even_borrowed=True)

    def advance(self, request: Request, account: Account, tokens: int, longest: int) -> None:
        """A step takes a request to so many tokens. Others may begin with what it has read before it is evicted, and
        with what is left once its prompt, or a part of it, is.

        Args:
            longest: as of :meth:`Account.advance`.
        """
        if account.is_reading:
            self.uncompressed.publish(request, account, tokens)
        if account.advance(tokens, longest):
            self.compressed.store(request.request_id, account)

    def on_report(
        self, request_id: str, index: int, count: PageCount, report: Report, is_gone: bool
    ) -> Prefix | None:
        """A rank has evicted a request and holds so much of it; the prefix that it has left with that, if any.

        Args:
            is_gone: whether that admission of the request has ended.
        """
        prefix = self.compressed.produced_by(request_id, report.epoch, report.tokens)
        if prefix is not None:
            self.compressed.on_report(prefix, index, count, report.filled)
        if is_gone:
            self.compressed.drop_invalid()
        return prefix

    def after_report(self, request_id: str, account: Account, prefix: Prefix | None) -> None:
        """A request goes on: with the prefix that it has left itself, and without segments once it has copies."""
        if prefix is not None and prefix.is_ready:
            self.compressed.retain(prefix, request_id, account.prefix)
            account.retain(prefix)
            self.compressed.drop_invalid()
        if account.is_evicted:
            self.uncompressed.end_copying(account)

    @property
    def awaits_reports(self) -> bool:
        """Whether entries are being stored that no request in flight may stand for."""
        return self.compressed.awaits_reports

    def check(self) -> None:
        """As of :meth:`Graph.check`, of all kinds."""
        accounts = self._requests.accounts.values()
        self.compressed.check(account.prefix for account in accounts)
        self._segments.check(account.segment for account in accounts)
        self.tails.check(())
        self._books.others.check()

    # What goes.

    def droppable_pages(self, new: Account | None = None) -> list[int]:
        """Pages of each rank that would be freed if all went that may, but what a new request begins with; without
        those in whose place there are snapshots."""
        untouchable, kept = (None, None) if new is None else (new.prefix, new.segment)
        of_prefixes, of_tails = self.compressed.droppable_pages(untouchable), self.tails.droppable_pages(new)
        return plus(of_prefixes, of_tails, self._segments.droppable_pages(kept))

    def pinned(self, new: Account) -> tuple[list[int], list[int]]:
        """Pages of each rank that are nobody's own and cannot be dropped if one more request begins: while it is read,
        and until answers end."""
        pages = self.compressed.pinned(new.prefix)
        lasting = self._segments.used(new.segment if new.is_lasting else None, to_the_end=True)
        return plus(pages, self._segments.used(new.segment)), plus(pages, lasting)

    def in_use(self) -> list[int]:
        """Pages of each rank that requests use, or that are being stored."""
        return plus(self.compressed.sums.used, self._segments.used())

    def detach(self, request: Request, account: Account, untold: TakenBack) -> None:
        """Part an account that ends from all that it borrows, or reads for others."""
        self.tails.detach(request, account, untold)
        self.compressed.detach(request.request_id, account, untold)
        self.uncompressed.detach(request, account, untold)

    def invalidate(self) -> bool:
        """Let no further request begin with what is cached, or with what a request reads or writes that is admitted.

        Returns:
            Whether no request uses what was cached; else the pages of such go when those requests end.
        """
        for account in self._requests.accounts.values():
            account.invalidate()
        self.tails.invalidate()
        is_unused = self.compressed.invalidate()
        return self._segments.invalidate() and is_unused

    def remove_waiting(self, name: str) -> None:
        """A request is finished."""
        self._awaited_by.pop(name, None)
