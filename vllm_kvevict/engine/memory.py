"""What the KV memory can hold, for vLLM's check at start-up and for ours of every request."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv

from vllm_kvevict.engine.config import KVEvictionError, Options, require_options
from vllm_kvevict.engine.devices import this_device
from vllm_kvevict.engine.layers import NULL_BLOCKS, LayerMap, draft_layers
from vllm_kvevict.engine.request_options import BUDGET, POLICY, plan_for
from vllm_kvevict.kernels.layout import INT8, KVLayout
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.bounds import MemoryBounds
from vllm_kvevict.schedules.inputs import HeadDims
from vllm_kvevict.schedules.plan import Plan
from vllm_kvevict.schedules.registry import bounded_policies, repeats_prompt

FLOATS = "auto", "float32", "float16", "bfloat16"
"""Values of ``--kv-cache-dtype`` with which entries are stored as the model computes them."""


def overruled_memory(asked: int | None, vllm_config: Any) -> str | None:
    """What to tell who asks for so many bytes of KV where vLLM's configuration has others; None where it has not."""
    if asked in (None, vllm_config.cache_config.kv_cache_memory_bytes):
        return None
    return (
        f"--kv-cache-memory-bytes {asked} has no effect, since VLLM_CPU_KVCACHE_SPACE comes first on a CPU: unset it, "
        "or leave the flag out"
    )


def layout_of(vllm_config: Any, spec: Any = None) -> KVLayout:
    """What a rank stores of a token in an evicted layer.

    Args:
        spec: vLLM's, of such a layer; None: by the model's configuration.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    rows, head_dim, dtype = model.get_num_kv_heads(parallel), model.get_head_size(), model.dtype
    is_quantised = vllm_config.cache_config.cache_dtype == INT8
    if spec is not None:
        rows, head_dim = spec.num_kv_heads, spec.head_size
        dtype = dtype if is_quantised else spec.dtype
    page_size, model_rows = require_options(vllm_config).page_size, model.get_total_num_kv_heads()
    name = str(dtype).removeprefix("torch.")
    return KVLayout.of_heads(page_size, rows, model_rows, head_dim, name, is_quantised)


def bounds_of(vllm_config: Any, num_engines: int = 1) -> MemoryBounds:
    """The bounds of an engine: one rank of every pipeline stage, with the pages that vLLM's blocks give it.

    Ranks have no pages before vLLM has counted its blocks.

    Args:
        num_engines: that the configuration counts the blocks of; an engine's own counts only its own.
    """
    cache, layout, layers = vllm_config.cache_config, layout_of(vllm_config), LayerMap.predicted(vllm_config)
    stages = evicted_layers_of_stages(vllm_config)
    blocks = max(0, (cache.num_gpu_blocks or 0) // num_engines - layers.blocks_kept(vllm_config))
    places = [layers.places(stage) for stage in stages_of(vllm_config)]
    tokens = int(blocks * cache.block_size * layers.enlarged)
    pages = [layout.pages_of(tokens) * count for count in places]
    ranks, step = rank_capacities(stages, layout, pages), longest_step(vllm_config.scheduler_config)
    drafts = vllm_config.num_lookahead_tokens
    return MemoryBounds(ranks, layout.page_size, step, len(stages), is_asynchronous(), drafts)


def stages_of(vllm_config: Any) -> list[range]:
    """The model's layers that each pipeline stage has."""
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    return stage_layers(layers, vllm_config.parallel_config.pipeline_parallel_size)


def evicted_layers_of_stages(vllm_config: Any) -> list[range]:
    """The layers of each pipeline stage that are evicted, counted among the model's evicted layers."""
    return list(map(LayerMap.predicted(vllm_config).on_stage, stages_of(vllm_config)))


def engines_of_front_end(parallel_config: Any) -> int:
    """Engines that a front-end sends requests to, whose blocks vLLM counts together there."""
    if parallel_config.data_parallel_rank_local is not None:
        return 1  # the front-end of one engine, which has others beside it
    if parallel_config.local_engines_only:
        return int(parallel_config.data_parallel_size_local)
    return int(parallel_config.data_parallel_size)


