"""Prefixes that requests share compressed: which there are, who begins with one, who uses it, which go.

Owns them. A prefix takes only memory that nobody was promised, and none goes that two requests use, or that another
one follows: what a prompt in parts leaves forms a chain, with a branch wherever two prompts part.

    reading    a request was admitted that reads the prefix; others that begin with it wait for that
       |
    storing    the step that evicts it was dispatched; every rank keeps an entry of what is left, and reports
       |
    ready      all ranks have reported; who begins with the prefix borrows its pages
       |
    dropped    its pages are needed, or the cache was reset; a single request that uses it keeps the pages
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from operator import sub

from vllm.logger import init_logger
from vllm.v1.request import Request

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.messages import StorePrefix
from vllm_kvevict.engine.request_options import RequestOptions
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.nodes import Counted, Prefix, plus
from vllm_kvevict.engine.scheduler.outbox import Outbox, TakenBack
from vllm_kvevict.engine.scheduler.requests import Requests
from vllm_kvevict.engine.scheduler.shared.graph import Graph
from vllm_kvevict.engine.scheduler.shared.segments import SegmentCache
from vllm_kvevict.engine.scheduler.shared.tails import Tails

logger = init_logger("vllm.kv_eviction")


class CompressedPrefixes(Graph[Prefix]):
    """Those that are being read, storing or ready; nodes of the graph are those that are storing or ready."""

    sums: Counted

    def __init__(
        self, outbox: Outbox, requests: Requests, books: Books, segments: SegmentCache, tails: Tails
    ):
        most = min((rank.most_prefixes for rank in books.ranks), default=0)
        ranks = len(books.ranks)
        nothing = Counted([0] * ranks, [0] * ranks, [0] * ranks, [0] * ranks, [0], [0])
        super().__init__(most, outbox, books, nothing)
        self._requests, self._segments, self._tails = requests, segments, tails
        self._dropped = 0
        self._by_producer: dict[tuple[str, int], dict[int, Prefix]] = {}
        """Those that are being read or stored, by their tokens."""

    def take_statistics(self) -> tuple[int, int, int]:
        """How many are ready, also those that no further request may begin with; how many end conversations, since no
        other one follows; and how many were dropped to make room since the last call, those of a reset apart."""
        dropped, self._dropped = self._dropped, 0
        return len(self) - self.sums.is_storing[0], self.sums.is_end[0], dropped

    @property
    def awaits_reports(self) -> bool:
        """Whether some are storing."""
        return self.sums.is_storing[0] > 0

    # Who begins with one.

    def known(self, request: Request) -> Prefix | None:
        """The longest prefix that a request may begin with or wait for, if there is one. Changes nothing."""
        keys = reversed(self._requests.keys(request).values())
        return next((self._by_key[key][0] for key in keys if key in self._by_key), None)

    def lookup(self, key: Hashable) -> Prefix | None:
        """As of :meth:`Graph.lookup`; beside other layers only with what these remember."""
        prefix = super().lookup(key)
        if prefix is None or not self._books.others.exist:
            return prefix
        return prefix if prefix.snapshot is not None and prefix.snapshot.is_complete else None

    def knows_all(self, request: Request) -> bool:
        """Whether there is a prefix, or is going to be, of all that is evicted of a request. Changes nothing."""
        return self.knows(self._requests.keys(request).get(self._requests.plan(request).evicted_at))

    def find(self, request: Request) -> Prefix | None:
        """The prefix that a request can begin with now. Modifies the order: one that is ready counts as used.

        One that does not fit the pool together with the rest of the prompt is not used: the request reads more of its
        prompt, and the prefix is dropped if its pages are needed.
        """
        known = map(self.lookup, reversed(self._requests.keys(request).values()))
        ready = [prefix for prefix in known if prefix is not None]
        if ready:
            self.touch(ready[0])
        most = request.num_tokens - self._requests.fewest_read
        ready = [prefix for prefix in ready if prefix.tokens <= most]
        while ready and not self._fits(request, ready[0]):
            # Half as many turns each time: there may be hundreds, and this is asked in every step.
            ready = ready[(len(ready) + 1) // 2 :]
        return ready[0] if ready else None

    def _fits(self, request: Request, prefix: Prefix) -> bool:
        """Whether the pool can hold a prefix and the rest of a request's prompt."""
        held, borrowed = prefix.held_by_chain, prefix.borrowed
        plan, bounds = self._requests.plan(request), self._requests.control.bounds
        copies = self._books.others.pages_of_copies
        for rank, capacity in enumerate(self._books.ranks):
            own = bounds.most_held(plan, rank, prefix.kept[rank], request.num_tokens) - borrowed[rank]
            if held[rank] + own + copies[rank] > capacity.pages:
                logger.debug_once(
                    "KV eviction: request %s reads its prefix again, because the rest of its prompt does not fit the "
                    "pool together with the compressed prefix",
                    request.request_id,
                )
                return False
        return True

    def touch(self, node: Prefix) -> None:
        """A prefix counts as used now, and its parents right after it. Modifies the order alone."""
        for prefix in node.chain():
            super().touch(prefix)

    def begin(self, request: Request, account: Account) -> None:
        """A request was admitted: it borrows a prefix, and others may wait for those that it reads."""
        if account.prefix is not None:
            self.retain(account.prefix, request.request_id)
            account.prefix.note_found(True)
        begins = 0 if account.prefix is None else account.prefix.tokens
        producer = request.request_id, account.epoch
        for tokens, key in self._requests.keys(request).items():
            if tokens <= begins:
                continue
            if self.knows(key):
                if self._by_key[key][0].has_lost_snapshot:
                    continue  # it is found again once this request has read it
                if known := self.lookup(key):
                    self.touch(known)
                return
            number, held = self.outbox.new_number(), [0] * len(self.held)
            changes = RequestOptions.of(request.sampling_params).changes_later(tokens)
            prefix = Prefix(number, [key], held, tokens, producer, account.plan.in_turns, evict_first=changes)
            self._index(prefix)
            self._by_producer.setdefault(producer, {})[tokens] = prefix

    # From reading to ready.

    def produced_by(self, name: str, epoch: int, tokens: int) -> Prefix | None:
        """The prefix of so many tokens that an admission of a request stores, None if it stores none or it is ready."""
        return self._by_producer.get((name, epoch), {}).get(tokens)

    def store(self, name: str, account: Account) -> None:
        """Cache what the step that is being scheduled leaves of a prefix, if there is room for that.

        Until the reports it takes copies of the pages that are not full, at most one for each row. They go where nobody
        was promised anything, and in the place of prefixes that nobody uses now.
        """
        prefix = self.produced_by(name, account.epoch, account.tokens)
        if prefix is None:
            self._find_again(name, account)
            return
        copies, others = [rank.rows for rank in self._books.ranks], self._books.others
        if not self._make_room_for(copies, others.snapshots.new_blocks if others.exist else 0):
            logger.debug(
                "KV eviction: the prefix of request %s is not cached, because it does not fit the pool", name
            )
            self._cancel(prefix)
            return
        fills = prefix.follow(account.prefix, name)
        self.add(prefix)
        self.outbox.store(name, StorePrefix(prefix.number, None if fills is None else fills.number))
        self._count_storing(prefix, 1)
        self.hold(prefix, copies)
        pages = plus(self._books.held, self._books.promised)
        prefix.remember(others.make_snapshot(name, prefix.tokens, pages))

    def _find_again(self, name: str, account: Account) -> None:
        """Let a prefix be found again whose snapshot went, by what other layers remember of a request that has read it
        anew, if there is room for that. Not of one that was preempted: room that it takes may be what it lacked."""
        key = self._requests.keys(self._requests.in_flight[name]).get(account.tokens)
        prefix = next((x for x in self._by_key.get(key, ()) if x.has_lost_snapshot), None)
        others = self._books.others
        if prefix is None or account.is_invalid or account.epoch > 1:
            return
        if min(self._books.free_beside(others.snapshots.new_blocks)) < 0:
            return
        prefix.remember(
            others.make_snapshot(name, prefix.tokens, plus(self._books.held, self._books.promised))
        )
        self.touch(prefix)

    def _count_storing(self, prefix: Prefix, more: int) -> None:
        """A prefix begins to be stored (1), or is not any more (-1)."""
        for entry in prefix.chain():
            entry.storing += more
            self._count(entry)

    def _make_room_for(self, pages: Sequence[int], blocks: int) -> bool:
        while self.is_full or min(map(sub, self._books.free_beside(blocks), pages)) < 0:
            frees_memory = self._segments.drop_one, self._tails.drop_one, self._release_passed
            if not self.is_full and any(free() for free in frees_memory):
                continue
            if not self._drop_prefix(None, even_borrowed=False):
                return False
        return True

    def on_report(self, prefix: Prefix, rank: int, count: PageCount, filled: int) -> None:
        """A rank has stored a prefix.

        Args:
            count: of what it keeps.
            filled: pages of the prefix before it that it has filled.
        """
        prefix.keep(rank, count, filled)
        self.hold(prefix, [*prefix.held[:rank], prefix.pages_of(rank, count), *prefix.held[rank + 1 :]])
        if prefix.is_ready:
            self._end_producing(prefix)
            self._count_storing(prefix, -1)

    def _end_producing(self, prefix: Prefix) -> None:
        """Nobody is reading or storing a prefix any more."""
        produced = self._by_producer[prefix.producer]
        del produced[prefix.tokens]
        if not produced:
            del self._by_producer[prefix.producer]

    def _cancel(self, prefix: Prefix) -> None:
        """A prefix will not be stored after all; who waits for it need not any more."""
        self._end_producing(prefix)
        if prefix in self:
            self._count_storing(prefix, -1)
        self._remove(prefix)

    # From ready to dropped.

    def retain(self, prefix: Prefix, name: str, before: Prefix | None = None) -> None:
        """A request begins to borrow pages of a prefix.

        Args:
            before: which it used until now; this one follows it.
        """
        if before is not None:
            before.lose(name)
        prefix.borrowers.add(name)
        self._count_refs(prefix, 1, before)

    def _count_refs(self, node: Prefix, more: int, until: Prefix | None = None) -> None:
        super()._count_refs(node, more, until)
        shared, is_behind = 0, True
        for entry in node.chain():
            shared += entry.note_sharing()
            if shared or entry is until:  # of which other pages may be in use now
                entry.shared += shared
                self._count(entry)
            is_behind = is_behind and entry is not until
            if not is_behind and not shared:
                return

    def detach(self, name: str, account: Account, untold: TakenBack) -> None:
        """Part an account that ends from the prefix that it borrows, or reads for others.

        Args:
            untold: what the workers were not told of it.
        """
        if account.prefix is not None:
            account.prefix.lose(name)
            self._count_refs(account.prefix, -1)
        for prefix in list(self._by_producer.get((name, account.epoch), {}).values()):
            is_dispatched = prefix in self and not untold.is_store
            is_undecided = account.pending is not None and account.pending.is_undecided
            if not is_dispatched or is_undecided or untold.is_answer:
                self._cancel(prefix)
                continue
            # Until its step is done the request has the pages; then the prefix does.
            unreported = [0 if rank in prefix.kept else held for rank, held in enumerate(account.held)]
            self.hold(prefix, plus(prefix.held, unreported))
        self.drop_invalid()

    def droppable(self, prefixes: Iterable[Prefix]) -> Iterator[Prefix]:
        """Of prefixes, the least recently used first, those that may be dropped now: at first those that nobody
        borrows, then those that one request does. Changes nothing."""
        for borrowers in (0, 1):
            for prefix in prefixes:
                if prefix.page_refs == borrowers and self._may_drop(prefix):
                    yield prefix

    def _may_drop(self, prefix: Prefix) -> bool:
        """Not with two references, nor before one that follows it, nor if a request that was admitted just now begins
        with it."""
        is_new = not prefix.borrowers.isdisjoint(self.outbox.admitted)
        return prefix.is_ready and prefix.page_refs <= 1 and not prefix.children and not is_new

    def _next_to_drop(self, untouchable: Prefix | None, even_borrowed: bool) -> Prefix | None:
        """The prefix that goes next to make room, but for one; it frees something, or one does that goes after it.
        Changes nothing."""
        for prefix in self.droppable(self):
            if prefix.page_refs and not even_borrowed:
                return None  # those that nobody borrows came before
            if prefix is not untouchable and any(any(entry.counted.freed) for entry in prefix.chain()):
                return prefix
        return None

    def drop_next(self, untouchable: Prefix | None, even_borrowed: bool) -> bool:
        """Drop what goes next to make room, or part with a snapshot; whether there was any.

        Args:
            untouchable: that stays, with its snapshot.
            even_borrowed: whether those may go that one request borrows.
        """
        if self._release_passed(untouchable) or self._drop_prefix(untouchable, even_borrowed):
            return True
        return self._release_one(prefix for prefix in self if prefix is not untouchable)

    def _drop_prefix(self, untouchable: Prefix | None, even_borrowed: bool) -> bool:
        """Drop the prefix that goes next; arguments as of :meth:`drop_next`."""
        prefix = self._next_to_drop(untouchable, even_borrowed)
        if prefix is not None:
            self.drop(prefix)
        return prefix is not None

    def _release_passed(self, untouchable: Prefix | None = None) -> bool:
        """Part with a snapshot that nobody needs as long as its conversation goes on: that keeps its last one."""
        return self._release_one(
            x for x in self if x.children == 1 and not x.is_found and x is not untouchable
        )

    def _release_one(self, prefixes: Iterable[Prefix]) -> bool:
        """Part with the first snapshot of prefixes; whether there was any."""
        if not self._books.others.exist:
            return False
        prefix = next((x for x in prefixes if x.snapshot is not None), None)
        if prefix is not None:
            self._release(prefix)
        return prefix is not None

    def _release(self, prefix: Prefix) -> None:
        """Part with what other layers remember of a prefix: only those that follow it are found."""
        if prefix.snapshot is not None:
            self._books.others.snapshots.release(prefix.snapshot)
            prefix.lose_snapshot()

    def droppable_pages(self, untouchable: Prefix | None = None) -> list[int]:
        """Pages of each rank that are free once all are dropped that may be, one after the other, apart from one and
        its parents. Changes nothing."""
        begun = (self._requests.accounts[name].prefix for name in self.outbox.admitted)
        kept = {entry for last in (untouchable, *begun) if last is not None for entry in last.chain()}
        return [
            free - sum(entry.counted.freed[rank] for entry in kept)
            for rank, free in enumerate(self.sums.freed)
        ]

    def drop(self, node: Prefix) -> None:
        """Drop a prefix, the last of a chain; what one request borrows of it becomes that request's own."""
        self._dropped += not node.is_invalid
        for tail in list(node.tails):
            self._tails.drop(tail)
        super().drop(node)
        for name in node.borrowers:
            account = self._requests.accounts[name]
            self._books.hold(account, account.own_prefix())

    def _remove(self, node: Prefix) -> None:
        if node.parent is not None:
            node.parent.adopt(node)
        self._release(node)
        super()._remove(node)

    def invalidate(self) -> bool:
        """As of :meth:`Graph.invalidate`, nor does any request wait for what is being read or stored.

        Returns:
            Whether no request uses any, or will go on with what it is leaving as one.
        """
        known = [prefix for prefixes in self._by_key.values() for prefix in prefixes]
        for prefix in known:
            if prefix not in self:
                self._cancel(prefix)
        for prefix in self:
            self._release(prefix)
        return super().invalidate() and not any(map(self._producer_goes_on, self))

    def _producer_goes_on(self, prefix: Prefix) -> bool:
        name, epoch = prefix.producer
        account = None if prefix.is_ready else self._requests.accounts.get(name)
        return account is not None and account.epoch == epoch

    def drop_invalid(self) -> None:
        while prefixes := list(self.droppable(self._invalid.values())):
            for prefix in prefixes:
                self.drop(prefix)

    # What they hold.

    def pinned(self, more: Prefix | None = None) -> list[int]:
        """Pages of each rank that are not counted as any borrower's and that no drop would free.

        Args:
            more: one that a further request would borrow.
        """
        pages = list(self.sums.pinned)
        is_shared = is_filled = False
        for entry in more.chain() if more is not None else ():
            is_shared |= entry.shared > 0 or (entry.refs > 0 and any(entry.lends(is_filled)))
            then, now = entry.held if is_shared else entry.lends(is_filled), entry.counted.pinned
            is_filled = any(entry.fills)
            for rank, page_count in enumerate(then):
                pages[rank] += page_count - now[rank]
        return pages

    def _counts(self, node: Prefix) -> Counted:
        held, nothing = node.held, self._nothing[0]
        lent = node.lends() if node.refs else nothing
        pinned = held if node.shared else lent
        used = held if node.refs or node.storing else nothing
        stays = node.storing or node.shared or not node.is_ready
        # What a single borrower uses becomes that one's own.
        freed = nothing if stays else [pages - own for pages, own in zip(held, lent, strict=True)]
        return Counted(held, pinned, used, freed, [node.in_turns and not node.children], [not node.is_ready])
