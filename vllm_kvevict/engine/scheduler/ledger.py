"""The scheduler's exact account of pages, and admission by what a request will hold after its eviction.

The ledger stands where vLLM keeps its block manager. It knows how many pages each request holds on each rank,
never which: block ids stay empty. Counts are exact because every token adds one entry to every row, and an
eviction is followed by a report of the new counts (see :class:`vllm_kvevict.cache.counts.PageCount`).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import RequestStatus

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.messages import Claim, Holdings, Report, StepMessage
from vllm_kvevict.engine.scheduler.account import Account, Need
from vllm_kvevict.engine.scheduler.adapters import AdapterPlaces
from vllm_kvevict.engine.scheduler.admission import AdmissionControl
from vllm_kvevict.engine.scheduler.blocks import SharedBlocks
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.compressed import CompressedPrefixes
from vllm_kvevict.engine.scheduler.extra_tokens import Turn
from vllm_kvevict.engine.scheduler.other_layers import OtherLayers
from vllm_kvevict.engine.scheduler.outbox import Outbox
from vllm_kvevict.engine.scheduler.prefixes import Prefix, PrefixCache
from vllm_kvevict.engine.scheduler.queue_head import QueueHead
from vllm_kvevict.engine.scheduler.reserve import Reserve
from vllm_kvevict.engine.scheduler.segments import Segment, SegmentCache
from vllm_kvevict.engine.scheduler.uncompressed import UncompressedPrefixes
from vllm_kvevict.schedules.base import MOST_SEGMENTS, PARTS, RankCapacity
from vllm_kvevict.schedules.bounds import last_that
from vllm_kvevict.schedules.plan import Admission, Plan
from vllm_kvevict.schedules.sums import HeadDims

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.kv_eviction")


def _holds(count: PageCount, capacity: RankCapacity, tokens: int) -> bool:
    """Whether a rank can hold so many tokens of a request, if it holds nothing else."""
    return count.at(tokens) <= capacity.pages


class NoBlocks(KVCacheBlocks):
    """Blocks without ids: workers place pages themselves."""

    def get_block_ids(self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None) -> Any:
        # Never None (the V1 runner asserts on it when a request resumes), and fresh lists (it extends them).
        return tuple([] for _ in (self.blocks if group_ids is None else group_ids))


class PageLedger(CompressedPrefixes, UncompressedPrefixes, OtherLayers):
    """Counts per request and rank behind the interface of vLLM's block manager."""

    def __init__(
        self,
        *args: Any,
        options: Options,
        control: AdmissionControl,
        head_dims: HeadDims,
        prefix_key: Callable[["Request", Plan], Hashable | None] = lambda request, plan: None,
        blocks_kept: int = 0,
        fewest_read: int = 1,
        most_adapters: int = 0,
        **kwargs: Any,
    ):
        """Arguments as of vLLM's own, besides the server's options, who is admitted (:meth:`set_capacity`), the
        heads of a rank, by what a request finds a cached prefix, blocks that are kept for layers that are not
        evicted (0 where all are), the tokens that a waiting request computes at least in its first step, and the LoRA
        adapters that a step may use at most."""
        super().__init__(*args, **kwargs)
        self.outbox = Outbox()
        self.blocks = SharedBlocks(self.block_pool, blocks_kept, self.outbox) if blocks_kept else None
        self.options = options
        self.control = control
        self.prefix_key = prefix_key
        self.fewest_read = fewest_read
        self.adapters = AdapterPlaces(most_adapters)
        self.has_w_o = self.has_rotary = True
        self.head_dims = head_dims
        self.empty_kv_cache_blocks = NoBlocks(tuple(() for _ in range(self.num_kv_cache_groups)))
        self.ranks: list[int] = []
        self.books = Books([])
        self.accounts: dict[str, Account] = {}
        self.requests: dict[str, Request] = {}
        self.turn = Turn(self.accounts, self.requests)
        self.kept: dict[str, list[PageCount]] = {}
        """Of requests evicted for the last time, what each rank keeps of them; a replay keeps it again."""
        self.limited: dict[str, tuple[Request, int]] = {}
        """Requests whose answers end where the memory does, and the tokens that they asked for."""
        self.ends: dict[str, RequestStatus] = {}
        """Requests that can never go on, and how they end; the scheduler sees to it after each step."""
        self.reserve = Reserve(options.reserve_size(self.max_model_len, head_dims))
        self._reserve_is_closed = False
        """Whether a request of this step found no room in the reserve; nobody behind it in the queue overtakes it."""
        self.block = kwargs["hash_block_size"]
        self.unit = math.lcm(self.block, options.page_size)
        """Tokens that uncompressed prefixes are a multiple of."""
        self._make_caches([])
        self.waiting_requests: Callable[[], Iterable[Request]] = tuple
        """Those that are not admitted and that there are seats for, in their order; the scheduler says which."""
        self.tokens_left: Callable[[], int] = lambda: 0
        """Tokens of the step that is being scheduled that nobody takes so far; the scheduler says how many."""
        self.queue_head: QueueHead | None = None
        self._plans: dict[str, Plan] = {}
        self._keys: dict[str, Hashable | None] = {}
        self._until_read: dict[str, tuple[int, list[int]]] = {}
        self._awaited: set[Hashable] = set()
        """By what is found what requests wait for that vLLM has asked about in this step."""
        self._awaited_by: dict[str, Hashable] = {}
        """The same by waiting request, of the last step that asked."""

    def set_capacity(self, capacities: Mapping[int, RankCapacity]) -> None:
        """Learn the pools' sizes, before the first request. Learning the same again changes nothing.

        Raises:
            ValueError: when a prompt of ``max_model_len`` tokens does not fit.
        """
        ranks, in_order = sorted(capacities), [capacities[rank] for rank in sorted(capacities)]
        if (ranks, in_order) == (self.ranks, list(self.capacities)):
            return
        self.ranks = ranks
        bounds = dataclasses.replace(self.bounds, ranks=in_order)
        self.control = dataclasses.replace(self.control, bounds=bounds)
        self.books = Books(in_order)
        self._make_caches(bounds.ranks)
        if not bounds.fits(self.options.plan(self.max_model_len), self.max_model_len):
            raise ValueError(
                f"a prompt of --max-model-len {self.max_model_len} tokens does not fit the KV cache of "
                f"{min(capacity.pages for capacity in self.capacities)} pages: lower --max-model-len or give the KV "
                "cache more memory"
            )

    def _make_caches(self, ranks: Sequence[RankCapacity]) -> None:
        """Begin with nothing cached."""
        numbers = itertools.count(1)
        most = min((rank.most_prefixes for rank in ranks), default=0)
        self.prefixes = PrefixCache(len(ranks), most, numbers.__next__, self.outbox)
        unit = self.unit // self.options.page_size
        part = -(-min((rank.columns for rank in ranks), default=0) // PARTS)
        longest = unit * max(1, -(-part // unit))
        self.segments = SegmentCache(unit, longest, MOST_SEGMENTS, numbers.__next__, self.outbox)

    # Admission and growth.

    def new_step_starts(self) -> None:
        """Who was evicted in an earlier step leaves the reserve; in that same step nobody else may have its place."""
        super().new_step_starts()
        self.segments.new_step_starts()
        self._reserve_is_closed = False
        self.queue_head = None
        self._awaited.clear()
        for name in list(self.reserve.spans):
            if not self.accounts[name].reserved(self.head_dims):
                self.reserve.give_back(name)

    def allocate_slots(
        self,
        request: "Request",
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        """Admit the request if it is new, then let it grow by ``num_new_tokens``; None when it must wait.

        It begins with ``num_new_computed_tokens``, of a cached prefix, that :meth:`get_computed_blocks` found.

        waiting --admitted--> reading --eviction's step--> unreported --reports of all ranks--> decoding
           |  ^                  |                             |                                   |
           |  +----preempted-----+-----------------------------+-----------------------------------+
           |                                                                                       |
           +--can never fit--> ended with an error       ended by length <--nobody has pages to give

        Prompts that are repeated (kvzip) are repeated between reading and unreported, with no rows of their own.

        held      reading: all that was read, or the bound of a prefill that is evicted as it goes
                  repeating: the whole prompt, and from its last step of reading on the rows of one repeat
                  unreported: what its last step before the reports may hold at most, with copies of what it
                              keeps if its pages stay with segments
                  decoding: exact, a page more in each row every page_size tokens
                  in each state: pages borrowed from a cached prefix or from segments are not counted
        promised  reading: what is missing to the prefill's peak; else nothing
        """
        name = request.request_id
        account = self.accounts.get(name)
        is_new = account is None
        if account is None:
            account = self._open(request, num_new_tokens, num_new_computed_tokens > 0)
            if not self._may_begin(request, account):
                return None
        computed = request.num_computed_tokens + num_new_computed_tokens
        tokens = min(computed + num_new_tokens, self.max_model_len)
        if account.is_reading:
            self.let_copy_if_idle(request, account, tokens)
        need = self._make_room(account, tokens, is_new)
        if need is None:
            if list(self.accounts) == [name] and not self.awaits_reports:
                # Nobody else has pages to give, so a replay would end up here again.
                self.ends[name] = RequestStatus.FINISHED_LENGTH_CAPPED
            return None
        blocks = self.allocate_others(
            request, account, need, is_new, num_new_tokens, num_new_computed_tokens, *args, **kwargs
        )
        if blocks is None:
            return None
        if is_new:
            self._admit(request, account)
        self.books.hold(account, need)
        if account.is_reading:
            self.leave_segments(request, account, tokens)
        self._advance(name, account, tokens)
        return blocks

    def room_for_drafts(self) -> list[int]:
        """Pages of each rank that draft tokens may take in the next step: those that nobody holds or is promised, less
        those that the requests that answer need for one token each."""
        room = self.books.free(self.with_others(self.cached_pages))
        for account in self.accounts.values():
            if not account.is_reading:
                more = account.growth(account.tokens, account.tokens + 1)
                room = [free - pages for free, pages in zip(room, more, strict=True)]
        return room

    def _advance(self, name: str, account: Account, tokens: int) -> None:
        """Note that a step computes a request up to so many tokens, and evicts it if that is due."""
        position = account.plan.next_eviction(account.tokens)
        if position is not None and position <= tokens:
            chunks = account.plan.schedule.chunks(account.plan.config, tokens, self.max_model_len)
            account.await_reports(tokens, chunks, self.capacities)
        account.advance(tokens)
        if position == account.plan.evict_at == tokens:
            self.store_prefix(name, account)

    def _admit(self, request: "Request", account: Account) -> None:
        """Open the request's account for good; the workers hear of it with this step."""
        name = request.request_id
        self.accounts[name], self.requests[name] = account, request
        self.adapters.take(request)
        if self.queue_head is not None:
            self.queue_head.remove(name)
        prefix = account.prefix
        self.outbox.admit(
            Admission(
                name,
                account.epoch,
                account.plan,
                account.terms.by_layer,
                account.reserved_at,
                None if prefix is None else prefix.number,
                account.segment.parts(self.columns_of(account)) if account.segment else (),
                account.tokens if account.segment else 0,
            )
        )
        if account.reserved_at is not None:
            self.reserve.take(name, account.reserved_at, account.reserved(self.head_dims))
        self._limit_answer(name, account)
        if prefix is not None:
            self.prefixes.borrow(prefix, name)
            self.kept[name] = account.counts
            return
        self.begin_segments(request, account)
        if (key := self.key_of(request)) is not None and self.prefixes.find(key) is None:
            self.prefixes.begin(key, account.plan.evict_at or 0, (name, account.epoch))

    def _may_begin(self, request: "Request", account: Account) -> bool:
        """Whether a new request is admitted now; one that empty pools could not hold ends instead of waiting."""
        if not self.control.can_ever_fit(account):
            # Only a replay can have become too long, whose client has a part of the answer.
            replay = bool(request.num_output_tokens)
            self.ends[request.request_id] = (
                RequestStatus.FINISHED_LENGTH_CAPPED if replay else RequestStatus.FINISHED_ERROR
            )
            return False
        return self._has_room_for(request, account)

    def would_admit(self, request: "Request", num_new_tokens: int) -> bool:
        """Whether a waiting request would be admitted now, beginning with so many tokens."""
        account = self._open(request, num_new_tokens)
        if not self._has_room_for(request, account):
            return False
        freed, others = self._droppable_pages(), self.pages_of_others()
        more = self.pages_of_others(self.blocks_to_begin(request))
        spare = [pages + now - then for pages, now, then in zip(freed, others, more, strict=True)]
        return self._fits(account, account.need_at(num_new_tokens), spare)

    def _has_room_for(self, request: "Request", new: Account) -> bool:
        """Whether there is a place in the reserve, if the request needs one, and pages beside the others."""
        place = None
        if reserved := new.reserved(self.head_dims):
            place = self.reserve.find(reserved)
            if place is None:
                return False
        new.take_place(place, self.blocks_beside(request))
        prefixes = self.prefixes.pinned(new.prefix)
        reading, answering = self.with_others_later(prefixes, self.accounts.values(), new)
        in_use = self.with_segments(reading, self.segments.with_user(new.segment))
        staying = new.segment if new.is_lasting else None
        lasting = self.with_segments(answering, self.segments.with_lasting(staying))
        running: list[Account] = []
        less_urgent: list[Account] = []
        for name, account in self.accounts.items():
            is_less_urgent = self.requests[name].priority > request.priority
            (less_urgent if is_less_urgent else running).append(account)
        return self.control.shortage(new, running, in_use, lasting, less_urgent) is None

    def awaits_reserve(self, request: "Request") -> bool:
        """Whether a waiting request must be passed over until there is room in the reserve.

        One that begins with a compressed prefix needs none, nor do most that this step can read whole.

        Others go on meanwhile. Of those that need the reserve nobody overtakes, lest long prompts never have room:
        vLLM asks in the order of its queue, and leaves out whom it cannot begin anyway.
        """
        plan, most = self.plan(request), min(self.tokens_left(), self.bounds.longest_step)
        needed = plan.reserved(self.head_dims, plan.evict_at is not None and plan.evict_at <= most)
        if not needed or self.cached_prefix(request) is not None:
            return False
        if self.reserve.find(needed) is None:
            self._reserve_is_closed = True
        return self._reserve_is_closed

    def _limit_answer(self, name: str, account: Account) -> None:
        """End the answer where the memory ends, once it is known what is kept: vLLM checks ``max_tokens``.

        The request could not grow beyond that even alone, so without the limit it would be preempted for ever.
        """
        if not account.is_evicted:
            return
        request, last = self.requests[name], min(account.last_token, self.max_model_len)
        most = last
        for count, capacity in zip(account.counts, self.capacities, strict=True):
            if count.at(max(last, count.tokens)) > capacity.pages:
                most = min(most, last_that(partial(_holds, count, capacity), count.tokens, last))
        if most < last:
            # vLLM looks at the limit when a token comes: there must be one more.
            limit = max(request.num_output_tokens + 1, most - account.prompt_len + 1)
            self.limited.setdefault(name, (request, request.max_tokens))
            request.max_tokens = limit
            account.end_answer(limit)

    def _make_room(self, account: Account, tokens: int, is_new: bool) -> Need | None:
        """Drop cached prefixes until every rank has room for the account at ``tokens`` tokens; None if none has.

        For a new request nothing is dropped in vain. Before one that runs is preempted, all prefixes go that nobody
        uses; one that somebody does only if that is enough.

        Returns:
            What the account needs then: more, if the prefix that it borrowed from is its own now.
        """
        need = account.need_at(tokens)
        if self._fits(account, need):
            return need
        untouchable, kept = (account.prefix, account.segment) if is_new else (None, None)
        is_enough = self._fits(account, need, self._droppable_pages(untouchable, kept))
        if is_new and not is_enough:
            return None
        # Uncompressed prefixes go first: a compressed one is worth as many tokens with a part of the pages.
        self.segments.drop_columns(self._columns_for(self._lacking_pages(account, need)), kept)
        if self._fits(account, need):
            return need
        while (prefix := self._next_to_drop(untouchable, is_enough)) is not None:
            self.drop_prefix(prefix)
            need = account.need_at(tokens)
            if self._fits(account, need):
                return need
        return None

    def _next_to_drop(self, untouchable: Prefix | None, even_borrowed: bool) -> Prefix | None:
        """The cached prefix that goes next to make room, but for one; it frees something."""
        for prefix in self.prefixes.droppable(self.outbox.admitted):
            if prefix.is_borrowed and not even_borrowed:
                return None  # those that nobody borrows came before
            if prefix is not untouchable and any(map(prefix.freed, range(len(self.ranks)))):
                return prefix
        return None

    def _droppable_pages(self, untouchable: Prefix | None = None, kept: Segment | None = None) -> list[int]:
        """Pages of each rank that cached prefixes and segments would free, apart from one."""
        pages = self.prefixes.droppable_pages(self.outbox.admitted, untouchable)
        return self.with_segments(pages, self.segments.droppable(kept))

    def _columns_for(self, pages: Sequence[int]) -> int:
        """Columns of segments that have so many pages of each rank."""
        return max(
            (cdiv(more, rank.rows) for more, rank in zip(pages, self.capacities, strict=True)), default=0
        )

    def _fits(self, account: Account, need: Need, freed: Sequence[int] | None = None) -> bool:
        """Whether every rank has room for what the account needs, if ``freed`` pages of each rank are free besides."""
        lacking = self._lacking_pages(account, need)
        return all(lack <= free for lack, free in zip(lacking, freed or [0] * len(lacking), strict=True))

    def _lacking_pages(self, account: Account, need: Need) -> list[int]:
        """As of :meth:`Books.lacking`."""
        return self.books.lacking(account, need, self.with_others(self.cached_pages))

    def _open(self, request: "Request", num_new_tokens: int, with_prefix: bool = False) -> Account:
        prefix = self.cached_prefix(request) if with_prefix else None
        if prefix is not None:
            return self.control.open_with(
                prefix,
                self.plan(request),
                request.num_prompt_tokens,
                request.max_tokens,
                prefill_len=request.num_tokens,
                preemptions=request.num_preemptions,
            )
        shared = self.shared_prefix(request) if with_prefix else None
        assert shared is not None or not with_prefix
        return self.open_alone(request, num_new_tokens, shared)

    # Cached prefixes.

    def get_computed_blocks(
        self, request: "Request", max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """How many tokens a waiting request need not compute: all of its compressed prefix, or what segments have.

        vLLM sets ``max_cache_hit_length`` where it stores more than KV of each token, which eviction refuses; then
        nothing is taken from the cache.
        """
        tokens = 0
        is_asked = max_cache_hit_length is None and self.prefix_cache_lookup_enabled(request)
        # Thousands may wait for one prefix. vLLM asks next whether they have to, and then nothing else.
        if is_asked and not self.is_awaited(request):
            prefix = self.cached_prefix(request)
            shared = self.shared_prefix(request) if prefix is None else None
            if prefix is not None:
                tokens = prefix.tokens
            elif shared is not None:
                tokens = shared[1] * self.options.page_size
        return self.empty_kv_cache_blocks, tokens, 0

    def is_awaited(self, request: "Request") -> bool:
        """Whether somebody else is reading what a waiting request begins with.

        Thousands may wait for the same, so that is found out once in a step: vLLM asks in its order, and who comes
        later waits for the same reader with all the more reason.
        """
        name = request.request_id
        if self._awaited_by.get(name) in self._awaited:
            return True
        key = self._awaited_key(request) if self.prefix_cache_lookup_enabled(request) else None
        if key is None:
            self._awaited_by.pop(name, None)
            return False
        self._awaited_by[name] = key
        self._awaited.add(key)
        return True

    def _awaited_key(self, request: "Request") -> Hashable | None:
        """By what is found what a waiting request begins with and somebody else is reading; None if nobody is."""
        key = self.key_of(request)
        prefix = self.prefixes.find(key)
        if prefix is None:
            return self.awaited_segments(request)
        if prefix.is_ready:
            return None
        self._hurry(prefix, request)
        return prefix.number

    def _hurry(self, prefix: Prefix, waiting: "Request") -> None:
        """Whoever reads a prefix is as urgent as who waits for it, lest others in between keep both waiting."""
        producer = self.requests.get(prefix.producer[0])
        if producer is not None:
            producer.priority = min(producer.priority, waiting.priority)

    def reset_prefix_cache(self) -> bool:
        """Let no further request begin with a prefix that is cached now, or with anything that a request reads or
        writes which is admitted now.

        Returns:
            Whether no request uses what was cached; else the pages of such go when those requests end.
        """
        for account in self.accounts.values():
            account.become_stale()
        self.prefixes.forget()
        self.segments.forget()
        self.drop_forgotten()
        in_use = self.uses_prefixes or self.segments.pinned > 0
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True  # the hit rate in vLLM's log begins anew
        return not in_use

    def forget_kept(self) -> None:
        """Let replays find out anew what they keep, and so how long their answers may be.

        Where all that run are preempted for a reset, the weights may be others: what was kept says nothing any more.
        """
        self.kept.clear()
        for request, max_tokens in self.limited.values():
            request.max_tokens = max_tokens
        self.limited.clear()

    # What the workers are told, and say.

    def next_message(self, scheduled: Mapping[str, int]) -> StepMessage:
        """What the workers must know before the step that was scheduled.

        Args:
            scheduled: its tokens by request.
        """
        most_pages = dict(zip(self.ranks, self.held_pages, strict=True)) if self.options.check else None
        return self.outbox.take(self.turn.end_step(scheduled), most_pages)

    def on_report(self, rank: int, request_id: str, report: Report) -> None:
        """Take over a rank's counts after an eviction; of a request that is gone or older, there are none."""
        index = self.ranks.index(rank)
        count = PageCount.from_residues(report.pages, report.tokens, report.residues)
        prefix = self.prefixes.produced_by((request_id, report.epoch)) if report.last else None
        if prefix is not None:
            self.prefixes.on_report(prefix, index, count, count.rows - report.residues[0])
        account = self.accounts.get(request_id)
        if account is None or account.epoch != report.epoch:
            self.drop_forgotten()
            return
        if report.last:
            need = account.on_last_report(index, count, 0 if prefix is None else prefix.lent[index])
        else:
            need = account.on_report(index, count)
        self.books.hold(account, need)
        if prefix is not None and prefix.is_ready:
            account.borrow(prefix)
            self.prefixes.borrow(prefix, request_id)
            self.drop_forgotten()
        if report.last and account.is_evicted:
            self.end_copying(account)
            self.kept[request_id] = account.counts
            self._limit_answer(request_id, account)

    def on_claims(self, request_id: str, claims: Sequence[Claim]) -> None:
        """Answer what all ranks said of an eviction; they hear of it before their next step."""
        account = self.accounts.get(request_id)
        if account is None or account.epoch != claims[0].epoch:
            return
        self.outbox.answer(request_id, account.on_claims(claims, self.capacities[0]))

    def must_wait(self, request_id: str) -> bool:
        """As of :attr:`Account.must_wait`."""
        account = self.accounts.get(request_id)
        return account is not None and account.must_wait

    @property
    def awaits_reports(self) -> bool:
        """Whether a dispatched eviction has not been reported yet, so that pages will come back by themselves."""
        return (
            any(account.awaits_reports for account in self.accounts.values()) or self.prefixes.awaits_reports
        )

    def verify(self, rank: int, actual: Holdings) -> None:
        """Compare with what a rank really holds.

        Args:
            actual: at the end of the rank's step.

        Raises:
            RuntimeError: naming the first request whose counts differ.
        """
        index = self.ranks.index(rank)
        for request_id, (epoch, tokens, pages) in actual.requests.items():
            account = self.accounts.get(request_id)
            if account is None or account.epoch != epoch:
                continue
            count = account.counts[index]
            if account.is_bounded and account.awaits_report_of(index):
                continue
            # A step in flight may evict by now what this one did not.
            expected = count.at(tokens) if tokens >= count.tokens else pages
            if expected != pages:
                raise RuntimeError(
                    f"kv eviction check: rank {rank} holds {pages} pages of request {request_id} at {tokens} "
                    f"tokens, the ledger expects {expected}"
                )
        self._verify_prefixes(rank, actual.prefixes)
        total = sum(account.held[index] for account in self.accounts.values())
        if total != self.books.used[index]:
            raise RuntimeError(
                f"kv eviction check: ledger of rank {rank} sums to {total}, not {self.books.used[index]}"
            )

    def _verify_prefixes(self, rank: int, actual: Mapping[int, int]) -> None:
        """Compare cached prefixes with what a rank really holds: pages by number."""
        index = self.ranks.index(rank)
        for prefix in self.prefixes.all_stored:
            pages = actual.get(prefix.number, 0)
            if prefix.is_ready and pages != prefix.held[index]:
                raise RuntimeError(
                    f"kv eviction check: rank {rank} holds {pages} pages of cached prefix {prefix.number}, the ledger "
                    f"expects {prefix.held[index]}"
                )
        for segment in self.segments:
            expected, pages = segment.columns * self.capacities[index].rows, actual.get(segment.number, 0)
            # A step in flight may make it.
            is_yet_to_come = not pages and rank not in segment.seen_on
            if pages != expected and not is_yet_to_come:
                raise RuntimeError(
                    f"kv eviction check: rank {rank} holds {pages} pages of segment {segment.number}, the ledger "
                    f"expects {expected}"
                )
            if pages:
                segment.seen_on.add(rank)

    # The rest of the block manager's interface.

    @property
    def usage(self) -> float:
        """Share of the pool in use on the fullest rank; cached prefixes that no request uses are not."""
        cached = self.with_others(self.with_segments(self.prefixes.in_use(), self.segments.pinned))
        pairs = zip(self.books.used, cached, self.capacities, strict=True)
        return max(((used + prefixes) / capacity.pages for used, prefixes, capacity in pairs), default=0.0)

    @property
    def held_pages(self) -> list[int]:
        """Pages of each rank that requests and cached prefixes hold, promises apart."""
        return [sum(pair) for pair in zip(self.books.used, self.cached_pages, strict=True)]

    def free(self, request: "Request") -> None:
        """Forget a request that finished, was aborted or preempted; workers hear of it with the next step."""
        self._forget(request)
        super().free(request)

    def _forget(self, request: "Request") -> None:
        name = request.request_id
        if request.is_finished():
            self.kept.pop(name, None)
            self.limited.pop(name, None)
            self.ends.pop(name, None)
            self._plans.pop(name, None)
            self._keys.pop(name, None)
            self._until_read.pop(name, None)
            self._awaited_by.pop(name, None)
        if self.requests.pop(name, None) is not None:
            self.adapters.give_back(request)
        untold = self.outbox.take_back(name)
        account = self.accounts.pop(name, None)
        if account is not None:
            self.leave_prefix(name, account, untold)
            self.part_from_segments(request, account, untold)
        self.reserve.give_back(name)
        if account is not None:
            self.books.close(account)

    def pop_blocks_for_free(self, request: "Request") -> list:
        self._forget(request)
        return super().pop_blocks_for_free(request)

    def estimate_cached_tokens(self, request: "Request") -> int:
        """Tokens of a request that another one with the same prefix need not compute."""
        account = self.accounts.get(request.request_id)
        if account is None or account.is_stale:
            return 0
        if account.prefix is not None:
            return account.prefix.tokens
        return self.columns_of(account) * self.options.page_size

    def cache_blocks(self, request: "Request", num_computed_tokens: int) -> None:
        """Nothing to hash: what of a request is cached was settled when it was admitted."""
