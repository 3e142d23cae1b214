"""The scheduler's exact account of pages, and admission by what a request will hold after its eviction.

The ledger stands where vLLM keeps its block manager. It knows how many pages each request holds on each rank,
never which: block ids stay empty. Counts are exact because every token adds one entry to every row, and an
eviction is followed by a report of the new counts (see :class:`vllm_kvevict.cache.counts.PageCount`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.request import RequestStatus

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.memory import can_recycle
from vllm_kvevict.engine.messages import LayerBudgets, LayerWeights, Report
from vllm_kvevict.engine.scheduler.reserve import Reserve
from vllm_kvevict.policies import layer_budgets
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.bounds import last_that, prefill_peak
from vllm_kvevict.schedules.plan import Plan

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


PATIENCE = 3
"""Preemptions after which a request runs only where it cannot be preempted again."""


@dataclass
class Account:
    """One admitted request: what it holds, what is promised to its prefill, what it may hold at its end.

    Attributes:
        request: vLLM's own.
        recycles: whether this admission is evicted layer by layer.
        prefill_len: tokens to read: the prompt, and the answer so far if the request was preempted.
        counts: of each rank, exact up to the next eviction; until an eviction is reported, a bound.
        tokens: stored once the steps dispatched so far are done.
        held, promise: pages of each rank that it holds, and that are kept free for the rest of its prefill.
        peak: the most that the prefill holds.
        unreported: ranks whose report of a dispatched eviction is still to come.
        undecided: whether its layers' budgets are still to be decided.
    """

    plan: Plan
    request: "Request"
    recycles: bool
    prefill_len: int
    counts: list[PageCount]
    tokens: int = 0
    held: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    promise: list[int] = field(default_factory=list)
    unreported: set[int] = field(default_factory=set)
    undecided: bool = False

    @property
    def last_token(self) -> int:
        """Tokens it will have stored when its answer is as long as it may be; the answer's last one is not stored."""
        return self.request.num_prompt_tokens + self.request.max_tokens - 1

    @property
    def is_evicted(self) -> bool:
        """Whether its counts are final and exact: it was evicted for the last time, or never is."""
        evict_at = self.plan.evict_at
        return evict_at is None or (not self.unreported and self.counts[0].tokens >= evict_at)

    @property
    def bounded(self) -> bool:
        """Whether it holds less during its prefill than all that was read."""
        return self.recycles or not self.plan.schedule.holds_whole_prompt

    def pages_at(self, tokens: int) -> list[int]:
        """The most pages that the request holds on each rank during a step that ends at ``tokens`` tokens."""
        if self.recycles and self.tokens < (self.plan.evict_at or 0) <= tokens:
            return list(self.peak)
        probe = self.plan.probe if tokens in self.plan.cuts else 0
        return [count.at(tokens + probe) for count in self.counts]

    def promised_at(self, tokens: int, held: list[int]) -> list[int]:
        """Pages that the prefill is still promised on each rank when it holds ``held`` at ``tokens`` tokens."""
        if tokens >= self.prefill_len:
            return [0] * len(held)
        return [max(0, peak - pages) for peak, pages in zip(self.peak, held, strict=True)]


