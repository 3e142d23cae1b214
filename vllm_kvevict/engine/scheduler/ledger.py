"""The scheduler's exact account of pages, and admission by what a request will hold after its eviction.

The ledger stands where vLLM keeps its block manager, and owns nothing: it passes vLLM's calls on to its parts. It knows
how many pages each request holds on each rank, never which: block ids stay empty. Counts are exact because every token
adds one entry to every row, and an eviction is followed by a report of the new counts (see
:class:`vllm_kvevict.cache.counts.PageCount`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy
from vllm.v1.request import Request, RequestStatus

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.messages import Claim, Holdings, Report, StepMessage
from vllm_kvevict.engine.request_options import plan_for
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.adapters import AdapterSlots
from vllm_kvevict.engine.scheduler.admission import AdmissionControl, Found
from vllm_kvevict.engine.scheduler.answers import AnswerLimits
from vllm_kvevict.engine.scheduler.blocks import NoBlocks, SharedBlocks
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.cache_order import CacheOrder
from vllm_kvevict.engine.scheduler.check import verify
from vllm_kvevict.engine.scheduler.extra_tokens import ExtraTokensSlot
from vllm_kvevict.engine.scheduler.gate import Gate
from vllm_kvevict.engine.scheduler.nodes import plus
from vllm_kvevict.engine.scheduler.other_layers import OtherLayers
from vllm_kvevict.engine.scheduler.outbox import Outbox
from vllm_kvevict.engine.scheduler.requests import KeysOf, NextKey, Requests
from vllm_kvevict.engine.scheduler.reserve import Reserve
from vllm_kvevict.engine.scheduler.shared.store import SharedStore
from vllm_kvevict.engine.scheduler.terms import Need
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.bounds import MemoryBounds
from vllm_kvevict.schedules.inputs import HeadDims
from vllm_kvevict.schedules.plan import Admission, Plan
from vllm_kvevict.schedules.reports import ArbiterAnswer


class PageLedger(KVCacheManager):
    """Counts per request and rank behind the interface of vLLM's block manager.

    Attributes:
        ranks: global ranks; whatever is counted for each rank is in their order.
        requests, books, outbox, shared, gate, extra_tokens, limits, adapters, reserve, others, blocks: its parts;
            blocks is None where all layers are evicted.
        ends: requests that can never go on, and how they end; the scheduler sees to it after each step.
    """

    def __init__(
        self,
        *args: Any,
        options: Options,
        control: AdmissionControl,
        head_dims: HeadDims,
        prefix_keys: KeysOf = lambda request, plan: {},
        next_key: NextKey = lambda request, tokens, before: (before, *request.all_token_ids[tokens]),
        blocks_kept: int = 0,
        fewest_read: int = 1,
        most_adapters: int = 0,
        waiting_requests: Callable[[], Iterable[Request]] = tuple,
        tokens_left: Callable[[], int] = lambda: 0,
        **kwargs: Any,
    ):
        """Arguments as of vLLM's own, besides the server's options, who is admitted (:meth:`set_capacity`), the heads
        of a rank, and what its parts say of the rest: :class:`Requests` (``prefix_keys``, ``next_key``,
        ``fewest_read``), :class:`SharedBlocks` (``blocks_kept``, 0 where all layers are evicted),
        :class:`AdapterSlots`, :class:`UncompressedPrefixes` (``waiting_requests``), :class:`Gate` (``tokens_left``).
        """
        super().__init__(*args, **kwargs)
        self.options, self.head_dims = options, head_dims
        self._blocks_kept, self._fewest_read = blocks_kept, fewest_read
        self._waiting_requests, self._tokens_left = waiting_requests, tokens_left
        self._block = kwargs["hash_block_size"]
        self._keys_of: KeysOf = prefix_keys if self.enable_caching else lambda request, plan: {}
        self._next_key = next_key
        self.empty_kv_cache_blocks = NoBlocks(tuple(() for _ in range(self.num_kv_cache_groups)))
        self.ranks: list[int] = []
        self.outbox = Outbox()
        self.adapters = AdapterSlots(most_adapters)
        self.reserve = Reserve(options.reserve_size(self.max_model_len, head_dims))
        self.limits = AnswerLimits()
        self.ends: dict[str, RequestStatus] = {}
        self._found: Found | None = None
        """For the waiting request that vLLM has asked about last."""
        self._begin(control)

    def _begin(self, control: AdmissionControl) -> None:
        """Begin with nothing held and nothing cached.

        Args:
            control: which knows the ranks.
        """
        ranks, kept = control.bounds.ranks, self._blocks_kept
        self.blocks = SharedBlocks(self.block_pool, kept, self.outbox) if kept else None
        self.others = OtherLayers(self, self.blocks, control.bounds, self._block)
        self.books = Books(ranks, self.others)
        self.requests = Requests(self.options, control, self._keys_of, self._next_key, self._fewest_read)
        self.extra_tokens = ExtraTokensSlot(self.requests)
        self.shared = SharedStore(
            self.outbox,
            self.requests,
            self.books,
            self._waiting_requests,
            self.enable_caching,
            self._block,
        )
        self._order = CacheOrder(self, self.blocks, self.books, self.shared) if self.blocks else None
        self.gate = Gate(
            self.requests, self.books, self.shared, self.reserve, self.head_dims, self._tokens_left
        )

    def set_capacity(self, capacities: Mapping[int, RankCapacity]) -> None:
        """Learn the pools' sizes, before the first request. Learning the same again changes nothing.

        Raises:
            ValueError: when a prompt of ``max_model_len`` tokens does not fit.
        """
        ranks, in_order = sorted(capacities), [capacities[rank] for rank in sorted(capacities)]
        if (ranks, in_order) == (self.ranks, list(self.books.ranks)):
            return
        self.ranks = ranks
        bounds = dataclasses.replace(self.bounds, ranks=in_order)
        self._begin(dataclasses.replace(self.requests.control, bounds=bounds))
        longest = plan_for(self.options, self.max_model_len, most_output=1)
        if not bounds.fits(longest, self.max_model_len):
            raise ValueError(
                f"a prompt of --max-model-len {self.max_model_len} tokens does not fit the KV cache of "
                f"{min(capacity.pages for capacity in self.books.ranks)} pages: lower --max-model-len or give the KV "
                "cache more memory"
            )

    @property
    def accounts(self) -> dict[str, Account]:
        """Of requests in flight, by id."""
        return self.requests.accounts

    @property
    def bounds(self) -> MemoryBounds:
        """What requests hold at most."""
        return self.requests.control.bounds

    def plan(self, request: Request) -> Plan:
        """When and how the request is evicted."""
        return self.requests.plan(request)

    # Admission and growth.

    def new_step_starts(self) -> None:
        """Release what earlier steps held for a step only."""
        # First, since vLLM lets nobody begin with a state that was cached after this.
        self.shared.new_step_starts()
        super().new_step_starts()
        self.gate.new_step_starts()

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        """Admit the request if it is new, then let it grow by ``num_new_tokens``; None when it must wait.

        It begins with ``num_new_computed_tokens``, of shared KV, that :meth:`get_computed_blocks` found.

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
                  in each state: borrowed pages are not counted
        promised  reading: what is missing to the prefill's peak; else nothing

        With a lookahead reading goes on until the first tokens of the answer are stored.
        """
        account = self.accounts.get(request.request_id)
        is_new = account is None
        if account is None:
            found = self._found if num_new_computed_tokens else None
            assert (found.tokens if found else 0) == num_new_computed_tokens
            account = self.requests.open(request, num_new_tokens, found)
            if not self._may_begin(request, account):
                return None
        computed = request.num_computed_tokens + num_new_computed_tokens
        tokens = min(computed + num_new_tokens, self.max_model_len)
        need = self.shared.before_growth(request, account, tokens, is_new)
        if need is None:
            if list(self.accounts) == [request.request_id] and not self.awaits_reports:
                # Nobody else has pages to give, so a replay would end up here again.
                self.ends[request.request_id] = RequestStatus.FINISHED_LENGTH_CAPPED
            return None
        blocks: KVCacheBlocks | None = self.empty_kv_cache_blocks
        if self.others.exist:
            step = num_new_tokens, num_new_computed_tokens, new_computed_blocks
            blocks = self._allocate_others(request, account, tokens, is_new, *step, *args, **kwargs)
            need = account.need_at(tokens)  # more, if the prefix that it borrowed from is its own now
        if blocks is not None:
            self._commit(request, account, tokens, need, is_new)
        return blocks

    def _commit(self, request: Request, account: Account, tokens: int, need: Need, is_new: bool) -> None:
        """Let a request have what was found for it, and go on to so many tokens; this cannot fail."""
        if is_new:
            self._admit(request, account)
        self.books.hold(account, need)
        self.shared.advance(request, account, tokens, self.max_model_len)

    def _may_begin(self, request: Request, account: Account) -> bool:
        """Whether a new request is admitted now; one that empty pools could not hold ends instead of waiting."""
        if not self.requests.control.can_ever_fit(account):
            # Only a replay can have become too long, whose client has a part of the answer.
            replay = bool(request.num_output_tokens)
            self.ends[request.request_id] = (
                RequestStatus.FINISHED_LENGTH_CAPPED if replay else RequestStatus.FINISHED_ERROR
            )
            return False
        return self.gate.has_room_for(request, account)

    def _allocate_others(
        self, request: Request, account: Account, tokens: int, is_new: bool, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """Blocks for the layers that are not evicted, for which cached KV goes that may; None if there are too few even
        so. For a new request nothing goes in vain but segments that were used before all that it would take."""
        new = account if is_new else None
        assert self._order is not None
        is_served = not is_new and self.others.has_blocks_for(request, tokens)
        if is_served and self._order.missing_pages(account, tokens) <= 0:
            return self.empty_kv_cache_blocks  # as in most steps
        _, found_tokens, found = args
        self._order.drop_older(request, account, tokens, new, found_tokens, found)
        while True:
            held = zip(self.books.held, account.need_at(tokens)[0], account.held, strict=True)
            pages = [of_all + new - old for of_all, new, old in held]
            promised = self.books.promised if is_new else [0] * len(pages)
            blocks = self.others.allocate(pages, promised, request, *args, **kwargs)
            if blocks is not None or (new and self._lacks_blocks(request, new, plus(pages, promised), *args)):
                return blocks
            if not self.shared.drop_next(new):
                return None

    def _lacks_blocks(self, request: Request, new: Account, pages: list[int], *step: Any) -> bool:
        """Whether other layers have too few blocks for a new request, whatever is dropped.

        Args:
            pages: of each rank that there have to be beside those that can be dropped.
        """
        dropped = self.shared.droppable_pages(new)
        staying = [held - fewer for held, fewer in zip(pages, dropped, strict=True)]
        return self.others.lacks(request, staying, *step)

    def _admit(self, request: Request, account: Account) -> None:
        """Open the request's account for good; the workers hear of it with this step."""
        name, reserved = request.request_id, account.reserved(self.head_dims)
        place = self.reserve.find(reserved) if reserved else None
        account.set_beside(self.others.blocks_beside(request))
        self.requests.admit(request, account)
        self.adapters.acquire(request)
        self.outbox.admit(
            Admission(
                name,
                account.epoch,
                account.plan,
                account.terms.by_layer,
                place,
                *self.shared.numbers_of(account),
                account.tokens,
            )
        )
        if place is not None:
            self.reserve.acquire(name, place, reserved)
        self.limits.limit(request, account, self.bounds, self.max_model_len)
        if account.prefix is not None:
            self.requests.keep(name, account)
        self.shared.begin(request, account)

    def must_wait(self, request_id: str) -> bool:
        """As of :attr:`Account.must_wait`."""
        account = self.accounts.get(request_id)
        return account is not None and account.must_wait

    # Shared KV.

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """What a waiting request begins with: blocks of layers that are not evicted, and tokens, of which more is kept
        until the next question. Last the tokens at which other layers should keep what they remember, 0 for none: the
        evicted ones have these already.

        vLLM sets ``max_cache_hit_length`` where it stores more than KV of each token, which eviction refuses; then
        nothing is taken from the cache.
        """
        is_asked = max_cache_hit_length is None and self.prefix_cache_lookup_enabled(request)
        # Thousands may wait for a place or a prefix. vLLM asks next whether they have to, and then nothing else.
        is_asked = is_asked and not (self.gate.is_closed and self.gate.is_closed_to(request))
        is_asked = is_asked and not self.shared.is_awaited(request)
        blocks, self._found, longest = self.empty_kv_cache_blocks, None, 0
        if is_asked:
            blocks, self._found, longest = self._find(request)
        tokens = self._found.tokens if self._found else 0
        return blocks, tokens, longest if tokens < longest else 0

    def _find(self, request: Request) -> tuple[KVCacheBlocks, Found | None, int]:
        """What a waiting request begins with: blocks of other layers, the rest, and how many tokens it would be if only
        evicted layers counted."""
        found = self.shared.find(request)
        longest = found.tokens if found else 0
        while found is not None and self.others.exist:
            if found.prefix is not None and (snapshot := found.prefix.snapshot):
                return self.create_kv_cache_blocks(snapshot.blocks), found, longest
            blocks, tokens = self.others.find(request, found.tokens)
            if tokens == found.tokens:
                return blocks, found, longest
            found = self.shared.find(request, tokens)
        return self.empty_kv_cache_blocks, found, longest

    def reset_prefix_cache(self) -> bool:
        """As of :meth:`SharedStore.invalidate`."""
        is_unused = self.shared.invalidate()
        self.others.invalidate()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True  # the hit rate in vLLM's log begins anew
        return is_unused

    def clear_kept(self) -> None:
        """Let replays find out anew what they keep, and so how long their answers may be.

        Where all that run are preempted for a reset, the weights may be others: what was kept says nothing any more.
        """
        self.requests.clear_kept()
        self.limits.lift()

    def estimate_cached_tokens(self, request: Request) -> int:
        """Tokens of a request that another one with the same prefix need not compute."""
        account = self.accounts.get(request.request_id)
        return 0 if account is None else self.shared.tokens_of(account)

    # What the workers are told, and say.

    def next_message(self, scheduled: Mapping[str, int]) -> StepMessage:
        """What the workers must know before the step that was scheduled.

        Args:
            scheduled: its tokens by request.
        """
        most_pages = dict(zip(self.ranks, self.books.held, strict=True)) if self.options.check else None
        return self.outbox.flush(self.extra_tokens.end_step(scheduled), most_pages)

    def on_report(self, rank: int, request_id: str, report: Report) -> None:
        """Take over a rank's counts after an eviction; of a request that is gone or older, there are none."""
        index = self.ranks.index(rank)
        count = PageCount.from_residues(report.pages, report.tokens, report.residues)
        account = self.accounts.get(request_id)
        is_gone = account is None or account.epoch != report.epoch
        prefix = self.shared.on_report(request_id, index, count, report, is_gone)
        if account is None or is_gone:
            return
        need, phase = account.on_report(index, count, prefix), account.plan.phase_of(report.tokens)
        if need is not None:
            self.books.hold(account, need)
        if phase is None or phase.of_answer:
            return
        self.shared.after_report(request_id, account, prefix)
        if account.pending is None:
            self.requests.keep(request_id, account)
            request = self.requests.in_flight[request_id]
            self.limits.limit(request, account, self.bounds, self.max_model_len)

    def on_claims(self, request_id: str, claims: Sequence[Claim]) -> None:
        """Answer what all ranks said of an eviction; they hear of it before their next step."""
        account = self.accounts.get(request_id)
        if account is not None and account.epoch == claims[0].epoch and account.pending is not None:
            said = account.pending.on_claims(claims, self.books.ranks[0])
            self.outbox.answer(request_id, ArbiterAnswer(account.epoch, said))

    @property
    def awaits_reports(self) -> bool:
        """Whether a dispatched eviction has not been reported yet, so that pages will come back by themselves."""
        return self.shared.awaits_reports or any(account.pending for account in self.accounts.values())

    def verify(self, rank: int, actual: Holdings) -> None:
        """Compare with what a rank really holds at the end of its step. Raises RuntimeError if that differs."""
        verify(rank, self.ranks.index(rank), actual, self.accounts, self.books, self.shared)

    # The rest of the block manager's interface.

    @property
    def usage(self) -> float:
        """As of :attr:`Books.usage`."""
        return self.books.usage(self.shared.in_use())

    def free(self, request: Request) -> None:
        """Close the account of a request that finished, was aborted or preempted; workers hear with the next step."""
        self._close(request)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> list:
        self._close(request)
        return super().pop_blocks_for_free(request)

    def _close(self, request: Request) -> None:
        name = request.request_id
        untold, account = self.outbox.take_back(name), self.requests.close(request)
        if account is not None:
            self.adapters.release(request)
            self.shared.detach(request, account, untold)
            self.reserve.release(name)
            self.books.close(account)
        if request.is_finished():
            self.limits.remove(name)
            self.ends.pop(name, None)
            self.shared.remove_waiting(name)
            self.requests.remove(name)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Nothing to hash: that is the store's."""

    def take_kv_cache_block_copies(self) -> tuple[list[KVCacheBlockCopy], list[KVCacheBlock]]:
        """Blocks that workers copy before the step, and those that have a reference until they are told."""
        copies, retained = super().take_kv_cache_block_copies()
        for pair in self.others.snapshots.due_copies():
            copies.append(KVCacheBlockCopy(*(block.block_id for block in pair)))
            retained += pair
        return copies, retained

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        if self.others.exist:
            super().remove_skipped_blocks(*args, **kwargs)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        return super().get_blocks(request_id) if self.others.exist else self.empty_kv_cache_blocks