def pages_of_place(vllm_config: Any, plan: Plan, tokens: int) -> int:
    """Pages that a request of ``tokens`` tokens needs at once in each place of each evicted group's blocks, on the
    fullest rank. vLLM adds up groups, which have as many places each."""
    bounds, layers = bounds_of(vllm_config), LayerMap.predicted(vllm_config)
    peaks = bounds.until_read(plan, tokens, bounds.gains_from_one_step(plan))
    places = [layers.places(stage) * len(layers.evicted) for stage in stages_of(vllm_config)]
    return max(map(cdiv, peaks, places))


def bytes_for(vllm_config: Any, plans: Sequence[Plan], tokens: int) -> int:
    """Bytes of KV memory with which vLLM starts and serves one request of ``tokens`` tokens, whichever plan it has.

    Args:
        vllm_config: with the size of blocks that workers will find; on models with states it is enlarged, as they do.
    """
    if vllm_config.model_config.is_hybrid:
        device = this_device()
        assert device is not None
        current_platform._align_hybrid_block_size(vllm_config, device.load(device.backend))
    layers, layout = LayerMap.predicted(vllm_config), layout_of(vllm_config)
    place = int(vllm_config.cache_config.block_size * layers.enlarged) * layout.rows
    pages = max(pages_of_place(vllm_config, plan, tokens) for plan in plans)
    blocks = len(layers.evicted) * cdiv(pages * layout.page_size, place)
    blocks += max(layers.blocks_kept(vllm_config), NULL_BLOCKS)
    places = max(map(layers.places, stages_of(vllm_config)))
    return blocks * places * place * layout.reserved_bytes // layout.page_size


def check_holds_longest(vllm_config: Any, available: int) -> None:
    """Check that the KV memory holds the longest prompt whole, which a lookahead keeps until its answer has begun.

    Where vLLM decides how long that is, or a rank needs less than others do, only vLLM's own check says so.

    Args:
        available: bytes of KV memory of a rank.

    Raises:
        KVEvictionError: one sentence naming the flag.
    """
    options, model = require_options(vllm_config), vllm_config.model_config
    is_decided_later = (
        model.original_max_model_len == -1
        or vllm_config.cache_config.num_gpu_blocks_override is not None
        or vllm_config.parallel_config.pipeline_parallel_size > 1
        or not LayerMap.predicted(vllm_config).all_evicted
    )
    if not options.lookahead or is_decided_later:
        return
    tokens = model.max_model_len
    needed = bytes_for(vllm_config, [plan_for(options, tokens, most_output=1)], tokens)
    if available < needed:
        raise KVEvictionError(
            f"--kv-eviction-config.lookahead {options.lookahead} keeps prompts whole until their answers have begun: "
            f"one of --max-model-len {tokens} tokens needs {cdiv(needed, 2**20)} MiB of KV memory, and there are "
            f"{available // 2**20} MiB, so give the KV cache more memory, lower --max-model-len, or set "
            "--kv-eviction-config.lookahead 0"
        )


def draft_memory(vllm_config: Any, options: Options) -> tuple[int, int]:
    """Bytes that a rank holds of the longest prompt for a draft model, and for the evicted layers, once they are; both
    0 without one that has KV."""
    drafts = sum(spec.max_memory_usage_bytes(vllm_config) for _, spec in draft_layers(vllm_config))
    if not drafts:
        return 0, 0
    tokens = vllm_config.model_config.max_model_len
    budget = plan_for(options, tokens, most_output=1).config.budget_for(tokens)
    layers, layout = len(LayerMap.predicted(vllm_config).evicted_layers), layout_of(vllm_config)
    return drafts, layers * layout.rows * layout.entry_bytes * budget


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


