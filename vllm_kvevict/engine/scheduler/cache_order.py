"""The order in which cached KV goes beside layers that are not evicted.

    free blocks    | empty | window of A | window of B |      vLLM takes the first ones, for windows as for pages
    segments       A (its last use) < B                       go where pages lack

A prefix is found only as far as there are both, so both go by their last use; otherwise pages would grow into all
windows before the first segment goes. Owns nothing.
"""

from collections.abc import Sequence
from itertools import islice, takewhile

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.request import Request

from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.blocks import SharedBlocks
from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.nodes import plus
from vllm_kvevict.engine.scheduler.shared.store import SharedStore


class CacheOrder:
    """Of a server with such layers."""

    def __init__(self, manager: KVCacheManager, blocks: SharedBlocks, books: Books, shared: SharedStore):
        self._manager, self._blocks, self._books = manager, blocks, books
        self._segments = shared.uncompressed.segments

    def drop_older(
        self,
        request: Request,
        account: Account,
        tokens: int,
        new: Account | None,
        found_tokens: int,
        found: KVCacheBlocks | None,
    ) -> None:
        """Before a request goes on to so many tokens, drop segments that were used before what would be lost of other
        layers; what it begins with stays.

        Args:
            new: the account again, of a request that begins with so many tokens, and these blocks.
        """
        if not account.is_reading and self.missing_pages(account, tokens) <= 0:
            return
        begins_with = found if found is not None and found_tokens else self._manager.empty_kv_cache_blocks
        missing = self._blocks_for(request, tokens, found_tokens, begins_with)
        times, passed = self._books.others.last_use.times(), 0
        time = next(times, None)
        for segment in self._segments.evictable(new.segment if new else None):
            lacking = missing + self.missing_pages(account, tokens)
            while passed < lacking and time is not None and time <= segment.used:
                passed, time = passed + 1, next(times, None)
            if passed >= lacking:
                break
            self._segments.drop(segment)
        promised = self._books.promised if new else [0] * len(self._books.ranks)
        self._empty(missing, -self.missing_pages(account, tokens, promised))

    def missing_pages(self, account: Account, tokens: int, promised: Sequence[int] = ()) -> int:
        """Blocks that have to become pages for an account at so many tokens; less than 0 if some need not be pages.

        Args:
            promised: pages of each rank that there have to be besides.
        """
        held = zip(self._books.held, account.need_at(tokens)[0], account.held, strict=True)
        pages = [of_all + now - before for of_all, now, before in held]
        with_promised = plus(pages, promised) if promised else pages
        return self._books.others.covering(with_promised) - len(self._blocks.as_pages)

    def _blocks_for(self, request: Request, tokens: int, found_tokens: int, found: KVCacheBlocks) -> int:
        """Blocks that other layers take for a request; it gives those back first that it needs no more."""
        computed, n = request.num_computed_tokens + found_tokens, request.num_prompt_tokens
        name, coordinator = request.request_id, self._manager.coordinator
        done = max(0, computed - request.num_in_flight_tokens)
        coordinator.remove_skipped_blocks(name, done, num_prompt_tokens=n)
        return coordinator.get_num_blocks_to_allocate(
            request_id=name,
            num_tokens=tokens,
            new_computed_blocks=found.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=computed,
            num_local_computed_tokens=computed,
            num_tokens_main_model=tokens,
            prefill_end=max(n, request.num_tokens - 1),
        )

    def _empty(self, count: int, spare: int) -> None:
        """Let there be so many blocks that hold nothing, if there are enough pages that are spare."""
        times = islice(self._books.others.last_use.times(), count)
        empty = sum(1 for _ in takewhile(lambda time: not time, times))
        if min(count - empty, spare) > 0:
            self._blocks.shrink(len(self._blocks.as_pages) - min(count - empty, spare))
