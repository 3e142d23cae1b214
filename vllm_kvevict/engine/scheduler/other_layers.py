"""The memory of models of which only some layers are evicted: the others have vLLM's blocks and managers.

Owns which blocks are pages (:mod:`vllm_kvevict.engine.scheduler.blocks`), and gives either side what it needs: there
are always blocks for the pages that requests hold.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.request import Request

from vllm_kvevict.engine.layers import is_evicted, keeps_all
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.admission import PATIENCE
from vllm_kvevict.engine.scheduler.blocks import SharedBlocks
from vllm_kvevict.engine.scheduler.last_use import LastUse
from vllm_kvevict.engine.scheduler.snapshots import Snapshot, Snapshots
from vllm_kvevict.schedules.bounds import MemoryBounds


class OtherLayers:
    """Shares the memory out between pages and the blocks of other layers, as either needs it.

    Args:
        blocks: which ones are pages; None where all layers are evicted, and all memory is pages for good.
        block: tokens of one of vLLM's blocks.

    Attributes:
        snapshots: what other layers remember of compressed prefixes.
        last_use: of what they remember of others.
    """

    def __init__(
        self, manager: KVCacheManager, blocks: SharedBlocks | None, bounds: MemoryBounds, block: int
    ):
        self._manager, self._blocks, self._block = manager, blocks, block
        self._drafts = bounds.most_drafts
        self._drafting = [
            x for x in manager.coordinator.single_type_managers if blocks and keeps_all(x.kv_cache_spec)
        ]
        """Of a draft model's layers, which keep all tokens."""
        others = [x for x in manager.coordinator.single_type_managers if not is_evicted(x.kv_cache_spec)]
        self._all_draft = len(others) == len(self._drafting)
        """Whether there are no others but these."""
        self.snapshots, self.last_use = Snapshots(manager), LastUse(manager.block_pool)
        self._padding = 0 if blocks is None else blocks.of_others
        """Blocks that are taken for good: no request holds any yet."""
        self._pages_per_block = [rank.pages // blocks.most if blocks else 0 for rank in bounds.ranks]
        self._in_flight = bounds.num_stages + bounds.is_asynchronous
        """Steps that may be in flight."""

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return self._blocks is not None

    def pages(self, more: int = 0) -> list[int]:
        """Pages of each rank that there cannot be, since other layers hold the blocks.

        Args:
            more: blocks that they are taken to hold besides.
        """
        nothing = [0] * len(self._pages_per_block)
        return nothing if self._blocks is None else self._with_blocks(nothing, self._blocks.of_others + more)

    def together_later(
        self,
        while_read: Sequence[int],
        at_end: Sequence[int],
        accounts: Collection[Account],
        request: Request,
        new: Account,
        end_of: Callable[[Account], int],
    ) -> tuple[list[int], list[int]]:
        """Pages of each rank at two moments, together with those that there cannot be then: while ``request`` is read
        beside these accounts, and when all answers end.

        Windows that will grow while answers are written count only where somebody was preempted too often: to leave
        room for all of them costs more than a rare preemption. What a draft model stores grows with each token, and
        counts as far as answers are expected to go.

        Args:
            new: its account.
            end_of: tokens that an account is expected to have at its end.
        """
        if self._blocks is None:
            return list(while_read), list(at_end)
        while_new_is_read, afterwards = self.blocks_beside(request)
        soon, later = self._padding + while_new_is_read, self._padding + afterwards
        for account in accounts:
            soon += account.beside[0] if account.is_reading else account.beside[1]
            later += account.beside[1]
        now = self._blocks.of_others - self.snapshots.blocks_without()
        held, until_read, until_end = self._of_draft_model(accounts, new, end_of)
        # Requests that begin alike share blocks of a draft model: it has no more of them than there are.
        held = min(held, now - self._padding)
        if request.num_preemptions < PATIENCE and all(account.epoch <= PATIENCE for account in accounts):
            later = now - held
        # Blocks behind a window are given back a step late.
        soon = max(soon + held + until_read, now)
        return self._with_blocks(while_read, soon), self._with_blocks(at_end, later + held + until_end)

    def _of_draft_model(
        self, accounts: Collection[Account], new: Account, end_of: Callable[[Account], int]
    ) -> tuple[int, int, int]:
        """Blocks that a draft model has of these accounts, if they share none; and how many more it will have together
        with those of a new one, once that is read, and when all end."""
        if not self._drafting:
            return 0, 0, 0
        everyone = [*accounts, new]
        held = self._drafting_blocks(account.tokens for account in accounts)
        # Answers go on by a block meanwhile.
        read = (max(account.prefill_len, account.tokens + self._block) for account in everyone)
        return held, self._drafting_blocks(read) - held, self._drafting_blocks(map(end_of, everyone)) - held

    def _drafting_blocks(self, tokens: Iterable[int]) -> int:
        """Blocks of a draft model for requests with so many tokens each, if they share none."""
        sizes = [manager.block_size for manager in self._drafting]
        if not sizes:
            return 0
        return sum(cdiv(self._with_drafts(count), size) for count in tokens for size in sizes)

    def _with_drafts(self, tokens: int) -> int:
        """Tokens that there are blocks for once a step has computed so many."""
        return min(tokens + self._drafts, self._manager.max_model_len)

    def _with_blocks(self, pages: Sequence[int], blocks: int) -> list[int]:
        """Pages of each rank together with those that there cannot be if other layers hold so many blocks."""
        assert self._blocks is not None
        taken = self._blocks.beyond_withheld(blocks)
        return [more + taken * each for more, each in zip(pages, self._pages_per_block, strict=True)]

    def blocks_beside(self, request: Request) -> tuple[int, int]:
        """The most blocks that they hold of a request, but for those of a draft model: while it is read, and
        afterwards."""
        end = min(request.num_prompt_tokens + request.max_tokens, self._manager.max_model_len)
        to_begin = self.blocks_to_begin(request) - self._drafting_blocks([request.num_tokens])
        return to_begin, self._blocks_for(end, end - 1) - self._drafting_blocks([end])

    def covering(self, pages: Sequence[int]) -> int:
        """Blocks for so many pages of each rank."""
        return max(map(cdiv, pages, self._pages_per_block))

    def has_blocks_for(self, request: Request, tokens: int) -> bool:
        """Whether a running request needs no more blocks for so many tokens, and gives none back."""
        name, needed = request.request_id, self._with_drafts(tokens)
        return self._all_draft and all(
            len(manager.req_to_blocks[name]) * manager.block_size >= needed for manager in self._drafting
        )

    def allocate(
        self,
        pages: Sequence[int],
        promised: Sequence[int],
        request: Request,
        new_tokens: int,
        found_tokens: int,
        found: KVCacheBlocks | None,
        *args: Any,
        **kwargs: Any,
    ) -> KVCacheBlocks | None:
        """Blocks for the other layers of a request; None if there are too few.

        Args:
            pages: of each rank that all requests hold together then.
            promised: those that it has to leave alone, too.
            new_tokens, found_tokens, found, args, kwargs: as of vLLM's allocate_slots behind the request.
        """
        assert self._blocks is not None
        begins_with = [block for of_group in found.blocks for block in of_group] if found else []
        # What it may leave for others is cached once the step is settled.
        kwargs["delay_cache_blocks"] = True
        step = request, new_tokens, found_tokens, found, *args
        allocate = partial(KVCacheManager.allocate_slots, self._manager, *step, **kwargs)
        with self._blocks.holding(begins_with):
            if not self._blocks.grow(self.covering(pages)):
                return None
            result = allocate()
            if result is None:
                staying = [held + more for held, more in zip(pages, promised, strict=True)]
                fewest = max(self.covering(staying), len(self._blocks.as_pages) - self._blocks.withheld)
                if self._blocks.shrink(fewest):
                    result = allocate()
        return result

    def lacks(self, request: Request, pages: Sequence[int], *step: Any) -> bool:
        """Whether there are too few blocks for a waiting request even without snapshots.

        Args:
            pages: of each rank that there have to be then.
            step: as of :meth:`allocate`.
        """
        assert self._blocks is not None
        _, found_tokens, found = step
        begins_with = [block for of_group in found.blocks for block in of_group] if found_tokens else ()
        tokens = self._with_drafts(request.num_tokens)
        needed = self._manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=tokens,
            new_computed_blocks=found.blocks if found_tokens else self._manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=found_tokens,
            num_local_computed_tokens=found_tokens,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
            prefill_end=tokens,
        )
        held = self._blocks.of_others - self.snapshots.blocks_without(begins_with)
        return held + self.covering(pages) + needed > self._blocks.most + self._blocks.withheld

    def pages_without_snapshots(self, kept: Snapshot | None) -> list[int]:
        """Pages of each rank that there would be besides without snapshots, but one."""
        fewer = self.snapshots.blocks_without(kept or ())
        return [now - then for now, then in zip(self.pages(), self.pages(-fewer), strict=True)]

    @property
    def pages_of_copies(self) -> list[int]:
        """Pages of each rank in blocks that a request has twice which begins in the middle of them."""
        groups = len(self._manager.coordinator.single_type_managers)
        return [groups * pages for pages in self._pages_per_block]

    def make_snapshot(self, request_id: str, tokens: int, pages: Sequence[int]) -> Snapshot | None:
        """A snapshot of a request, for which there are blocks beside so many pages of each rank; None where all layers
        are evicted."""
        if self._blocks is None:
            return None
        if self._manager.block_pool.get_num_free_blocks() < self.snapshots.new_blocks:
            self._blocks.shrink(self.covering(pages))
        is_enough = self._blocks.grow(self.covering(pages))
        assert is_enough
        return self.snapshots.make(request_id, tokens)

    def find(self, request: Request, most: int) -> tuple[KVCacheBlocks, int]:
        """Cached blocks that a waiting request begins with if other layers remember what it needs of them, and how many
        tokens it begins with then, at most so many."""
        blocks, tokens, _ = self._manager.coordinator.find_longest_cache_hit(request.block_hashes, most)
        return self._manager.create_kv_cache_blocks(blocks), tokens

    @property
    def read_again(self) -> int:
        """Tokens before the end of what is cached that are read again, for a draft model that reads hidden states."""
        coordinator = self._manager.coordinator
        return coordinator.scheduler_block_size if coordinator.eagle_group_ids else 0

    def can_end(self, tokens: int, end: int) -> bool:
        """Whether they can still keep what they remember after ``end`` tokens of a request that has computed so many:
        windows are not behind where they begin then, and a step can end there."""
        window = max(getattr(x, "sliding_window", 1) for x in self._manager.coordinator.single_type_managers)
        return tokens <= max(0, end - window)

    def cache(self, request: Request, tokens: int, ends: Collection[int]) -> None:
        """Let later requests begin with a request's first tokens, as many of ``ends`` as there are among so many."""
        coordinator = self._manager.coordinator
        tokens = min(tokens, len(request.block_hashes) * self._block)
        for group, manager in enumerate(coordinator.single_type_managers):
            manager.cache_blocks(
                request,
                coordinator.get_num_cacheable_tokens(tokens, group),
                retention_interval=coordinator.retention_interval,
                replay_boundaries=tuple(ends),
            )

    def invalidate(self) -> None:
        """As of :meth:`SharedBlocks.invalidate`."""
        if self._blocks is not None:
            self._blocks.invalidate()

    def check(self) -> None:
        """Check mode: no block has fewer references than who uses it. Raises RuntimeError if one has."""
        if self._blocks is None:
            return
        refs = self.snapshots.references()
        refs.update(block.block_id for block in self._blocks.as_pages)
        for manager in self._manager.coordinator.single_type_managers:
            for blocks in manager.req_to_blocks.values():
                refs.update(block.block_id for block in blocks if not block.is_null)
        for number, count in refs.items():
            if self._manager.block_pool.blocks[number].ref_cnt < count:
                raise RuntimeError(
                    f"kv eviction check: block {number} has {count} users, and fewer references"
                )

    def end_of_blocks(self, request: Request) -> int:
        """How many tokens the blocks that a running request has, or needs for its next token, have room for."""
        ends = [self._manager.max_model_len]
        for manager in self._manager.coordinator.single_type_managers:
            if self._blocks is not None and not is_evicted(manager.kv_cache_spec):
                size = manager.block_size
                blocks = len(manager.req_to_blocks[request.request_id])
                ends.append(max(blocks, cdiv(request.num_tokens, size)) * size)
        return min(ends)

    def blocks_to_begin(self, request: Request) -> int:
        """The most blocks that they will hold of a waiting request while it is read."""
        blocks = self._blocks_for(min(request.num_tokens, self._manager.max_model_len), 0)
        managers = self._manager.coordinator.single_type_managers
        # Where states are kept, each step in flight may have one beside the one that follows it.
        kept = sum(getattr(x, "mamba_cache_mode", None) == "align" for x in managers)
        return blocks + kept * self._in_flight

    def pages_beside(self, tokens: int) -> list[int]:
        """Pages of each rank in the blocks that they hold of a request that has read so many tokens."""
        blocks = self._blocks_for(tokens, tokens - 1)
        return [blocks * pages for pages in self._pages_per_block]

    def _blocks_for(self, tokens: int, computed: int) -> int:
        """Blocks for a request that goes from ``computed`` to ``tokens`` tokens."""
        if self._blocks is None:
            return 0
        tokens = self._with_drafts(tokens)
        nothing = self._manager.empty_kv_cache_blocks.blocks
        return self._manager.coordinator.get_num_blocks_to_allocate(
            request_id="",
            num_tokens=tokens,
            new_computed_blocks=nothing,
            num_encoder_tokens=0,
            total_computed_tokens=computed,
            num_local_computed_tokens=computed,
            num_tokens_main_model=tokens,
            # What a request may hold is capped for windows; behind a beginning that is skipped the cap would count
            # from the prompt's first token, and nothing would be left.
            apply_admission_cap=computed == 0,
            prefill_end=tokens,
        )
