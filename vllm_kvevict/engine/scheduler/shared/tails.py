"""Tails: what requests that have ended held behind a compressed prefix, uncompressed. Which there are, which go.

Owns them. The next turn of a conversation begins with the last question and answer, and reads neither again.

    compressed prefix | question, answer |                 what a request held when it ended
                      | 1 | 2 | 3 | 4 | 5 |                 its tail: units of ``page_size`` tokens
                      | 1 | 2 | 3 | other question ...      a request that has three of them in common takes these

Nobody borrows a tail: its tokens are evicted with the turn that they belong to, by the request that goes on with them.
So that one makes them its own, and what it does not need of them is free. They take only memory that nobody was
promised, and all of them go before any compressed prefix.
"""

from collections.abc import Callable, Sequence

from vllm.v1.request import Request

from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.keys import unit_keys
from vllm_kvevict.engine.scheduler.nodes import Prefix, Tail
from vllm_kvevict.engine.scheduler.outbox import Outbox, TakenBack
from vllm_kvevict.engine.scheduler.requests import Requests
from vllm_kvevict.engine.scheduler.shared.graph import Graph

MOST_TAILS = 4096
"""Tails that a server keeps at most; a conversation that rests has one."""


class Tails(Graph[Tail]):
    """All tails of a server, the oldest first."""

    def __init__(self, outbox: Outbox, requests: Requests, books: Books):
        super().__init__(MOST_TAILS, outbox, books, ([0] * len(books.ranks),))
        self._requests, self._unit = requests, requests.options.page_size

    # Who begins with one.

    def find(self, request: Request, prefix: Prefix) -> tuple[Tail, int] | None:
        """What a waiting request has in common with a tail behind the prefix that it begins with: the tail, and how
        many of its tokens. Changes nothing."""
        plan = self._requests.plan(request)
        if not prefix.tails or not plan.in_turns:
            return None
        most = min(
            plan.most_cached(request.num_tokens, prefix.tokens),
            request.num_tokens - self._requests.fewest_read,
        )
        keys = self._requests.keys_behind(request, prefix)
        most_units = min(len(keys), max(0, most - prefix.tokens) // self._unit)
        units = self.longest(unit_keys(keys, 1), most_units)
        tail = self.lookup(keys[units - 1]) if units else None
        return None if tail is None else (tail, units * self._unit)

    def adopt(self, account: Account) -> None:
        """A request was admitted: the beginning of its tail is its own from now on."""
        if account.tail is not None:
            self._cut(account.tail, account.tokens)
            self._remove(account.tail)
            self._books.take_over(account)

    def _cut(self, tail: Tail, tokens: int) -> None:
        """Nothing is left of a tail from so many tokens of its prompt on."""
        if tokens < tail.end:
            self.outbox.cut(tail.number, tail.end - tokens)
            units = (tokens - tail.prefix.tokens) // self._unit
            self._unindex(tail, tail.keys[units:])
            tail.cut(tokens, units)
            self.hold(tail, tail.prefix.pages_behind(tokens))

    # Who leaves one.

    def detach(self, request: Request, account: Account, untold: TakenBack) -> None:
        """Keep what an account that ends holds behind its compressed prefix, if its request has ended.

        Args:
            untold: what the workers were not told of it.
        """
        if untold.is_admission:
            if account.tail is not None:
                self.outbox.drop(account.tail.number)
        elif (
            request.is_finished()
            and not self._books.others.exist  # of which nothing is known behind the prefix
            and account.prefix is not None
            and _holds_all_behind(account, account.prefix)
        ):
            self._publish(request, account, account.prefix)

    def _publish(self, request: Request, account: Account, prefix: Prefix) -> None:
        """Keep what a request holds behind a compressed prefix, if there is room for that."""
        # The last token of an answer is not stored, and steps in flight may have gone on beyond it.
        stored = min(account.tokens, request.num_tokens - 1)
        keys = self._requests.keys_behind(request, prefix)[: (stored - prefix.tokens) // self._unit]
        if prefix.is_invalid or not keys or self.knows(keys[-1]):
            return
        end = prefix.tokens + len(keys) * self._unit
        pages = prefix.pages_behind(end)
        if self._has_room_for(account, pages):
            if self.is_full:
                self.drop_one()
            tail = Tail(self.outbox.new_number(), keys, pages, prefix, end, is_ready=True)
            self._index(tail)
            self.add(tail)
            prefix.tails.append(tail)
            self.outbox.publish_tail(request.request_id, tail.number, end)

    def _has_room_for(self, account: Account, pages: Sequence[int]) -> bool:
        """Whether nobody was promised so many pages of each rank, once an account has ended."""
        ranks = zip(self._books.left, account.held, account.promise, pages, strict=True)
        return all(more <= left + held + promise for left, held, promise, more in ranks)

    # What goes.

    def droppable_pages(self, new: Account | None = None) -> list[int]:
        """Pages of each rank that are free once all tails are dropped, but what a further request would begin with."""
        if new is None or new.tail is None:
            return list(self.held)
        return [held - own for held, own in zip(self.held, new.held, strict=True)]

    def make_room(self, is_enough: Callable[[], bool], new: Account | None) -> None:
        """As :meth:`drop_until`; a further request keeps of a tail what it would begin with."""
        kept = None if new is None else new.tail
        if new is not None and kept is not None and not is_enough():
            self._cut(kept, new.tokens)
        self.drop_until(is_enough, kept)

    def _remove(self, node: Tail) -> None:
        super()._remove(node)
        node.prefix.tails.remove(node)


def _holds_all_behind(account: Account, prefix: Prefix) -> bool:
    """Whether a turn of a conversation holds all that it has read behind the compressed prefix that it borrows."""
    if account.pending is not None or not account.plan.in_turns:
        return False
    answer = account.plan.answer
    if answer is not None and answer.last_eviction(account.tokens) is not None:
        return False
    return all(count.tokens == prefix.tokens for count in account.counts)
