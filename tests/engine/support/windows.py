"""What the blocks of layers with a sliding window hold in a simulation: a request sees there nothing but its own."""

import sys
from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SlidingWindowManager
from vllm.v1.request import Request

from vllm_kvevict.engine.scheduler.ledger import PageLedger
from vllm_kvevict.schedules.registry import schedule_of


@dataclass(frozen=True)
class Written:
    """Of a block: by which admission of which request, before which reset, and of which tokens.

    Attributes:
        until: tokens of that request up to which nothing of it was evicted; what windows remember behind them depends
            on what was left.
    """

    owner: tuple[str, int]
    resets: int
    until: int
    hashes: list


class WindowBlocks:
    """The contents of all blocks with which a window may begin."""

    def __init__(self) -> None:
        self._written: dict[tuple[int, int], Written] = {}
        self._admitted: dict[tuple[str, int], int] = {}
        """Resets before a request was admitted."""
        self.shared = 0
        """Blocks that requests saw and others had written."""

    def step(self, scheduler: Scheduler, output: SchedulerOutput, resets: int) -> None:
        """All requests of a step see what lies before it in their windows, and write behind that."""
        ledger = scheduler.kv_cache_manager
        assert isinstance(ledger, PageLedger)
        managers = [x for x in ledger.coordinator.single_type_managers if isinstance(x, SlidingWindowManager)]
        pages = {block.block_id for block in ledger.blocks.as_pages} if ledger.blocks else set()
        for manager in managers:
            for blocks in manager.req_to_blocks.values():
                assert pages.isdisjoint(block.block_id for block in blocks), "a block is of windows and pages"
        for name, count in output.num_scheduled_tokens.items() if managers else ():
            request = scheduler.requests.get(name)
            if request is not None:
                for manager in managers:
                    self._see_and_write(manager, ledger, request, count, resets)

    def _see_and_write(
        self, manager: SlidingWindowManager, ledger: PageLedger, request: Request, count: int, resets: int
    ) -> None:
        owner = request.request_id, request.num_preemptions
        admitted = self._admitted.setdefault(owner, resets)
        first, group, size = (
            request.num_computed_tokens - count,
            manager.kv_cache_group_id,
            manager.block_size,
        )
        blocks = manager.req_to_blocks[request.request_id]
        sees = max(0, first + 1 - manager.sliding_window)
        for index in range(sees // size, cdiv(first, size)):
            assert not blocks[index].is_null, f"{owner} has no block of tokens from {index * size} on"
            self._check(self._written[group, blocks[index].block_id], owner, index, size, request, admitted)
        until = ledger.plan(request).next_eviction(0) or sys.maxsize
        written = Written(owner, admitted, until, list(request.block_hashes))
        for index in range(first // size, cdiv(first + count, size)):
            self._written[group, blocks[index].block_id] = written

    def _check(
        self, found: Written, owner: tuple[str, int], index: int, size: int, request: Request, admitted: int
    ) -> None:
        if found.owner == owner:
            return
        self.shared += 1
        what = f"{owner} begins with block {index} of {found.owner}"
        assert found.hashes[: index + 1] == request.block_hashes[: index + 1], f"{what}, who has other tokens"
        assert found.resets == admitted, f"{what}, read before a reset"
        assert (index + 1) * size <= found.until, f"{what}, evicted before"


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
            assert [(own[-1], ids[0])] == output.kv_cache_block_copies, "it has no copy of a state"
        elif isinstance(manager, SlidingWindowManager):
            size = manager.block_size
            sees, ends = max(0, first + 1 - manager.sliding_window) // size, cdiv(first, size)
            assert 0 not in ids[sees:ends] and ids[sees:ends] == own[sees:ends], "it sees another window"
            ids = ids[ends:]
            assert len(ids) == cdiv(end, size) - ends, "it has too few blocks"
        assert held.isdisjoint(ids), "it computes in blocks that are in use"
