"""Prefixes that requests share compressed: who begins with one, which are stored, which are dropped.

Owns none of the entries (:mod:`vllm_kvevict.engine.scheduler.shared.prefixes` does): it decides for requests. A prefix
takes only memory that nobody was promised.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.outbox import Outbox, TakenBack
from vllm_kvevict.engine.scheduler.requests import Requests
from vllm_kvevict.engine.scheduler.shared.prefixes import Prefix

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.kv_eviction")


class CompressedPrefixes:
    """Decides which compressed prefixes requests begin with and leave.

    Args:
        requests, books, outbox: the ledger's.
    """

    def __init__(self, requests: Requests, books: Books, outbox: Outbox):
        self._requests, self._books, self._outbox = requests, books, outbox
        self._prefixes = books.prefixes

    def find(self, request: "Request") -> Prefix | None:
        """The prefix that a request can begin with. Modifies the order: what is found counts as used.

        One that does not fit the pool together with the rest of the prompt is not used: the request reads all of its
        prompt, and the prefix is dropped if its pages are needed.
        """
        prefix = self._prefixes.find(self._requests.key(request))
        if prefix is None or not prefix.is_ready:
            return None
        self._prefixes.touch(prefix)
        if request.num_tokens - prefix.tokens < self._requests.fewest_read:
            return None
        for rank, capacity in enumerate(self._books.ranks):
            own = prefix.kept[rank].at(request.num_tokens) - prefix.full_pages[rank]
            if prefix.held[rank] + own > capacity.pages:
                logger.debug_once(
                    "KV eviction: request %s reads its prefix again, because the rest of its prompt does not fit the "
                    "pool together with the cached prefix",
                    request.request_id,
                )
                return None
        return prefix

    def store(self, name: str, account: Account) -> None:
        """Cache what the step that is being scheduled leaves of a prefix, if there is room for that.

        It takes copies of the pages that are not full, at most one for each row. They go where nobody was promised
        anything, and in the place of prefixes that nobody uses now.
        """
        prefix = self._prefixes.produced_by((name, account.epoch))
        if prefix is None:
            return
        copies = [rank.rows for rank in self._books.ranks]
        while not self._can_store(copies):
            if not self._prefixes.is_full and self._books.segments.drop_oldest():
                continue
            unused = next(self._prefixes.droppable(self._outbox.admitted), None)
            if unused is None or unused.is_borrowed:
                logger.debug(
                    "KV eviction: the prefix of request %s is not cached, because it does not fit the pool",
                    name,
                )
                self._prefixes.cancel(prefix)
                return
            self.drop(unused)
        self._prefixes.store(prefix, copies)

    def _can_store(self, pages: Sequence[int]) -> bool:
        if self._prefixes.is_full:
            return False
        return all(more <= left for more, left in zip(pages, self._books.free, strict=True))

    def drop(self, prefix: Prefix) -> None:
        """Drop a cached prefix; what one request borrows of it becomes that request's own."""
        self._prefixes.drop(prefix)
        for name in prefix.borrowers:
            account = self._requests.accounts[name]
            self._books.hold(account, account.own_prefix())

    def next_to_drop(self, untouchable: Prefix | None, even_borrowed: bool) -> Prefix | None:
        """The prefix that goes next to make room, but for one; it frees something."""
        for prefix in self._prefixes.droppable(self._outbox.admitted):
            if prefix.is_borrowed and not even_borrowed:
                return None  # those that nobody borrows came before
            if prefix is not untouchable and any(map(prefix.freed, range(len(self._books.ranks)))):
                return prefix
        return None

    def part_from(self, name: str, account: Account, untold: TakenBack) -> None:
        """Part an account that ends from the prefix that it borrows, or reads for others.

        Args:
            untold: what the workers were not told of it.
        """
        if account.prefix is not None:
            self._prefixes.give_back(account.prefix, name)
            self.drop_forgotten()
        prefix = self._prefixes.produced_by((name, account.epoch))
        if prefix is None:
            return
        is_dispatched = prefix.is_storing and not untold.is_store
        if not is_dispatched or account.is_undecided or untold.is_answer:
            self._prefixes.cancel(prefix)
            return
        # Until its step is done the request has the pages; then the prefix does.
        unreported = [0 if rank in prefix.kept else held for rank, held in enumerate(account.held)]
        self._prefixes.set_held(prefix, [sum(pair) for pair in zip(prefix.held, unreported, strict=True)])

    @property
    def are_used(self) -> bool:
        """Whether requests use cached prefixes, or will go on with what they are leaving as one."""
        for prefix in self._prefixes.all_stored:
            name, epoch = prefix.producer
            account = None if prefix.is_ready else self._requests.accounts.get(name)
            if prefix.borrowers or (account is not None and account.epoch == epoch):
                return True
        return False

    def drop_forgotten(self) -> None:
        """Drop prefixes that no further request may begin with, as soon as they can be."""
        for prefix in list(self._prefixes.droppable(self._outbox.admitted, forgotten=True)):
            self.drop(prefix)
