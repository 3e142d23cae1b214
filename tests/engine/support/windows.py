"""What the blocks of layers with a sliding window or a state, or of a draft model, hold in a simulation: a request sees
there nothing but its own."""

from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import (
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.request import Request

from vllm_kvevict.engine.layers import keeps_all
from vllm_kvevict.engine.scheduler.ledger import PageLedger
from vllm_kvevict.schedules.plan import Plan
from vllm_kvevict.schedules.registry import schedule_of


@dataclass(frozen=True)
class Written:
    """Of a block: by which admission of which request, before which reset, and of which tokens.

    Attributes:
        hashes, tokens, plan: of that request. What is remembered behind an eviction depends on what was left.
        end: tokens that its last one was written after.
    """

    owner: tuple[str, int]
    resets: int
    hashes: list
    tokens: list
    plan: Plan
    end: int


def _evicted_before(plan: Plan, end: int) -> list[tuple]:
    """How requests with a plan were evicted before so many tokens."""
    return [
        (part.begins, part.end, part.config.policy, part.config.items, positions)
        for part in plan.parts
        if (positions := [x for x in part.positions if x < end])
    ]


def _is_cached(manager: SingleTypeKVCacheManager) -> bool:
    is_window = isinstance(manager, SlidingWindowManager) or keeps_all(manager.kv_cache_spec)
    return is_window or getattr(manager, "mamba_cache_mode", None) == "align"


class WindowBlocks:
    """The contents of all blocks with which a window, or a state, may begin."""

    def __init__(self) -> None:
        self._written: dict[tuple[int, int], Written] = {}
        self._admitted: dict[tuple[str, int], int] = {}
        """Resets before a request was admitted."""
        self.shared = 0
        """Blocks that requests saw and others had written."""

    def step(self, scheduler: Scheduler, output: SchedulerOutput, resets: int) -> None:
        """All requests of a step see what lies before it in their windows or states, and write behind that."""
        ledger = scheduler.kv_cache_manager
        assert isinstance(ledger, PageLedger)
        managers = list(filter(_is_cached, ledger.coordinator.single_type_managers))
        pages = {block.block_id for block in ledger.blocks.as_pages} if ledger.blocks else set()
        for manager in managers:
            for blocks in manager.req_to_blocks.values():
                assert pages.isdisjoint(block.block_id for block in blocks), "a block is of windows and pages"
        copies = [(x.src_block_id, x.dst_block_id) for x in output.kv_cache_block_copies or ()]
        assert not {x for x, _ in copies} & {x for _, x in copies}, "copies of a step are made at once"
        for source, copy in copies:
            for group in (x.kv_cache_group_id for x in managers):
                if (group, source) in self._written:
                    self._written[group, copy] = self._written[group, source]
        for name, count in output.num_scheduled_tokens.items() if managers else ():
            request = scheduler.requests.get(name)
            if request is not None:
                for manager in managers:
                    self._see_and_write(manager, ledger, request, count, resets)

    def _see_and_write(
        self,
        manager: SingleTypeKVCacheManager,
        ledger: PageLedger,
        request: Request,
        count: int,
        resets: int,
    ) -> None:
        owner = request.request_id, request.num_preemptions
        admitted = self._admitted.setdefault(owner, resets)
        first, group, size = (
            request.num_computed_tokens - count,
            manager.kv_cache_group_id,
            manager.block_size,
        )
        blocks = manager.req_to_blocks[request.request_id]
        is_state = isinstance(manager, MambaManager)
        window = getattr(manager, "sliding_window", first + 1)  # layers of a draft model see all
        sees = max(0, first - 1 if is_state else first + 1 - window)
        for index in range(sees // size, cdiv(first, size)):
            assert not blocks[index].is_null, f"{owner} has no block of tokens from {index * size} on"
            found = self._written[group, blocks[index].block_id]
            assert not is_state or found.end == first, (
                f"{owner} goes on at {first} with the state at {found.end}"
            )
            if found.owner != owner:
                self._check(found, owner, min(first, (index + 1) * size), size, request, ledger.plan(request))
                assert found.resets == admitted, f"{owner} begins with a block read before a reset"
        tokens = list(request.all_token_ids)
        hashes, plan = list(request.block_hashes), ledger.plan(request)
        written = Written(owner, admitted, hashes, tokens, plan, first + count)
        last = cdiv(first + count, size)
        for index in range(last - 1 if is_state else first // size, last):
            self._written[group, blocks[index].block_id] = written

    def _check(
        self, found: Written, owner: tuple[str, int], end: int, size: int, request: Request, plan: Plan
    ) -> None:
        self.shared += 1
        what, whole = f"{owner} begins with tokens of {found.owner} up to {end}", end // size
        assert found.hashes[:whole] == request.block_hashes[:whole], f"{what}, who has others"
        assert found.tokens[:end] == list(request.all_token_ids[:end]), f"{what}, who has others"
        assert _evicted_before(found.plan, end) == _evicted_before(plan, end), f"{what}, evicted before"


def check_repeat(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """The repeat of a prompt sees what other layers remember of that, and changes nothing that anybody holds."""
    ledger, extra = scheduler.kv_cache_manager, output.kv_connector_metadata.extra
    assert isinstance(ledger, PageLedger)
    if ledger.blocks is None or extra is None:
        return
    request = scheduler.requests[extra.request_id]
    if not schedule_of(ledger.plan(request).part_of(extra.start)).repeats_prompt:
        return  # such a model has no probes
    (repeat,) = (new for new in output.scheduled_new_reqs if new.req_id == extra.name)
    first, end = (
        repeat.num_computed_tokens,
        repeat.num_computed_tokens + output.num_scheduled_tokens[extra.name],
    )
    managers = ledger.coordinator.single_type_managers
    held = {block.block_id for x in managers for blocks in x.req_to_blocks.values() for block in blocks}
    held |= {block.block_id for block in ledger.blocks.as_pages} | {ledger.block_pool.null_block.block_id}
    for manager in managers:
        ids = repeat.block_ids[manager.kv_cache_group_id]
        own = [block.block_id for block in manager.req_to_blocks[extra.request_id]]
        if isinstance(manager, MambaManager):
            assert (own[-1], ids[0]) in output.kv_cache_block_copies, "it has no copy of a state"
            assert len(ids) == (cdiv(end, manager.block_size) if _is_cached(manager) else 1)
        elif isinstance(manager, SlidingWindowManager):
            size = manager.block_size
            sees, ends = max(0, first + 1 - manager.sliding_window) // size, cdiv(first, size)
            assert 0 not in ids[sees:ends] and ids[sees:ends] == own[sees:ends], "it sees another window"
            ids = ids[ends:]
            assert len(ids) == cdiv(end, size) - ends, "it has too few blocks"
        elif keeps_all(manager.kv_cache_spec):
            stored = min(end + ledger.bounds.most_drafts, ledger.max_model_len)
            assert ids == [0] * cdiv(stored, manager.block_size), (
                "a draft model stores what is computed twice"
            )
            continue
        assert held.isdisjoint(ids), "it computes in blocks that are in use"
