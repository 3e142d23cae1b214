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
from vllm_kvevict.schedules.bounds import MemoryBounds
from vllm_kvevict.schedules.plan import Plan
from vllm_kvevict.schedules.registry import bounded_policies
from vllm_kvevict.schedules.sums import HeadDims


@dataclass(frozen=True, kw_only=True)
class BoundedAttentionSpec(FullAttentionSpec):
    """Full attention whose longest prompt needs as much memory as the server's policy says: less than all of its KV if
    that is evicted as it comes, more if it is repeated."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> "BoundedAttentionSpec":
        """The same layer with our bound."""
        return cls(
            **{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init}
        )

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Bytes that a prompt of ``max_model_len`` tokens needs at once, as a mean over the fullest rank's layers."""
        bounds, tokens = bounds_of(vllm_config), vllm_config.model_config.max_model_len
        plan = require_options(vllm_config).plan(tokens)
        peaks = bounds.until_read(plan, tokens, bounds.gains_from_one_step(plan))
        pages = max(cdiv(peak, rank.num_layers) for peak, rank in zip(peaks, bounds.ranks, strict=True))
        page_bytes = self.page_size_bytes * bounds.page_size // (self.block_size * self.num_kv_heads)
        return pages * page_bytes


def bounds_of(vllm_config: Any, num_engines: int = 1) -> MemoryBounds:
    """The bounds of an engine: one rank of every pipeline stage, with the pages that vLLM's blocks give it.

    Ranks have no pages before vLLM has counted its blocks.

    Args:
        num_engines: that the configuration counts the blocks of; an engine's own counts only its own.
    """
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    page_size = require_options(vllm_config).page_size
    stages = stage_layers(model.get_total_num_hidden_layers(), parallel.pipeline_parallel_size)
    ranks = rank_capacities(
        stages,
        model.get_num_kv_heads(parallel),
        model.get_total_num_kv_heads(),
        pages_per_row=(cache.num_gpu_blocks or 0) // num_engines * cache.block_size // page_size,
    )
    return MemoryBounds(
        ranks, page_size, longest_step(vllm_config.scheduler_config), len(stages), is_asynchronous()
    )


def engines_of_front_end(parallel_config: Any) -> int:
    """Engines that a front-end sends requests to, whose blocks vLLM counts together there."""
    if parallel_config.data_parallel_rank_local is not None:
        return 1  # the front-end of one engine, which has others beside it
    if parallel_config.local_engines_only:
        return int(parallel_config.data_parallel_size_local)
    return int(parallel_config.data_parallel_size)


def head_dims(vllm_config: Any) -> HeadDims:
    """The heads of a rank."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    group = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
    return HeadDims(model.get_head_size(), group)


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """The model's layers that each pipeline stage has."""
    if num_stages == 1:
        return [range(num_layers)]
    return [range(*get_pp_indices(num_layers, stage, num_stages)) for stage in range(num_stages)]


def rank_capacities(
    stages: list[range], num_kv_heads: int, num_model_kv_heads: int, pages_per_row: int
) -> list[RankCapacity]:
    """What a rank of every pipeline stage can hold.

    Args:
        stages: the model's layers that each stage has.
        num_kv_heads: of one rank.
        pages_per_row: pages for each layer and KV head of a rank; any row may take them.
    """
    num_layers = stages[-1].stop
    return [
        RankCapacity(
            pages_per_row * len(layers) * num_kv_heads,
            layers.start,
            len(layers),
            num_kv_heads,
            num_layers,
            num_model_kv_heads,
        )
        for layers in stages
    ]


def is_asynchronous() -> bool:
    """Whether this machine's kind of device runs behind the host."""
    device = this_device()
    assert device is not None
    return device.is_asynchronous


def longest_step(scheduler_config: Any) -> int:
    """The most tokens of one request in a step."""
    tokens: int = scheduler_config.max_num_scheduled_tokens or scheduler_config.max_num_batched_tokens
    threshold = scheduler_config.long_prefill_token_threshold
    return min(tokens, threshold) if threshold > 0 else tokens


def check_fits(vllm_config: Any, options: Options, plan: Plan, prompt_len: int, min_tokens: int = 0) -> None:
    """Check that an engine's KV memory can hold a request if nobody else holds anything, whatever its policy chooses.

    Engines behind one front-end are taken to have the same memory. How long the answer may be beyond ``min_tokens`` is
    known once the prompt is evicted: the ledger sees to that.

    Raises:
        KVEvictionError: the prompt does not fit, or not with so many tokens of an answer; one sentence that says what
            would.
    """
    bounds = bounds_of(vllm_config, engines_of_front_end(vllm_config.parallel_config))
    longest = vllm_config.model_config.max_model_len
    everything = [rank.rows * cdiv(longest, bounds.page_size) for rank in bounds.ranks]
    holds_more = plan.evict_at is not None and plan.schedule.repeats_prompt
    if (bounds.hold(everything) and not holds_more) or not all(rank.pages for rank in bounds.ranks):
        return
    if not bounds.fits(plan, prompt_len):
        raise KVEvictionError(_too_long(bounds, options, plan, prompt_len, longest), "prompt")
    # The last token of an answer is not stored.
    most = 1 + bounds.most_tokens(plan, prompt_len, longest) - prompt_len
    if min_tokens > most:
        raise KVEvictionError(
            f"min_tokens is {min_tokens}, but after this prompt only {most} tokens of an answer are sure to fit the KV "
            f"cache with kv_eviction={plan.config.policy}",
            "min_tokens",
        )


def _too_long(bounds: MemoryBounds, options: Options, plan: Plan, prompt_len: int, longest: int) -> str:
    """Says which prompts would fit, and which policy this one."""
    policy, fields = plan.config.policy, _fields(plan, plan.config.policy)
    fitting = bounds.longest_prompt(lambda length: options.plan(length, fields), longest)
    would = f"the longest that fits with kv_eviction={policy} has {fitting} tokens"
    for other in bounded_policies():
        with contextlib.suppress(KVEvictionError):  # a budget that the other policy cannot have
            bounded = options.plan(prompt_len, _fields(plan, other))
            if policy != other and bounds.fits(bounded, prompt_len):
                would += f", and kv_eviction={other} would do for this one"
    return f"the prompt's {prompt_len} tokens do not fit the KV cache: {would}"


def _fields(plan: Plan, policy: str) -> dict[str, Any]:
    """What a request says to have a policy at the plan's budget."""
    budget = plan.config.keep_ratio or plan.config.budget
    return {"kv_eviction": policy, **({"kv_budget": budget} if budget else {})}
