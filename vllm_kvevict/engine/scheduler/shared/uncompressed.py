"""Prefixes that requests share uncompressed: who begins with what, who waits, and what stays for others.

    a request of 1000 tokens   [ 512 found | 488 read ]             it borrows the segments of 512 tokens
    its last step of reading   [ 512 | 384 frozen | 104 ]           and freezes what it has read, in whole blocks
    evicted                    [ copies of what it keeps ]          it borrows nothing any more; all 896 stay for others

To stay, what is evicted must be copied instead of compacted in place. That takes pages, so it is done only where nobody
else needs them. Owns the segments, and who waits as this step began.
"""

import math
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.request import Request

from vllm_kvevict.engine.scheduler.account import STEPS_AHEAD, Account
from vllm_kvevict.engine.scheduler.admission import Found
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.keys import UnitKeys, unit_keys
from vllm_kvevict.engine.scheduler.nodes import Segment, plus
from vllm_kvevict.engine.scheduler.outbox import Outbox, TakenBack
from vllm_kvevict.engine.scheduler.requests import Requests
from vllm_kvevict.engine.scheduler.shared.segments import SegmentCache
from vllm_kvevict.engine.scheduler.shared.tails import Tails
from vllm_kvevict.engine.scheduler.terms import Need
from vllm_kvevict.schedules.base import MOST_SEGMENTS, PARTS
from vllm_kvevict.schedules.plan import Plan

PATIENT = 2
"""A request waits for another one to read what both begin with, if that reads no more than so many times as much."""


@dataclass(frozen=True)
class Waiting:
    """A request at the head of the queue: what it takes until it is read, and what it may begin with.

    Attributes:
        tokens, pages: to be read, and the most of each rank that it holds until then.
        keys, units: by which it finds uncompressed prefixes, and the most units that it may begin with.
    """

    tokens: int
    pages: Sequence[int]
    keys: UnitKeys
    units: int


def whole_until(plan: Plan) -> int:
    """Tokens up to which others may begin with what layers that are not evicted remember of a request. Behind its first
    eviction that depends on what is left."""
    first = plan.next_eviction(0)
    return sys.maxsize if first is None else first