def rank_capacities(stages: list[range], layout: KVLayout, pages: Sequence[int]) -> list[RankCapacity]:
    """What a rank of every pipeline stage can hold.

    Args:
        stages: the model's layers that each stage has.
        pages: of a rank of each stage.
    """
    num_layers = stages[-1].stop
    return [
        RankCapacity(held, layers.start, len(layers), layout.rows, num_layers, layout.model_rows)
        for layers, held in zip(stages, pages, strict=True)
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


def check_fits(
    vllm_config: Any,
    options: Options,
    plan: Plan,
    prompt_len: int,
    min_tokens: int = 0,
    in_one_step: bool = True,
) -> None:
    """Check that an engine's KV memory can hold a request if nobody else holds anything, whatever its policy chooses.

    Engines behind one front-end are taken to have the same memory. How long the answer may be beyond ``min_tokens`` is
    known once the prompt is evicted: the ledger sees to that.

    Args:
        in_one_step: whether one step may read the prompt, if steps can be that long.

    Raises:
        KVEvictionError: the prompt does not fit, or not with so many tokens of an answer; one sentence that says what
            would.
    """
    bounds = bounds_of(vllm_config, engines_of_front_end(vllm_config.parallel_config))
    longest = vllm_config.model_config.max_model_len
    everything = [rank.rows * cdiv(longest, bounds.page_size) for rank in bounds.ranks]
    if (bounds.have_room_for(everything) and not repeats_prompt(plan)) or not all(
        rank.pages for rank in bounds.ranks
    ):
        return
    if not bounds.fits(plan, prompt_len, in_one_step):
        raise KVEvictionError(_too_long(bounds, options, plan, prompt_len, longest, in_one_step), "prompt")
    if not min_tokens:
        return  # what follows takes long for a prompt of many parts
    # The last token of an answer is not stored.
    most = 1 + bounds.most_tokens(plan, prompt_len, longest) - prompt_len
    if min_tokens > most:
        raise KVEvictionError(
            f"min_tokens is {min_tokens}, but after this prompt the KV cache is only sure to hold {most} tokens of an "
            f"answer with kv_eviction={plan.config.policy}: lower min_tokens",
            "min_tokens",
        )


def _too_long(
    bounds: MemoryBounds, options: Options, plan: Plan, prompt_len: int, longest: int, in_one_step: bool
) -> str:
    """Says which prompts would fit, and which policy this one."""
    policy, part = plan.config.policy, plan.prompt
    ahead = part.end - part.leaves_at if part is not None and part.is_after_lookahead else 0
    fitting = bounds.longest_prompt(
        lambda length: options.plan_with(plan.config, length, lookahead=ahead), longest, in_one_step
    )
    would = f"the longest prompt that fits with kv_eviction={policy} has {fitting} tokens"
    for other in bounded_policies():
        with contextlib.suppress(KVEvictionError):  # a budget that the other policy cannot have
            bounded = plan_for(options, prompt_len, _fields(plan, other))
            if policy != other and bounds.fits(bounded, prompt_len, in_one_step):
                would += f", and this one fits with kv_eviction={other}"
    return f"the prompt's {prompt_len} tokens do not fit the KV cache: {would}"


def _fields(plan: Plan, policy: str) -> dict[str, Any]:
    """What a request says to have a policy at the plan's budget."""
    budget = plan.config.keep_ratio or plan.config.budget
    return {POLICY: policy, **({BUDGET: budget} if budget else {})}


def ring_shape(vllm_config: Any, options: Options, layers: int) -> tuple[int, int, int, int, int] | None:
    """Queries that a rank keeps: [layers, parts, queries, heads, head size], a part for each request and one for none.

    Args:
        layers: of the rank that are evicted.

    Returns:
        None where no eviction chooses by queries that are kept.
    """
    queries, entries = options.kept_queries
    if not queries:
        return None
    model, layout = vllm_config.model_config, layout_of(vllm_config)
    # No less than the KV cache will have, which is not known yet.
    kv_bytes = vllm_config.cache_config.kv_cache_memory_bytes or current_platform.get_device_total_memory()
    parts = min(vllm_config.scheduler_config.max_num_seqs, most_choosing(kv_bytes, layers, layout, entries))
    heads = model.get_num_attention_heads(vllm_config.parallel_config)
    return layers, parts + 1, queries, heads, model.get_head_size()


def most_choosing(kv_bytes: int, layers: int, layout: KVLayout, entries: int) -> int:
    """Requests that may have queries which choose, if each has so many entries in every row of a rank's layers."""
    return max(1, cdiv(kv_bytes, layers * layout.rows * layout.entry_bytes * entries))


def ring_memory(vllm_config: Any) -> tuple[int, int]:
    """Bytes that the fullest rank keeps for queries, and the requests that these are for; 0 for none."""
    layers = max(map(len, evicted_layers_of_stages(vllm_config)))
    shape = ring_shape(vllm_config, require_options(vllm_config), layers)
    if shape is None:
        return 0, 0
    return math.prod(shape[:-1]) * layout_of(vllm_config).computed_key.nbytes, shape[1] - 1
