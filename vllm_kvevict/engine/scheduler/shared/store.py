"""All KV that requests share, of both kinds: who begins with what, who waits for it, what goes to make room.

Owns the two kinds, and who was found to wait in this step. A compressed prefix comes before segments: it is worth as
many tokens with a part of the pages.
"""

from collections.abc import Callable, Hashable, Iterable

from vllm.v1.request import Request

from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.admission import Found
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.outbox import Outbox, TakenBack
from vllm_kvevict.engine.scheduler.requests import Requests
from vllm_kvevict.engine.scheduler.shared.compressed import CompressedPrefixes
from vllm_kvevict.engine.scheduler.shared.prefixes import Prefix
from vllm_kvevict.engine.scheduler.shared.segments import Segment
from vllm_kvevict.engine.scheduler.shared.uncompressed import UncompressedPrefixes
from vllm_kvevict.engine.scheduler.terms import Need


class SharedStore:
    """What is shared, for the requests of a ledger.

    Args:
        waiting, is_on, block: as of :class:`UncompressedPrefixes`.

    Attributes:
        compressed, uncompressed: its two kinds.
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
        self.uncompressed = UncompressedPrefixes(outbox, requests, books, waiting, is_on, block)
        self._segments = self.uncompressed.segments
        self.compressed = CompressedPrefixes(outbox, requests, books, self._segments)
        self._awaited: set[Hashable] = set()
        """By what is found what requests wait for that vLLM has asked about in this step."""
        self._awaited_by: dict[str, Hashable] = {}
        """The same by waiting request, of the last step that asked."""

    def new_step_starts(self) -> None:
        """What earlier steps have left can be used, and who waits is found out anew."""
        self.uncompressed.new_step_starts()
        self._awaited.clear()

    # Who begins with what.

    def find(self, request: Request) -> Found | None:
        """What a waiting request begins with. Modifies the order: it counts as used."""
        return self.compressed.find(request) or self.uncompressed.find(request)

    def begin(self, request: Request, account: Account) -> None:
        """A request was admitted: it uses what it begins with, and others may wait for what it reads."""
        self.compressed.begin(request, account)
        self.uncompressed.begin(request, account)

    def tokens_found(self, request: Request) -> int:
        """Tokens that a waiting request need not compute: all of its compressed prefix, or what segments have."""
        found = self.find(request)
        if found is None:
            return 0
        return found.tokens if isinstance(found, Prefix) else found[1] * self._requests.options.page_size

    def tokens_of(self, account: Account) -> int:
        """Tokens that another request with the same prefix need not compute."""
        if account.is_stale:
            return 0
        if account.prefix is not None:
            return account.prefix.tokens
        return self.uncompressed.columns_of(account) * self._requests.options.page_size

    # Who waits.

    def is_awaited(self, request: Request) -> bool:
        """Whether somebody else is reading what a waiting request begins with.

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
        if prefix.is_ready:
            self.compressed.touch(prefix)
            return None
        # Whoever reads it is as urgent as who waits for it, lest others in between keep both waiting.
        producer = self._requests.in_flight.get(prefix.producer[0])
        if producer is not None:
            producer.priority = min(producer.priority, request.priority)
        return prefix.number

    # What goes.

    def make_room(self, account: Account, tokens: int, is_new: bool) -> Need | None:
        """Drop until every rank has room for an account at ``tokens`` tokens; None if none has.

        For a new request nothing is dropped in vain. Before one that runs is preempted, all prefixes go that nobody
        uses; one that somebody does only if that is enough.

        Returns:
            What the account needs then: more, if the prefix that it borrowed from is its own now.
        """
        need, books = account.need_at(tokens), self._books
        if books.fits(account, need):
            return need
        untouchable, kept = (account.prefix, account.segment) if is_new else (None, None)
        is_enough = books.fits(account, need, self.droppable_pages(untouchable, kept))
        if is_new and not is_enough:
            return None
        # Uncompressed prefixes go first.
        self._segments.drop_columns(books.columns_for(books.lacking(account, need)), kept)
        while not books.fits(account, need):
            prefix = self.compressed.next_to_drop(untouchable, is_enough)
            if prefix is None:
                return None
            self.compressed.drop(prefix)
            need = account.need_at(tokens)
        return need

    def droppable_pages(self, untouchable: Prefix | None = None, kept: Segment | None = None) -> list[int]:
        """Pages of each rank that would be freed if all went that may, apart from one."""
        pages = self.compressed.droppable_pages(untouchable)
        return self._books.with_columns(pages, self._segments.droppable(kept))

    def pinned(self, new: Account) -> tuple[list[int], list[int]]:
        """Pages of each rank that are nobody's own and cannot be dropped if one more request begins: while it is read,
        and until answers end."""
        pages = self.compressed.pinned(new.prefix)
        used = self._segments.with_user(new.segment)
        lasting = self._segments.with_lasting(new.segment if new.is_lasting else None)
        return self._books.with_columns(pages, used), self._books.with_columns(pages, lasting)

    def in_use(self) -> list[int]:
        """Pages of each rank that requests use, or that are being stored."""
        return self._books.with_columns(self.compressed.in_use(), self._segments.pinned)

    def part_from(self, request: Request, account: Account, untold: TakenBack) -> None:
        """Part an account that ends from all that it borrows, or reads for others."""
        self.compressed.part_from(request.request_id, account, untold)
        self.uncompressed.part_from(request, account, untold)

    def forget(self) -> bool:
        """Let no further request begin with what is cached, or with what a request reads or writes that is admitted.

        Returns:
            Whether no request uses what was cached; else the pages of such go when those requests end.
        """
        for account in self._requests.accounts.values():
            account.become_stale()
        is_unused = self.compressed.forget()
        self._segments.forget()
        return is_unused and not self._segments.pinned

    def forget_waiting(self, name: str) -> None:
        """A request is finished."""
        self._awaited_by.pop(name, None)
