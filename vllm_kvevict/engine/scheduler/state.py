"""What the parts of the ledger share: accounts, counts of pages, and the two kinds of cached prefixes."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.admission import AdmissionControl
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.outbox import Outbox
from vllm_kvevict.engine.scheduler.prefixes import PrefixCache
from vllm_kvevict.engine.scheduler.queue_head import QueueHead
from vllm_kvevict.engine.scheduler.segments import Segment, SegmentCache
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.bounds import MemoryBounds
from vllm_kvevict.schedules.plan import Plan

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.kv_eviction")


class LedgerState:
    """The ledger's books; :class:`vllm_kvevict.engine.scheduler.ledger.PageLedger` makes them.

    Attributes:
        ranks: global ranks; whatever is counted for each rank is in their order.
        books: pages that requests hold and are promised.
        accounts: of requests in flight, by id.
        requests: those in flight, by id.
        kept: of requests evicted for the last time, what each rank keeps of them; a replay keeps it again.
        outbox: what the workers are told with the next step.
        prefixes, segments: what is cached, compressed and not.
        prefix_key: by what a request finds a compressed prefix.
        waiting_requests: those that are not admitted and that there are seats for, in their order; the scheduler says
            which.
        queue_head: the first of them, as they were when this step began; None until somebody asks.
        fewest_read: tokens that a waiting request computes at least in its first step.
        block, unit: tokens of a block that vLLM hashes, and those that uncompressed prefixes are a multiple of.
    """

    options: Options
    control: AdmissionControl
    max_model_len: int
    enable_caching: bool
    has_w_o: bool
    has_rotary: bool
    ranks: list[int]
    books: Books
    accounts: dict[str, Account]
    requests: dict[str, "Request"]
    kept: dict[str, list[PageCount]]
    outbox: Outbox
    prefixes: PrefixCache
    segments: SegmentCache
    prefix_key: Callable[["Request", Plan], Hashable | None]
    waiting_requests: Callable[[], Iterable["Request"]]
    queue_head: QueueHead | None
    fewest_read: int
    block: int
    unit: int
    _plans: dict[str, Plan]
    _keys: dict[str, Hashable | None]
    _until_read: dict[str, tuple[int, list[int]]]

    @property
    def bounds(self) -> MemoryBounds:
        """What requests hold at most."""
        return self.control.bounds

    @property
    def capacities(self) -> Sequence[RankCapacity]:
        """What each rank can hold, in the order of ``ranks``."""
        return self.control.bounds.ranks

    def plan(self, request: "Request") -> Plan:
        """When and how the request is evicted."""
        plan = self._plans.get(request.request_id)
        if plan is None:
            params = request.sampling_params
            plan = self.options.plan(request.num_prompt_tokens, params.extra_args if params else None)
            if plan.evict_at is not None and (lacking := self._lacking(plan.config)):
                logger.warning_once(
                    "KV eviction: kv_eviction=%s needs %s, which this model lacks, so such requests are kept whole",
                    plan.config.policy,
                    lacking,
                )
                plan = Plan(plan.config, None)
            self._plans[request.request_id] = plan
        return plan

    def _lacking(self, config: EvictionConfig) -> str | None:
        """What a policy needs of the model and the workers do not find in it."""
        if "w_o" in config.needs and not self.has_w_o:
            return "unquantized output projections"
        if "rotary" in config.needs and not self.has_rotary:
            return "a rotary embedding that depends on the position alone and is the same in every layer"
        return None

    def pages_until_read(self, request: "Request") -> list[int]:
        """The most pages of each rank that a waiting request holds until it is read, not layer by layer."""
        tokens, pages = self._until_read.get(request.request_id, (0, []))
        if tokens != request.num_tokens:
            pages = self.bounds.until_read(self.plan(request), request.num_tokens, False)
            self._until_read[request.request_id] = request.num_tokens, pages
        return pages

    def open_alone(
        self, request: "Request", num_new_tokens: int, begins_with: tuple[Segment, int] | None = None
    ) -> Account:
        """The account of a request that reads all of its prompt, but for the segments that it begins with."""
        return self.control.open(
            self.plan(request),
            num_new_tokens,
            request.num_prompt_tokens,
            request.max_tokens,
            prefill_len=request.num_tokens,
            preemptions=request.num_preemptions,
            replayed=self.kept.get(request.request_id),
            begins_with=begins_with,
        )

    def with_segments(self, pages: Sequence[int], columns: int) -> list[int]:
        """Pages of each rank together with those of so many columns of segments."""
        return [more + rank.rows * columns for more, rank in zip(pages, self.capacities, strict=True)]

    @property
    def cached_pages(self) -> list[int]:
        """Pages of each rank that cached prefixes and segments hold."""
        return self.with_segments(self.prefixes.held, self.segments.columns)
