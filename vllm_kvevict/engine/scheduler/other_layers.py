"""The ledger's part for models of which only some layers are evicted: the others have vLLM's blocks and managers."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager

from vllm_kvevict.engine.scheduler.account import Account, Need
from vllm_kvevict.engine.scheduler.admission import PATIENCE
from vllm_kvevict.engine.scheduler.blocks import SharedBlocks
from vllm_kvevict.engine.scheduler.state import LedgerState

if TYPE_CHECKING:
    from vllm.v1.request import Request

PADDING = 1
"""Blocks that are vLLM's own for good."""


class OtherLayers(LedgerState, KVCacheManager):
    """Shares the memory out between pages and the blocks of other layers, as either needs it.

    Attributes:
        blocks: which ones are pages; None where all layers are evicted, and all memory is pages for good.
    """

    blocks: SharedBlocks | None

    @property
    def _pages_per_block(self) -> list[int]:
        assert self.blocks is not None
        return [capacity.pages // self.blocks.most for capacity in self.capacities]

    def pages_of_others(self, more: int = 0) -> list[int]:
        """Pages of each rank that there cannot be, since other layers hold the blocks.

        Args:
            more: blocks that they are taken to hold besides.
        """
        nothing = [0] * len(self.ranks)
        return nothing if self.blocks is None else self._with_blocks(nothing, self.blocks.of_others + more)

    def with_others(self, pages: Sequence[int]) -> list[int]:
        """Pages of each rank together with those that there cannot be."""
        return [sum(pair) for pair in zip(pages, self.pages_of_others(), strict=True)]

    def with_others_later(
        self, pages: Sequence[int], accounts: Collection[Account], new: Account
    ) -> tuple[list[int], list[int]]:
        """As `with_others`, at two moments: while `new` is read beside these accounts, and when all answers end.

        Windows that will grow while answers are written count only where somebody was preempted too often: to leave
        room for all of them costs more than a rare preemption.
        """
        if self.blocks is None:
            return list(pages), list(pages)
        while_read, at_end = PADDING + new.beside[0], PADDING + new.beside[1]
        for account in accounts:
            while_read += account.beside[0] if account.is_reading else account.beside[1]
            at_end += account.beside[1]
        now = self.blocks.of_others
        if not any(account.preemptions >= PATIENCE for account in (*accounts, new)):
            at_end = now
        # Blocks behind a window are given back a step late.
        return self._with_blocks(pages, max(while_read, now)), self._with_blocks(pages, at_end)

    def _with_blocks(self, pages: Sequence[int], blocks: int) -> list[int]:
        """Pages of each rank together with those that there cannot be if other layers hold so many blocks."""
        assert self.blocks is not None
        taken = self.blocks.beyond_reserve(blocks)
        return [more + taken * each for more, each in zip(pages, self._pages_per_block, strict=True)]

    def blocks_beside(self, request: "Request") -> tuple[int, int]:
        """The most blocks that the other layers hold of a request: while it is read, and afterwards."""
        if self.blocks is None:
            return 0, 0
        end = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return self.blocks_to_begin(request), self._blocks_of_others(end, end - 1)

    def _covering(self, pages: Sequence[int]) -> int:
        """Blocks for so many pages of each rank."""
        return max(map(cdiv, pages, self._pages_per_block))

    def allocate_others(
        self, request: "Request", account: Account, need: Need, is_new: bool, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """Blocks for the other layers of a request, beside what its evicted ones need; None if there are too few.

        Args:
            need: of the evicted layers, for which there is room.
            is_new: whether the request has to leave alone what others were promised.
            args, kwargs: as of vLLM's allocate_slots behind the request.
        """
        if self.blocks is None:
            return self.empty_kv_cache_blocks
        staying = [
            used + new - old for used, new, old in zip(self.books.used, need[0], account.held, strict=True)
        ]
        self.blocks.grow(self._covering(staying))
        result = super().allocate_slots(request, *args, **kwargs)
        if result is None:
            if is_new:
                staying = [held + more for held, more in zip(staying, self.books.promised, strict=True)]
            fewest = max(self._covering(staying), len(self.blocks.as_pages) - self.blocks.reserve)
            if self.blocks.shrink(fewest):
                result = super().allocate_slots(request, *args, **kwargs)
        return result

    def end_of_blocks(self, tokens: int) -> int:
        """How many tokens the other layers' blocks of a request with so many tokens have room for."""
        if self.blocks is None:
            return self.max_model_len
        return cdiv(tokens, self.block) * self.block

    def blocks_to_begin(self, request: "Request") -> int:
        """The most blocks that the other layers of a waiting request will hold while it is read."""
        return self._blocks_of_others(min(request.num_tokens, self.max_model_len), 0)

    def pages_beside(self, tokens: int) -> list[int]:
        """Pages of each rank in the blocks that other layers hold of a request that has read so many tokens."""
        if self.blocks is None:
            return [0] * len(self.ranks)
        blocks = self._blocks_of_others(tokens, tokens - 1)
        return [blocks * pages for pages in self._pages_per_block]

    def _blocks_of_others(self, tokens: int, computed: int) -> int:
        """Blocks for the other layers of a request that goes from ``computed`` to ``tokens`` tokens."""
        if self.blocks is None:
            return 0
        return self.coordinator.get_num_blocks_to_allocate(
            request_id="",
            num_tokens=tokens,
            new_computed_blocks=self.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=computed,
            num_local_computed_tokens=computed,
            num_tokens_main_model=tokens,
            # What a request may hold is capped for windows; behind a beginning that is skipped the cap would count
            # from the prompt's first token, and nothing would be left.
            apply_admission_cap=computed == 0,
            prefill_end=tokens,
        )

    def take_new_block_ids(self) -> list[int]:
        return [] if self.blocks is None else super().take_new_block_ids()

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        if self.blocks is not None:
            super().remove_skipped_blocks(*args, **kwargs)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        return self.empty_kv_cache_blocks if self.blocks is None else super().get_blocks(request_id)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.get_blocks(request_id).get_block_ids()
