"""What the KV memory can hold, for vLLM's check at start-up and for ours of every request."""

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

from vllm.distributed.utils import get_pp_indices
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvevict.engine.config import KVEvictionError, Options, require_options
from vllm_kvevict.engine.devices import this_device
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.bounds import last_that, most_tokens, prefill_peak
from vllm_kvevict.schedules.plan import Plan
from vllm_kvevict.schedules.registry import bounded_policies


@dataclass(frozen=True, kw_only=True)
class BoundedAttentionSpec(FullAttentionSpec):
    """Full attention whose longest prompt needs less memory than all of its KV, if the server's policy sees to that."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> "BoundedAttentionSpec":
        """The same layer with our bound."""
        return cls(
            **{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init}
        )

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Bytes that a prompt of ``max_model_len`` tokens needs at once, as a mean over the fullest rank's layers."""
        whole: int = super().max_memory_usage_bytes(vllm_config)
        options = require_options(vllm_config)
        tokens, size = vllm_config.model_config.max_model_len, options.page_size
        plan = options.plan("", 1, tokens, None)
        pages = max(
            cdiv(_peak(vllm_config, plan, tokens, capacity, size), capacity.num_layers)
            for capacity in capacities(vllm_config)
        )
        return min(whole, pages * self.page_size_bytes * size // (self.block_size * self.num_kv_heads))


def capacities(vllm_config: Any) -> list[RankCapacity]:
    """One rank of every pipeline stage, with the pages that vLLM's blocks give it once these are known."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    options = require_options(vllm_config)
    layers, heads = model.get_total_num_hidden_layers(), model.get_num_kv_heads(parallel)
    pages_per_row = (cache.num_gpu_blocks or 0) * cache.block_size // options.page_size
    result = []
    for stage in range(parallel.pipeline_parallel_size):
        first, end = get_pp_indices(layers, stage, parallel.pipeline_parallel_size)
        pages = pages_per_row * (end - first) * heads
        result.append(RankCapacity(pages, first, end - first, heads, layers, model.get_total_num_kv_heads()))
    return result


def can_recycle(plan: Plan, num_stages: int) -> bool:
    """Whether the request can be evicted layer by layer (see :class:`Plan`) on this machine's kind of device."""
    device = this_device()
    assert device is not None
    if plan.evict_at is None:
        return False
    return plan.schedule.can_recycle(plan.config, num_stages, device.is_asynchronous)


def longest_step(scheduler_config: Any) -> int:
    """The most tokens of one request in a step."""
    tokens: int = scheduler_config.max_num_scheduled_tokens or scheduler_config.max_num_batched_tokens
    threshold = scheduler_config.long_prefill_token_threshold
    return min(tokens, threshold) if threshold > 0 else tokens


def check_fits(vllm_config: Any, options: Options, plan: Plan, prompt_len: int, min_tokens: int = 0) -> None:
    """Check that the KV memory can hold a request if nobody else holds anything, whatever its policy chooses.

    How long the answer may be beyond ``min_tokens`` is known once the prompt is evicted: the ledger sees to that.

    Raises:
        KVEvictionError: the prompt does not fit, or not with so many tokens of an answer; one sentence that says what
            would.
    """
    size, longest = options.page_size, vllm_config.model_config.max_model_len
    ranks = capacities(vllm_config)
    if all(capacity.rows * cdiv(longest, size) <= capacity.pages or not capacity.pages for capacity in ranks):
        return
    if not _fits(vllm_config, plan, prompt_len, ranks, size):
        raise KVEvictionError(_too_long(vllm_config, options, plan, prompt_len, ranks), "prompt")
    # The last token of an answer is not stored.
    most = 1 + min(most_tokens(plan, prompt_len, longest, capacity, size) for capacity in ranks) - prompt_len
    if min_tokens > most:
        raise KVEvictionError(
            f"min_tokens is {min_tokens}, but after this prompt only {most} tokens of an answer are sure to fit the KV "
            f"cache with kv_eviction={plan.config.policy}",
            "min_tokens",
        )


def _too_long(
    vllm_config: Any, options: Options, plan: Plan, prompt_len: int, ranks: list[RankCapacity]
) -> str:
    """Says which prompts would fit, and which policy this one."""
    policy = plan.config.policy
    would = f"the longest that fits with kv_eviction={policy} has {_longest(vllm_config, options, plan, ranks)} tokens"
    for other in bounded_policies():
        with contextlib.suppress(KVEvictionError):  # a budget that the other policy cannot have
            bounded = options.plan("", 1, prompt_len, _fields(plan, other))
            if policy != other and _fits(vllm_config, bounded, prompt_len, ranks, options.page_size):
                would += f", and kv_eviction={other} would do for this one"
    return f"the prompt's {prompt_len} tokens do not fit the KV cache: {would}"


def _fits(vllm_config: Any, plan: Plan, tokens: int, ranks: list[RankCapacity], page_size: int) -> bool:
    return all(_peak(vllm_config, plan, tokens, capacity, page_size) <= capacity.pages for capacity in ranks)


def _peak(vllm_config: Any, plan: Plan, tokens: int, capacity: RankCapacity, page_size: int) -> int:
    at_once = (plan.evict_at or tokens) <= longest_step(vllm_config.scheduler_config)
    recycles = at_once and can_recycle(plan, vllm_config.parallel_config.pipeline_parallel_size)
    return prefill_peak(plan, tokens, capacity, page_size, recycles)


def _longest(vllm_config: Any, options: Options, plan: Plan, ranks: list[RankCapacity]) -> int:
    """The longest prompt under a policy and budget that fits; longer ones need more."""
    fields = _fields(plan, plan.config.policy)

    def fits(length: int) -> bool:
        return _fits(vllm_config, options.plan("", 1, length, fields), length, ranks, options.page_size)

    return last_that(fits, 0, vllm_config.model_config.max_model_len)


def _fields(plan: Plan, policy: str) -> dict[str, Any]:
    """What a request says to have a policy at the plan's budget."""
    budget = plan.config.keep_ratio or plan.config.budget
    return {"kv_eviction": policy, **({"kv_budget": budget} if budget else {})}
