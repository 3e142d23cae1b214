"""What the blocks of layers with a sliding window, or a state, hold in a simulation: a request sees there nothing but
its own."""

import sys
from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SlidingWindowManager
from vllm.v1.request import Request

from vllm_kvevict.engine.scheduler.ledger import PageLedger


@dataclass(frozen=True)
class Written:
    """Of a block: by which admission of which request, before which reset, and of which tokens.

    Attributes:
        until: tokens of that request up to which nothing of it was evicted; what is remembered behind them depends on
            what was left.
        end: tokens that its last one was written after.
    """

    owner: tuple[str, int]
    resets: int
    until: int
    hashes: list
    end: int


def _is_cached(manager: object) -> bool:
    return isinstance(manager, SlidingWindowManager) or getattr(manager, "mamba_cache_mode", None) == "align"


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
        for name, count in output.num_scheduled_tokens.items() if managers else ():
            request = scheduler.requests.get(name)
            if request is not None:
                for manager in managers:
                    self._see_and_write(manager, ledger, request, count, resets)

    def _see_and_write(
        self,
        manager: SlidingWindowManager | MambaManager,
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
        sees = max(0, first - 1 if is_state else first + 1 - manager.sliding_window)
        for index in range(sees // size, cdiv(first, size)):
            assert not blocks[index].is_null, f"{owner} has no block of tokens from {index * size} on"
            found = self._written[group, blocks[index].block_id]
            assert not is_state or found.end == first, (
                f"{owner} goes on at {first} with the state at {found.end}"
            )
            self._check(found, owner, index, size, request, admitted)
        until = ledger.plan(request).next_eviction(0) or sys.maxsize
        written = Written(owner, admitted, until, list(request.block_hashes), first + count)
        last = cdiv(first + count, size)
        for index in range(last - 1 if is_state else first // size, last):
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
