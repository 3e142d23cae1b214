"""Whether a waiting request may begin: beside those in flight, with places in reserve and ring, and in its turn.

Owns whether reserve or ring is closed in this step: only :meth:`Gate.turn_away` closes them. Questions take nothing.
"""

from collections.abc import Callable

from vllm.v1.request import Request

from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.requests import Requests
from vllm_kvevict.engine.scheduler.reserve import Reserve
from vllm_kvevict.engine.scheduler.shared.store import SharedStore
from vllm_kvevict.schedules.inputs import HeadDims


class Gate:
    """Of a server.

    Args:
        tokens_left: tokens of the step that is being scheduled that nobody takes so far.

    Attributes:
        is_closed: whether reserve or ring is, which is asked of all who wait without a call.
    """

    def __init__(
        self,
        requests: Requests,
        books: Books,
        shared: SharedStore,
        reserve: Reserve,
        head_dims: HeadDims,
        tokens_left: Callable[[], int],
    ):
        self._requests, self._books, self._shared = requests, books, shared
        self._reserve, self._head_dims, self._tokens_left = reserve, head_dims, tokens_left
        self.begin_step()

    def begin_step(self) -> None:
        """Reserve and ring are open again, before anybody asks."""
        self.is_closed = self._reserve_is_closed = self._ring_is_closed = False

    def new_step_starts(self) -> None:
        """Who was evicted in an earlier step leaves the reserve; in that same step nobody else may have its place."""
        for name in list(self._reserve.spans):
            if not self._requests.accounts[name].reserved(self._head_dims):
                self._reserve.release(name)

    def turn_away(self, request: Request) -> bool:
        """Turn a waiting request away until there is room for it in the reserve, or in the ring.

        One that begins with all that is evicted of it needs no reserve, nor do most that this step can read whole.

        Others go on meanwhile. Of those that need what it needs nobody overtakes, lest long prompts never have room:
        vLLM asks in the order of its queue, and leaves out whom it cannot begin anyway.

        Returns:
            Whether it is passed over in this step.
        """
        if self.is_closed_to(request):
            return True
        needed, keeps_queries = self._needed(request), self._keeps_queries(request)
        needs_reserve = needed > 0 and not self._begins_evicted(request)
        lacks_reserve = needs_reserve and self._reserve.find(needed) is None
        if lacks_reserve or (keeps_queries and self._ring_is_full):
            self.is_closed = True
            self._reserve_is_closed |= needs_reserve
            self._ring_is_closed |= keeps_queries
            return True
        return needs_reserve and self._reserve_is_closed

    def is_closed_to(self, request: Request) -> bool:
        """Whether a waiting request must be passed over because one before it was, as far as that can be told before
        what it begins with is looked up: thousands may wait behind that one. Changes nothing."""
        if self._ring_is_closed and self._keeps_queries(request):
            return True
        if not self._reserve_is_closed or not self._needed(request):
            return False
        return request.skip_reading_prefix_cache or not self._shared.compressed.knows_all(request)

    def _needed(self, request: Request) -> int:
        """What a waiting request takes of the reserve if it begins in this step, with nothing cached."""
        most = min(self._tokens_left(), self._requests.control.bounds.longest_step)
        return self._requests.reserved(request, self._head_dims, most)

    def _keeps_queries(self, request: Request) -> bool:
        """Whether a waiting request needs a part of the ring."""
        last_token = request.num_prompt_tokens + request.max_tokens - 1
        return self._requests.plan(request).keeps_queries(last_token)

    @property
    def _ring_is_full(self) -> bool:
        """Whether all memory for queries that choose later is in use."""
        keeping = sum(account.keeps_queries for account in self._requests.accounts.values())
        return keeping >= self._requests.ring_parts

    def _begins_evicted(self, request: Request) -> bool:
        """Whether a waiting request begins with all that is evicted of it."""
        if request.skip_reading_prefix_cache:
            return False  # vLLM looks for no prefix of it
        prefix = self._shared.compressed.find(request)
        return prefix is not None and prefix.tokens >= self._requests.plan(request).evicted_at

    def would_admit(self, request: Request, num_new_tokens: int) -> bool:
        """Whether a waiting request would be admitted now, beginning with so many tokens."""
        account = self._requests.open(request, num_new_tokens)
        if not self.has_room_for(request, account):
            return False
        others = self._books.others
        freed, now = self._shared.droppable_pages(), others.pages()
        then = others.pages(others.blocks_to_begin(request) - others.snapshots.blocks_without())
        spare = [pages + before - after for pages, before, after in zip(freed, now, then, strict=True)]
        return self._books.fits(account, account.need_at(num_new_tokens), spare)

    def has_room_for(self, request: Request, new: Account) -> bool:
        """Whether there are places in reserve and ring, if the request needs them, and pages beside the others."""
        reserved = new.reserved(self._head_dims)
        if reserved and self._reserve.find(reserved) is None:
            return False
        if new.keeps_queries and self._ring_is_full:
            return False
        books, accounts = self._books, self._requests.accounts
        control = self._requests.control
        pinned, lasting = books.others.together_later(
            *self._shared.pinned(new), accounts.values(), request, new, control.expected_end
        )
        running: list[Account] = []
        less_urgent: list[Account] = []
        for name, account in accounts.items():
            is_less_urgent = self._requests.in_flight[name].priority > request.priority
            (less_urgent if is_less_urgent else running).append(account)
        return control.shortage(new, running, pinned, lasting, less_urgent) is None