class UncompressedPrefixes:
    """Decides which segments requests begin with, wait for and leave.

    Args:
        waiting: requests that are not admitted and that there are seats for, in their order.
        is_on: whether anything is cached.
        block: tokens of a block that vLLM hashes.
        tails: of the same requests, which go before anybody has to wait.

    Attributes:
        segments: of which they are made.
    """

    def __init__(
        self,
        outbox: Outbox,
        requests: Requests,
        books: Books,
        waiting: Callable[[], Iterable[Request]],
        is_on: bool,
        block: int,
        tails: Tails,
    ):
        self._requests, self._books, self._waiting, self.is_on = requests, books, waiting, is_on
        self._tails = tails
        page_size = requests.options.page_size
        self._block, self._unit = block, math.lcm(block, page_size)
        """Tokens of a block, and those that uncompressed prefixes are a multiple of."""
        unit = self._unit // page_size
        part = cdiv(min((rank.columns for rank in books.ranks), default=0), PARTS)
        longest = unit * max(1, cdiv(part, unit))
        self.segments = SegmentCache(unit, longest, MOST_SEGMENTS, outbox, books)
        self._ends: dict[str, set[int]] = {}
        """Tokens of each admitted request at which others may go on with what layers that are not evicted remember."""
        self._cached: dict[str, int] = {}
        """Blocks of each admitted request that these layers were told to keep for others."""
        self._queue_head: dict[str, Waiting] | None = None
        """The first waiting requests, as they were when this step began, without those admitted since. The queue may be
        long, and a step may evict many: it is looked at once in a step, when somebody asks."""

    def new_step_starts(self) -> None:
        """What earlier steps have left can be used from now on."""
        self.segments.new_step_starts()
        self._queue_head = None
        # Not sooner: until now a request could be preempted in the step for which it was scheduled.
        for name, account in self._requests.accounts.items() if self._books.others.exist else ():
            self._cache_beside(self._requests.in_flight[name], account)

    def columns_of(self, account: Account) -> int:
        """Columns that an account borrows of segments."""
        return account.borrowed[0] // self._books.ranks[0].rows if account.segment else 0

    def _units(self, request: Request, tokens: int) -> int:
        """Units in so many tokens of a request, as far as vLLM has hashed them."""
        if not self.is_on:
            return 0
        return min(tokens // self._unit, len(request.block_hashes) * self._block // self._unit)

    def _units_to_find(self, request: Request) -> int:
        """The most units that a waiting request may begin with."""
        most = self._requests.plan(request).most_cached(request.num_tokens)
        return self._units(request, max(0, min(most, request.num_tokens - self._requests.fewest_read)))

    def _keys_of(self, request: Request) -> UnitKeys:
        return unit_keys(request.block_hashes, self._unit // self._block)

    def ends(self, request: Request) -> set[int]:
        """Tokens at which others may go on with what layers that are not evicted remember of a request."""
        return self._ends.get(request.request_id) or self._first_ends(request)

    def _first_ends(self, request: Request) -> set[int]:
        """Where others may go on, as far as is known when a request begins: they may have the same prompt, one that
        goes on behind it, or one with which it has less in common."""
        others = self._books.others
        if not others.exist:
            return set()
        n = request.num_prompt_tokens
        most = self._requests.plan(request).most_cached(n)
        ends = {end - end % self._unit for end in (n - 1, n, most, request.shared_prefix_boundary)}
        return {max(0, end - again) for end in ends for again in {0, others.read_again}}

    def find(self, request: Request, most: int | None = None) -> tuple[Segment, int] | None:
        """What of its prompt a request can begin with uncompressed: the last segment, and the columns.

        A prompt that fits the pool only if it is evicted layer by layer begins with nothing. Modifies the order: what
        is found counts as used.

        Args:
            most: tokens of it.
        """
        units = self._units_to_find(request)
        if most is not None:
            units = min(units, most // self._unit)
        found = self._find(self._keys_of(request), units)
        while found is not None and not self._fits_alone(request, *found):
            segment, _ = found
            found = (segment.parent, segment.start) if segment.parent else None
        return found

    def _find(self, keys: UnitKeys, most: int) -> tuple[Segment, int] | None:
        """As of :meth:`SegmentCache.find`; modifies the order. Beside other layers only who begins with it does, since
        most of it may be of no use."""
        found = self.segments.find(keys, most)
        if found is not None and not self._books.others.exist:
            self.segments.touch(found[0])
        return found

    def _fits_alone(self, request: Request, segment: Segment, columns: int) -> bool:
        """Whether empty pools hold segments and all that a request needs besides until it does not use them any more.

        It keeps all of a segment from being dropped, also what it does not use of it.
        """
        found = Found(columns * self._requests.options.page_size, segment=segment)
        account = self._requests.open(request, request.num_tokens, found)
        in_chain = sum(part.columns for part in segment.chain())
        last = min(account.last_token, self._requests.control.max_model_len) if account.is_lasting else 0
        for index, rank in enumerate(self._books.ranks):
            pages = account.terms.peak[index] + rank.rows * in_chain
            if in_chain > columns and last:
                bounds, count = self._requests.control.bounds, account.counts[index]
                most = bounds.most_held(account.plan, index, count, last)
                pages = max(pages, most + rank.rows * (in_chain - columns))
            if pages > rank.pages:
                return False
        return True

    def awaited(self, request: Request) -> Hashable | None:
        """By what is found what another request will leave, if a request should wait for that.

        It waits for a step for what that leaves, and longer for who is reading what both begin with and comes before it
        in vLLM's order; never much longer than it would take to read that itself. Modifies the order: what is there
        already counts as used; and who is waited for keeps what other layers remember there.
        """
        keys, most = self._keys_of(request), self._units_to_find(request)
        if not most or not self.segments.is_known(keys(1)):
            return None  # thousands may ask, and most have nothing in common with anybody
        found = self._find(keys, most)
        units = found[1] // self.segments.unit if found else 0
        soon = self.segments.longest(keys, most)
        if soon > units:
            return keys(soon)
        if units and self._books.others.exist:
            units = self._books.others.find(request, units * self._unit)[1] // self._unit
        readers, read = self.segments.readers(keys, most)
        gained = (read - units) * self._unit
        for name in readers if gained > 0 else ():
            account = self._requests.accounts[name]
            left = account.plan.leaves(account.prefill_len) - account.tokens
            # A stream of those that came later could keep it waiting for ever.
            came_before = self._requests.in_flight[name] < request
            if came_before and left <= PATIENT * gained and self._will_leave(account):
                end = read * self._unit
                if self._can_end(name, account, end):
                    self._ends[name].add(end)
                    return keys(read)
        return None

    def _can_end(self, name: str, account: Account, end: int) -> bool:
        """Whether other layers, if there are any, can keep what they remember of a request at so many tokens: they will
        anyway, or it has not come to where that begins."""
        others = self._books.others
        if not others.exist or end in self._ends[name]:
            return True
        return others.can_end(account.tokens, end)

    def _will_leave(self, account: Account) -> bool:
        """Whether an account's prompt is likely to be there for others once it is read."""
        if not self.segments.most:
            return False
        if account.is_lasting or account.terms.copies is not None:
            return True
        plan = account.plan
        end = 0 if plan.prompt is None else plan.prompt.end
        copies = self._requests.control.bounds.after_eviction(plan, end + STEPS_AHEAD)
        return all(more <= free for more, free in zip(copies, self._idle(), strict=True))

    def _idle(self) -> list[int]:
        """Pages of each rank that there are and nobody holds or is promised, and those of tails, and of segments that
        nobody uses."""
        return plus(self._books.free, self._tails.held, self.segments.droppable_pages())

    def begin(self, request: Request, account: Account) -> None:
        """A request was admitted: it uses the segments that it begins with, and others may wait for what it reads."""
        if self._queue_head is not None:
            self._queue_head.pop(request.request_id, None)
        self._ends[request.request_id] = self._first_ends(request)
        self._cached[request.request_id] = 0
        if account.prefix is not None:
            return
        if account.segment is not None:
            self.segments.retain(account.segment, account.is_lasting)
            if self._books.others.exist:
                self.segments.touch(account.segment)
                self._use(request, account.tokens)
        units = self._units(request, account.plan.leaves(account.prefill_len))
        if units * self.segments.unit > self.columns_of(account):
            self.segments.begin(request.request_id, self._keys_of(request), units)

    def _use(self, request: Request, end: int) -> None:
        """What other layers remember of a request after so many tokens is used, if it is cached."""
        others = self._books.others
        if self.is_on and others.exist:
            found, tokens = others.find(request, end)
            if tokens == end:
                blocks = [block for of_group in found.blocks for block in of_group]
                others.last_use.use(blocks, self.segments.now())

    def let_copy_if_idle(self, request: Request, account: Account, tokens: int) -> None:
        """Let what the step reads to its eviction stay for others, if that takes only pages that nobody else needs.

        What is evicted is then copied. Else it is evicted in place, layer by layer if it fits no other way.
        """
        plan = account.plan
        if account.is_invalid or plan.prompt is None or account.terms.copies is not None:
            return
        if not account.tokens < plan.prompt.leaves_at <= tokens:
            return
        units = self._units(request, plan.leaves(tokens))
        if not units or self.segments.knows(self._keys_of(request)(units)):
            return
        copying = self._requests.control.copying(
            plan, account.prefill_len, account.borrowed, account.replayed
        )
        if self._is_idle(request, account, account.need_at(tokens, copying)):
            account.set_terms(copying)

    def _is_idle(self, request: Request, account: Account, need: Need) -> bool:
        """Whether an account may take what it needs, and nobody waits for that or is preempted."""
        held, promises = need
        others = self._books.others
        with_blocks = zip(others.pages(others.blocks_to_begin(request)), others.pages(), strict=True)
        beside = [then - now for then, now in with_blocks]
        soon = plus(self._needed_soon(request, account), beside)
        for index, idle in enumerate(self._idle()):
            more = held[index] - account.held[index] + promises[index] - account.promise[index]
            if more + soon[index] > idle:
                return False
        return True

    def _needed_soon(self, request: Request, account: Account) -> list[int]:
        """Pages of each rank that others may need while what is copied is held twice: to begin, or to grow until those
        that begin have been read."""
        unread, pages = self._needed_to_begin(request, account)
        unread += sum(
            other.prefill_len - other.tokens for other in self._requests.accounts.values() if other.is_reading
        )
        steps = STEPS_AHEAD + cdiv(unread, self._requests.control.step_tokens)
        for running in self._requests.accounts.values():
            if running is not account and running.tokens >= running.promised_until:
                for index, count in enumerate(running.counts):
                    tokens = max(running.tokens, count.tokens)
                    pages[index] += count.at(tokens + steps) - count.at(tokens)
        return pages

    def _needed_to_begin(self, request: Request, account: Account) -> tuple[int, list[int]]:
        """Tokens to be read, and pages of each rank, of the first waiting requests, but those that begin with what a
        request leaves."""
        if self._queue_head is None:
            self._queue_head = self._first_waiting()
        keys, units = self._keys_of(request), self._units(request, account.plan.leaves(request.num_tokens))
        unread, pages = 0, [0] * len(self._books.ranks)
        for name, waiting in self._queue_head.items():
            common = min(waiting.units, units)
            if name == request.request_id or (common and waiting.keys(common) == keys(common)):
                continue
            unread += waiting.tokens
            for index, more in enumerate(waiting.pages):
                pages[index] += more
        return unread, pages

    def _first_waiting(self) -> dict[str, Waiting]:
        """Waiting requests by id that this step and the next ones have tokens for."""
        left, found = (1 + STEPS_AHEAD) * self._requests.control.step_tokens, {}
        for request in self._waiting():
            if left <= 0:
                break
            left -= request.num_tokens
            found[request.request_id] = Waiting(
                request.num_tokens,
                self._requests.pages_until_read(request),
                self._keys_of(request),
                self._units_to_find(request),
            )
        return found

    def publish(self, request: Request, account: Account, tokens: int) -> None:
        """Freeze what the step that ends at ``tokens`` completes, before it is evicted or the answer begins."""
        prompt = account.plan.prompt
        end = account.prefill_len if prompt is None else prompt.leaves_at
        if not account.tokens < end <= tokens:
            return
        self.segments.end(request.request_id)
        if not account.is_lasting and account.terms.copies is None:
            return
        before = self.columns_of(account)
        last = self._freeze(request, account, account.plan.leaves(end))
        if last is None:
            return
        self.segments.retain(last, account.is_lasting)
        self._release(account)
        more = [rank.rows * (last.stop - before) for rank in self._books.ranks]
        self._books.hold(account, account.publish(last, more))

    def _freeze(self, request: Request, account: Account, tokens: int) -> Segment | None:
        """Make segments of what a request has read uncompressed, up to so many tokens.

        Returns:
            The last one, None if none was made.
        """
        if account.is_invalid:
            return None
        units, keys, before = self._units(request, tokens), self._keys_of(request), self.columns_of(account)
        stop = units * self.segments.unit
        if stop <= before or self.segments.knows(keys(units)):
            return None
        last = self.segments.store(request.request_id, account.segment, keys, before, stop)
        return last if last is not account.segment else None

    def _release(self, account: Account) -> None:
        """An account does not use the segments any more that it borrows."""
        if account.segment is not None:
            self.segments.release(account.segment, account.is_lasting)

    def detach(self, request: Request, account: Account, untold: TakenBack) -> None:
        """Part an account that ends from the segments that it borrows; what it alone has read stays, if it may.

        Args:
            untold: what the workers were not told of it.
        """
        self.segments.end(request.request_id)
        if request.is_finished() and not untold.is_admission:
            self._cache_beside(request, account)
        self._cached.pop(request.request_id, None)
        for end in self._ends.pop(request.request_id, ()):
            self._use(request, end)
        last = account.segment
        if untold.segments:
            last = self.segments.cancel(untold.segments)
        elif request.is_finished() and account.is_lasting and not untold.is_admission:
            # Steps in flight may have gone on beyond the answer's last token, which is not stored, and have evicted it.
            left = account.plan.leaves_at_end(account.tokens)
            self._freeze(request, account, min(left, request.num_tokens - 1))
        if last is not None:
            self.segments.release(last, account.is_lasting)

    def _cache_beside(self, request: Request, account: Account) -> None:
        """Let others find what other layers remember of a request, where they may go on with it."""
        others = self._books.others
        if self.is_on and others.exist and not account.is_invalid:
            known = min(account.tokens, request.num_tokens, whole_until(account.plan))
            blocks = known // self._block
            if blocks > self._cached[request.request_id]:  # most steps of an answer complete none
                self._cached[request.request_id] = blocks
                others.cache(request, known, self._ends[request.request_id])

    def end_copying(self, account: Account) -> None:
        """An account was evicted on every rank: it borrows nothing of segments any more."""
        self._release(account)
        account.end_copying()
