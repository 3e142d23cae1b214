"""vLLM's schedulers with the page ledger in the block manager's place."""

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_kvevict.engine.config import KEY, Options, Plan
from vllm_kvevict.engine.ledger import PageLedger
from vllm_kvevict.engine.memory import longest_step


class _EvictionMixin:
    """Swaps the manager, ends prefill chunks where evictions are due, and sends probes along with them."""

    kv_cache_manager: PageLedger
    requests: dict[str, Request]
    running: list[Request]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._probing: str | None = None
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
            longest_step=longest_step(vllm_config.scheduler_config),
            num_stages=vllm_config.parallel_config.pipeline_parallel_size,
        )
        self.connector.bind_kv_cache_manager(self.kv_cache_manager)  # type: ignore[attr-defined]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._probing = None
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self._probing is not None and self._probing in output.num_scheduled_tokens:
            self._add_probe(output, self.requests[self._probing])
        return output

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        num_new_tokens = super()._reserve_prefill_lookahead(  # type: ignore[misc]
            request, num_computed_tokens, num_new_tokens
        )
        if self.kv_cache_manager.must_wait(request.request_id):
            return 0
        plan = self.kv_cache_manager.plan(request)
        position = plan.next_eviction(num_computed_tokens)
        if position is None:
            return num_new_tokens
        # Rows behind an eviction must see the compressed cache, so they go into a later step.
        left = position - num_computed_tokens
        if num_new_tokens < left:
            postponed = num_computed_tokens == 0 and self._waits_for_whole_step(request, plan)
            return 0 if postponed else num_new_tokens
        if position in plan.cuts and plan.probe:
            # The workers' buffers have room for one probe a step.
            if self._probing not in (None, request.request_id):
                return left - 1
            self._probing = request.request_id
        return left

    def _waits_for_whole_step(self, request: Request, plan: Plan) -> bool:
        """Whether a prompt that this step has no room for should be read in one step, to be evicted layer by layer.

        That is if the next step will have room, or if the prompt fits the pool in no other way: then room comes as
        decodes end, for none is admitted before it.
        """
        ledger = self.kv_cache_manager
        if plan.evict_at is None or plan.evict_at > ledger.longest_step or not plan.recycles:
            return False
        room = self.max_num_scheduled_tokens - len(self.running)  # type: ignore[attr-defined]
        return plan.evict_at <= room or not ledger.fits(plan, request.num_tokens, recycles=False)

    def _add_probe(self, output: SchedulerOutput, request: Request) -> None:
        """Send the prompt's last tokens along with the end of a chunk, as one more request of this step only."""
        plan = self.kv_cache_manager.plan(request)
        n, name = plan.evict_at, f"{request.request_id}-probe-{request.num_computed_tokens}"
        assert n is not None and request.prompt_token_ids is not None
        # One token more than is computed, so that nothing is sampled.
        tokens = [*request.prompt_token_ids[:n], request.prompt_token_ids[n - 1]]
        probe = NewRequestData(
            req_id=name,
            prompt_token_ids=tokens,
            prefill_token_ids=tokens,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0),
            pooling_params=None,
            block_ids=self.kv_cache_manager.get_block_ids(name),
            num_computed_tokens=n - plan.probe,
            lora_request=None,
        )
        output.scheduled_new_reqs.append(probe)
        output.num_scheduled_tokens[name] = plan.probe
        output.total_num_scheduled_tokens += plan.probe
        output.kv_connector_metadata.probes[name] = request.request_id  # type: ignore[union-attr]
        self.finished_req_ids.add(name)  # type: ignore[attr-defined]


class EvictionScheduler(_EvictionMixin, Scheduler):
    """Synchronous scheduling."""


class AsyncEvictionScheduler(_EvictionMixin, AsyncScheduler):
    """Scheduling that runs ahead of the workers' reports."""
