"""Prefixes that requests share compressed: who begins with one, which are stored, which are dropped."""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.outbox import TakenBack
from vllm_kvevict.engine.scheduler.prefixes import Prefix
from vllm_kvevict.engine.scheduler.state import LedgerState

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.kv_eviction")


class CompressedPrefixes(LedgerState):
    """The part of the ledger that keeps compressed prefixes."""

    def key_of(self, request: "Request") -> Hashable | None:
        """What a request's prefix is cached under; None if it has none that could be cached, or the cache is off."""
        if not self.enable_caching:
            return None
        name = request.request_id
        if name not in self._keys:
            self._keys[name] = self.prefix_key(request, self.plan(request))
        return self._keys[name]

    def cached_prefix(self, request: "Request") -> Prefix | None:
        """The prefix that a request can begin with; it counts as used.

        One that does not fit the pool together with the rest of the prompt is not used: the request reads all of its
        prompt, and the prefix is dropped if its pages are needed.
        """
        prefix = self.prefixes.find(self.key_of(request))
        if prefix is None or not prefix.is_ready or request.num_tokens - prefix.tokens < self.fewest_read:
            return None
        for rank, capacity in enumerate(self.capacities):
            own = prefix.kept[rank].at(request.num_tokens) - prefix.lent[rank]
            if prefix.held[rank] + own > capacity.pages:
                logger.debug_once(
                    "KV eviction: request %s reads its prefix again, because the rest of its prompt does not fit the "
                    "pool together with the cached prefix",
                    request.request_id,
                )
                return None
        return prefix

    def store_prefix(self, name: str, account: Account) -> None:
        """Cache what the step that is being scheduled leaves of a prefix, if there is room for that.

        It takes copies of the pages that are not full, at most one for each row. They go where nobody was promised
        anything, and in the place of prefixes that nobody uses now.
        """
        prefix = self.prefixes.produced_by((name, account.epoch))
        if prefix is None:
            return
        copies = [capacity.rows for capacity in self.capacities]
        while not self._can_store(copies):
            if not self.prefixes.is_full and self.segments.drop_oldest():
                continue
            unused = next(self.prefixes.droppable(self.outbox.admitted), None)
            if unused is None or unused.is_borrowed:
                logger.debug(
                    "KV eviction: the prefix of request %s is not cached, because it does not fit the pool",
                    name,
                )
                self.prefixes.cancel(prefix)
                return
            self.drop_prefix(unused)
        self.prefixes.store(prefix, copies)

    def _can_store(self, pages: Sequence[int]) -> bool:
        if self.prefixes.is_full:
            return False
        free = self.books.free(self.cached_pages)
        return all(more <= left for more, left in zip(pages, free, strict=True))

    def drop_prefix(self, prefix: Prefix) -> None:
        """Drop a cached prefix; what one request borrows of it becomes that request's own."""
        self.prefixes.drop(prefix)
        for name in prefix.borrowers:
            account = self.accounts[name]
            self.books.hold(account, account.own_prefix())

    def leave_prefix(self, name: str, account: Account, untold: TakenBack) -> None:
        """Part an account that ends from the prefix that it borrows, or reads for others.

        Args:
            untold: what the workers were not told of it.
        """
        if account.prefix is not None:
            self.prefixes.give_back(account.prefix, name)
            self.drop_forgotten()
        prefix = self.prefixes.produced_by((name, account.epoch))
        if prefix is None:
            return
        is_dispatched = prefix.is_storing and not untold.is_store
        if not is_dispatched or account.is_undecided or untold.is_answer:
            self.prefixes.cancel(prefix)
            return
        # Until its step is done the request has the pages; then the prefix does.
        unreported = [0 if rank in prefix.kept else held for rank, held in enumerate(account.held)]
        self.prefixes.hold(prefix, [sum(pair) for pair in zip(prefix.held, unreported, strict=True)])

    @property
    def uses_prefixes(self) -> bool:
        """Whether requests use cached prefixes, or will go on with what they are leaving as one."""
        for prefix in self.prefixes.all_stored:
            name, epoch = prefix.producer
            account = None if prefix.is_ready else self.accounts.get(name)
            if prefix.borrowers or (account is not None and account.epoch == epoch):
                return True
        return False

    def drop_forgotten(self) -> None:
        """Drop prefixes that no further request may begin with, as soon as they can be."""
        for prefix in list(self.prefixes.droppable(self.outbox.admitted, forgotten=True)):
            self.drop_prefix(prefix)
