"""vLLM's schedulers with the page ledger in the block manager's place."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_kvevict.engine.config import KEY, Options
from vllm_kvevict.engine.ledger import PageLedger


class _EvictionMixin:
    """Swaps the manager and keeps prefill chunks from crossing an eviction position."""

    kv_cache_manager: PageLedger

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        vllm_config: Any = self.vllm_config  # type: ignore[attr-defined]
        self.kv_cache_manager = PageLedger(
            kv_cache_config=self.kv_cache_config,  # type: ignore[attr-defined]
            max_model_len=self.max_model_len,  # type: ignore[attr-defined]
            scheduler_block_size=self.block_size,  # type: ignore[attr-defined]
            hash_block_size=self.hash_block_size,  # type: ignore[attr-defined]
            enable_caching=False,
            log_stats=self.log_stats,  # type: ignore[attr-defined]
            options=Options.parse(vllm_config.additional_config[KEY]),
            max_num_batched_tokens=self.max_num_scheduled_tokens,  # type: ignore[attr-defined]
            num_stages=vllm_config.parallel_config.pipeline_parallel_size,
        )
        self.connector.bind_kv_cache_manager(self.kv_cache_manager)  # type: ignore[attr-defined]

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        # Rows behind the eviction position must see the compressed cache, so they go into a later step.
        num_new_tokens = super()._reserve_prefill_lookahead(  # type: ignore[misc]
            request, num_computed_tokens, num_new_tokens
        )
        if self.kv_cache_manager.awaits_weights(request.request_id):
            return 0
        evict_at = self.kv_cache_manager.plan(request).evict_at
        if evict_at is not None and num_computed_tokens < evict_at:
            num_new_tokens = min(num_new_tokens, evict_at - num_computed_tokens)
        return num_new_tokens


class EvictionScheduler(_EvictionMixin, Scheduler):
    """Synchronous scheduling."""


class AsyncEvictionScheduler(_EvictionMixin, AsyncScheduler):
    """Scheduling that runs ahead of the workers' reports."""