class PageLedger(KVCacheManager):
    """Counts per request and rank behind the interface of vLLM's block manager."""

    def __init__(
        self,
        *args: Any,
        options: Options,
        max_num_batched_tokens: int,
        longest_step: int,
        num_stages: int,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.longest_step = longest_step
        self.num_stages = num_stages
        self.has_w_o = True
        self.options = options
        self.max_num_batched_tokens = max_num_batched_tokens
        self.empty_kv_cache_blocks = NoBlocks(tuple(() for _ in range(self.num_kv_cache_groups)))
        self.ranks: list[int] = []
        self.capacities: list[RankCapacity] = []
        self.used: list[int] = []
        self.promised: list[int] = []
        self.accounts: dict[str, Account] = {}
        self.kept: dict[str, list[PageCount]] = {}
        """Of requests evicted for the last time, what each rank keeps of them; a replay keeps it again."""
        self.ends: dict[str, RequestStatus] = {}
        """Requests that can never go on, and how they end; the scheduler sees to it after each step."""
        self.reserve = Reserve(self.max_model_len)
        self._plans: dict[str, Plan] = {}
        self.admitted: list[Plan] = []
        """Plans of this step's admissions, drained into the message to the workers."""
        self.layer_budgets: dict[str, LayerBudgets] = {}
        """Budgets decided since the last step, drained likewise."""

    def set_capacity(self, capacities: Mapping[int, RankCapacity]) -> None:
        """Learn the pools' sizes, before the first request.

        Raises:
            ValueError: when a prompt of ``max_model_len`` tokens does not fit.
        """
        self.ranks = sorted(capacities)
        self.capacities = [capacities[rank] for rank in self.ranks]
        self.used = [0] * len(self.ranks)
        self.promised = [0] * len(self.ranks)
        plan = self.options.plan("", 1, self.max_model_len, None)
        at_once = self.max_model_len <= self.longest_step
        if not self.fits(plan, self.max_model_len, at_once and can_recycle(plan, self.num_stages)):
            raise ValueError(
                f"a prompt of --max-model-len {self.max_model_len} does not fit the pool of "
                f"{min(capacity.pages for capacity in self.capacities)} pages: lower --max-model-len or give the KV "
                "cache more memory"
            )

    # Admission and growth.

    def new_step_starts(self) -> None:
        """Who was evicted in an earlier step leaves the reserve; in that same step nobody else may have its place."""
        super().new_step_starts()
        for name, span in list(self.reserve.spans.items()):
            if self.accounts[name].tokens >= len(span):
                self.reserve.give_back(name)

    def allocate_slots(
        self, request: "Request", num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """Admit the request if it is new, then let it grow by ``num_new_tokens``; None when it must wait."""
        admitted = self.accounts.get(request.request_id)
        account = admitted or self._open(request, num_new_tokens)
        if admitted is None and not (self._can_fit(account) and self._may_begin(account)):
            return None
        tokens = min(request.num_computed_tokens + num_new_tokens, self.max_model_len)
        # A prefill grows into what it was promised, a decode into what nobody was.
        held = account.pages_at(tokens)
        promise = account.promised_at(tokens, held)
        if not self._fits(account, held, promise):
            if list(self.accounts) == [request.request_id] and not self.awaits_reports:
                # Nobody else has pages to give, so a replay would end up here again.
                self.ends[request.request_id] = RequestStatus.FINISHED_LENGTH_CAPPED
            return None
        if admitted is None:
            self.accounts[request.request_id] = account
            self.admitted.append(account.plan)
            self.reserve.take(account.plan)
            self._limit_answer(account)
        self._hold(account, held, promise)
        position = account.plan.next_eviction(account.tokens)
        if position is not None and position <= tokens:
            self._await_reports(account, held, tokens)
        account.tokens = tokens
        return self.empty_kv_cache_blocks

    def _await_reports(self, account: Account, held: list[int], tokens: int) -> None:
        """Note that the step up to ``tokens`` evicts the request, which will hold ``held`` until that is reported."""
        account.unreported = set(range(len(self.ranks)))
        account.undecided = account.plan.schedule.decides_across_stages(self.num_stages)
        if account.bounded:
            # Until the reports come, all that is known is that rows may end anywhere in a page.
            account.counts = [
                PageCount.from_residues(pages, tokens, [capacity.rows] + [0] * (self.options.page_size - 1))
                for pages, capacity in zip(held, self.capacities, strict=True)
            ]

    def _can_fit(self, account: Account) -> bool:
        """Whether empty pools could hold the request until it is read; if not, it ends instead of waiting for ever."""
        request = account.request
        if all(peak <= capacity.pages for peak, capacity in zip(account.peak, self.capacities, strict=True)):
            return True
        if not account.recycles and account.plan.recycles and self._fits_layer_by_layer(account):
            return True
        # Only a replay can have become too long, whose client has a part of the answer.
        replay = bool(request.num_output_tokens)
        self.ends[request.request_id] = (
            RequestStatus.FINISHED_LENGTH_CAPPED if replay else RequestStatus.FINISHED_ERROR
        )
        return False

    def _fits_layer_by_layer(self, account: Account) -> bool:
        """Whether the request would fit if all that is evicted of it were read in one step."""
        at_once = account.plan.evict_at is not None and account.plan.evict_at <= self.longest_step
        peaks = self._peaks(account.request, account.plan, recycles=True)
        return at_once and all(
            peak <= capacity.pages for peak, capacity in zip(peaks, self.capacities, strict=True)
        )

    def _limit_answer(self, account: Account) -> None:
        """End the answer where the memory ends, once it is known what is kept: vLLM checks ``max_tokens``.

        The request could not grow beyond that even alone, so without the limit it would be preempted for ever.
        """
        if not account.is_evicted:
            return
        request, last = account.request, min(account.last_token, self.max_model_len)
        most = last
        for count, capacity in zip(account.counts, self.capacities, strict=True):
            if count.at(max(last, count.tokens)) > capacity.pages:
                most = min(most, last_that(partial(_holds, count, capacity), count.tokens, last))
        if most < last:
            # vLLM looks at the limit when a token comes: there must be one more.
            request.max_tokens = max(request.num_output_tokens + 1, most - request.num_prompt_tokens + 1)

    def would_admit(self, request: "Request", num_new_tokens: int) -> bool:
        """Whether a waiting request would be admitted now, beginning with so many tokens."""
        account = self._open(request, num_new_tokens)
        if not self._may_begin(account):
            return False
        held = account.pages_at(num_new_tokens)
        return self._fits(account, held, account.promised_at(num_new_tokens, held))

    def _may_begin(self, new: Account) -> bool:
        """Whether there is a place in the reserve, if the request needs one, and room for it beside the others."""
        place = self.reserve.find(new.plan.reserved)
        if place is None:
            return False
        new.plan = dataclasses.replace(new.plan, reserved_at=place)
        return self._admits(new)

    def _fits(self, account: Account, held: list[int], promise: list[int]) -> bool:
        """Whether every rank has room for the account to hold and be promised this much."""
        for rank, capacity in enumerate(self.capacities):
            used = self.used[rank] + held[rank] - account.held[rank]
            # A rank that kept more than its share of a replay is promised more than there was room for.
            if used > capacity.pages:
                return False
            more = held[rank] + promise[rank] - account.held[rank] - account.promise[rank]
            if (
                more > 0
                and used + self.promised[rank] + promise[rank] - account.promise[rank] > capacity.pages
            ):
                return False
        return True

    def plan(self, request: "Request") -> Plan:
        """What will happen to the request in its present or next admission."""
        plan = self._plans.get(request.request_id)
        if plan is None:
            params = request.sampling_params
            plan = self.options.plan(
                request.request_id,
                request.num_preemptions + 1,
                request.num_prompt_tokens,
                params.extra_args if params else None,
            )
            if plan.evict_at is not None and "w_o" in plan.config.needs and not self.has_w_o:
                logger.warning_once(
                    "kv_eviction=%s needs unquantized output projections, which this model lacks: such requests are "
                    "kept whole",
                    plan.config.policy,
                )
                plan = dataclasses.replace(plan, evict_at=None)
            plan = dataclasses.replace(plan, recycles=can_recycle(plan, self.num_stages))
            self._plans[request.request_id] = plan
        return plan

    def recycles(self, plan: Plan, num_new_tokens: int) -> bool:
        """Whether a request that begins with so many tokens is evicted layer by layer."""
        return plan.recycles and num_new_tokens == plan.evict_at

    def fits(self, plan: Plan, tokens: int, recycles: bool) -> bool:
        """Whether the pools, if empty, could hold what ``tokens`` tokens need until they are read."""
        size = self.options.page_size
        return all(
            prefill_peak(plan, tokens, capacity, size, recycles) <= capacity.pages
            for capacity in self.capacities
        )

    def _open(self, request: "Request", num_new_tokens: int) -> Account:
        plan = self.plan(request)
        recycles = self.recycles(plan, num_new_tokens)
        return Account(
            plan,
            request,
            recycles,
            prefill_len=request.num_tokens,
            counts=[PageCount.start(capacity.rows, self.options.page_size) for capacity in self.capacities],
            held=[0] * len(self.ranks),
            promise=[0] * len(self.ranks),
            peak=self._peaks(request, plan, recycles),
        )

    def _peaks(self, request: "Request", plan: Plan, recycles: bool) -> list[int]:
        """The most pages that reading the request takes on each rank."""
        size, tokens = self.options.page_size, request.num_tokens
        kept = self.kept.get(request.request_id)
        if kept is None or plan.evict_at is None:
            return [prefill_peak(plan, tokens, capacity, size, recycles) for capacity in self.capacities]
        # What a replay holds after its eviction is no guess.
        until = [prefill_peak(plan, plan.evict_at, capacity, size, recycles) for capacity in self.capacities]
        return [
            max(peak, count.at(max(tokens, count.tokens))) for peak, count in zip(until, kept, strict=True)
        ]

    def _admits(self, new: Account) -> bool:
        """Whether every rank has room now for the prefill's peak, and at the end for what will be held."""
        if not self.accounts:
            return True
        prefills = [a for a in self.accounts.values() if a.tokens < a.prefill_len]
        steps = cdiv(
            new.prefill_len + sum(a.prefill_len - a.tokens for a in prefills), self.max_num_batched_tokens
        )
        everyone = [*self.accounts.values(), new]
        patient = new.request.num_preemptions >= PATIENCE
        ends = [self._expected_end(account, patient) for account in everyone]
        for rank, capacity in enumerate(self.capacities):
            if new.peak[rank] + self._held_soon(rank, steps) > capacity.pages:
                return False
            if sum(map(self._held_finally, everyone, repeat(rank), ends)) > capacity.pages:
                return False
        return True

    def _held_soon(self, rank: int, steps: int) -> int:
        """Pages held or promised when the prefills in flight and the next one are done, ``steps`` from now."""
        return sum(
            a.held[rank] + a.promise[rank]
            if a.tokens < a.prefill_len
            else a.counts[rank].at(a.tokens + steps)
            for a in self.accounts.values()
        )

    def _expected_end(self, account: Account, patient: bool = False) -> int:
        """Tokens an account is expected to have at its end; as many as it may have if it was preempted too often."""
        request = account.request
        produced = max(account.tokens, account.prefill_len) - request.num_prompt_tokens
        # Who has outlived the reserve is expected to double: each wrong guess makes the next preemption rarer.
        reserve = max(self.options.decode_reserve, 2 * produced)
        if patient or request.num_preemptions >= PATIENCE:
            reserve = request.max_tokens
        end = max(account.tokens, request.num_prompt_tokens + min(request.max_tokens, reserve))
        return min(end, self.max_model_len)

    def _held_finally(self, account: Account, rank: int, end: int) -> int:
        """Pages an account is expected to hold at ``end`` tokens: exact once evicted, else from its budget."""
        count, evict_at = account.counts[rank], account.plan.evict_at
        if evict_at is None or (count.tokens >= evict_at and rank not in account.unreported):
            return count.at(end)
        kept = self.kept.get(account.request.request_id)
        if kept is not None:
            return kept[rank].at(max(end, kept[rank].tokens))
        entries = account.plan.config.budget_for(evict_at) + end - evict_at
        # Half a page of slack per row is the mean of what ragged rows leave unfilled.
        return count.rows * (2 * entries + self.options.page_size) // (2 * self.options.page_size)

    def _hold(self, account: Account, held: list[int], promise: list[int]) -> None:
        for rank, pages in enumerate(held):
            self.used[rank] += pages - account.held[rank]
            self.promised[rank] += promise[rank] - account.promise[rank]
        account.held, account.promise = held, promise

    # What the workers say.

    def on_report(self, rank: int, request_id: str, report: Report) -> None:
        """Take over a rank's counts after an eviction; of a request that is gone or older, there are none."""
        account = self.accounts.get(request_id)
        if account is None or account.plan.epoch != report.epoch:
            return
        index = self.ranks.index(rank)
        count = PageCount.from_residues(report.pages, report.tokens, report.residues)
        account.counts[index] = count
        account.unreported.discard(index)
        if report.last:
            # The rest of a replay is promised in exact pages from here on.
            account.peak[index] = count.at(max(account.prefill_len, account.tokens))
        held = list(account.held)
        held[index] = count.at(account.tokens)  # tokens may be ahead of the report: steps in flight
        self._hold(account, held, account.promised_at(account.tokens, held))
        if report.last and account.is_evicted:
            self.kept[request_id] = account.counts
            self._limit_answer(account)

    def on_weights(self, request_id: str, weights: LayerWeights) -> None:
        """Decide layer budgets from the weights of all layers; the workers apply them before their next step."""
        account = self.accounts.get(request_id)
        if account is None or account.plan.epoch != weights.epoch:
            return
        account.undecided = False
        n = account.plan.evict_at
        assert n is not None
        budgets = layer_budgets(account.plan.config, weights.weights, n)
        self.layer_budgets[request_id] = LayerBudgets(weights.epoch, budgets)

    def must_wait(self, request_id: str) -> bool:
        """Whether a request was evicted in a step in flight and must not go on before more is known of that.

        That is its layers' budgets; or, where it never held all that was read, what it holds.
        """
        account = self.accounts.get(request_id)
        return account is not None and (account.undecided or (account.bounded and bool(account.unreported)))

    @property
    def awaits_reports(self) -> bool:
        """Whether a dispatched eviction has not been reported yet, so that pages will come back by themselves."""
        return any(account.unreported for account in self.accounts.values())

    def verify(self, rank: int, actual: Mapping[str, tuple[int, int, int]]) -> None:
        """Compare with what a rank really holds.

        Args:
            actual: per request id (epoch, tokens stored, pages held) at the end of the rank's step.

        Raises:
            RuntimeError: naming the first request whose counts differ.
        """
        index = self.ranks.index(rank)
        for request_id, (epoch, tokens, pages) in actual.items():
            account = self.accounts.get(request_id)
            if account is None or account.plan.epoch != epoch:
                continue
            count = account.counts[index]
            # A step in flight may evict by now what this one did not.
            expected = count.at(tokens) if tokens >= count.tokens else pages
            if expected != pages:
                raise RuntimeError(
                    f"kv eviction check: rank {rank} holds {pages} pages of request {request_id} at {tokens} "
                    f"tokens, the ledger expects {expected}"
                )
        total = sum(account.held[index] for account in self.accounts.values())
        if total != self.used[index]:
            raise RuntimeError(
                f"kv eviction check: ledger of rank {rank} sums to {total}, not {self.used[index]}"
            )

    # The rest of the block manager's interface.

    @property
    def usage(self) -> float:
        """Share of the pool in use on the fullest rank."""
        shares = (used / capacity.pages for used, capacity in zip(self.used, self.capacities, strict=True))
        return max(shares, default=0.0)

    def free(self, request: "Request") -> None:
        """Forget a request that finished, was aborted or preempted; workers hear of it with the next step."""
        if request.is_finished():
            self.kept.pop(request.request_id, None)
            self.ends.pop(request.request_id, None)
        self._plans.pop(request.request_id, None)
        self.layer_budgets.pop(request.request_id, None)
        account = self.accounts.pop(request.request_id, None)
        self.reserve.give_back(request.request_id)
        if account is not None:
            nothing = [0] * len(self.ranks)
            self._hold(account, nothing, nothing)
            self.admitted = [plan for plan in self.admitted if plan is not account.plan]

    def pop_blocks_for_free(self, request: "Request") -> list:
        self.free(request)
        return []

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        return self.empty_kv_cache_blocks

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.empty_kv_cache_blocks.get_block_ids()

    def estimate_cached_tokens(self, request: "Request") -> int:
        return 0

    def take_new_block_ids(self) -> list[int]:
        return []

    def cache_blocks(self, request: "Request", num_computed_tokens: int) -> None:
        """Nothing to hash: evicted KV is never shared."""

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to skip: every layer keeps full attention."""
