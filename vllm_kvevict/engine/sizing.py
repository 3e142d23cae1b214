"""What the ledger would admit, without a server: the numbers of ``python -m vllm_kvevict.sizing``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.engine import memory
from vllm_kvevict.engine.config import KEY, Options
from vllm_kvevict.engine.frontend import checks
from vllm_kvevict.engine.scheduler.ledger import PageLedger

if TYPE_CHECKING:
    from vllm_kvevict.sizing import Server


def most_layers(server: "Server") -> int:
    """Layers of the pipeline stage that has the most."""
    stages = server.pipeline_parallel_size
    spans = [get_pp_indices(server.layers, stage, stages) for stage in range(stages)]
    return max(end - first for first, end in spans)


def blocks(server: "Server") -> int:
    """vLLM's blocks: the stage with the most layers has room for the fewest, and every stage gets as many."""
    return server.memory // (server.entry * server.heads * server.block_size * most_layers(server))


def size(server: "Server", settings: Mapping[str, Any], prompt: int, output: int) -> dict[str, Any]:
    """A row of the table, memory in bytes, for requests of ``prompt`` and ``output`` tokens.

    ``vllm_kvevict.sizing.LEGEND`` says what its columns mean. Settings are as of ``additional_config["kv_eviction"]``;
    ValueError names one that cannot be served.
    """
    options = Options.parse({"page_size": server.page_size, **settings})
    vllm_config = _vllm_config(server, options)
    checks.check_policy(vllm_config, options.request_config(None)[0], "--policy")
    ranks, step = memory.capacities(vllm_config), server.max_num_batched_tokens
    ledger = _ledger(server, options, ranks)
    request: Any = SimpleNamespace(request_id="", num_preemptions=0, sampling_params=None, max_tokens=output)
    request.num_tokens = request.num_prompt_tokens = prompt
    plan = ledger.plan(request)
    steps = max(-(-prompt // step), len(plan.cuts) + 1)
    counts = [after_eviction(plan, prompt, capacity, server.page_size) for capacity in ranks]
    alone = ledger._open(request, min(prompt, step))

    def admits(running: int) -> bool:
        """Whether one more is admitted beside others whose prompts were read one after the other, the last just now."""
        tokens = [prompt + min(steps * i, output - 1) for i in range(running)]
        ledger.accounts = {str(i): replace(alone, counts=counts, tokens=n) for i, n in enumerate(tokens)}
        new = ledger._open(request, min(prompt, step - running))
        peaks = any(
            new.peak[r] + ledger._held_soon(r, steps) > capacity.pages for r, capacity in enumerate(ranks)
        )
        limits.append("reading prompts" if peaks else "answers")
        return ledger.fits(plan, prompt, new.recycles) and ledger._admits(new)

    limits, low, high = [""], 0, step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if admits(middle - 1) else (low, middle - 1)
    if low < step:
        admits(low)
    now, ends = ([count.at(tokens) for count in counts] for tokens in (prompt, prompt + output - 1))
    reading, evicted, end = (
        max(pages) * server.entry * server.page_size for pages in (alone.peak, now, ends)
    )
    return {
        "budget": "full" if plan.config.policy == "full" else f"{options.budget:g}",
        "kept": prompt if plan.evict_at is None else plan.config.budget_for(prompt),
        "reading": reading,
        "evicted": evicted,
        "end": end,
        "at once": low,
        "at end": min(capacity.pages // pages for capacity, pages in zip(ranks, ends, strict=True)),
        "longest": memory._longest(vllm_config, options, plan, ranks),
        "layered": "yes" if alone.recycles else "no",
        "limit": limits[-1] if low < step else "tokens of a step",
    }


def reserve(server: "Server", settings: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Bytes that the fullest rank sets aside beside the KV memory, and the policies that it is for."""
    policies = Options.parse({"page_size": server.page_size, **settings}).reserved_for
    heads = max(1, server.query_heads // server.tensor_parallel_size)
    return 4 * server.max_len * most_layers(server) * heads * bool(policies), policies


def after_eviction(plan: Any, prompt: int, capacity: Any, page_size: int) -> PageCount:
    """Pages of a request on a rank once its prompt is read; rows that compete are taken to end anywhere in a page."""
    config, rows, layers = plan.config, capacity.rows, capacity.num_model_layers
    budgets = plan.schedule.layer_budgets(config, prompt, layers) if plan.evict_at else [prompt] * layers
    on_rank = budgets[capacity.first_layer :][: capacity.num_layers]
    lengths = [budget for budget in on_rank for _ in range(capacity.num_kv_heads)]
    if plan.evict_at and plan.schedule.is_ragged(config):
        spread = [(2 * row + 1) * page_size // (2 * rows) - page_size // 2 for row in range(rows)]
        lengths = [max(1, min(kept + more, prompt)) for kept, more in zip(lengths, spread, strict=True)]
    residues = [sum(kept % page_size == rest for kept in lengths) for rest in range(page_size)]
    return PageCount.from_residues(sum(-(-kept // page_size) for kept in lengths), prompt, residues)


def _vllm_config(server: "Server", options: Options) -> Any:
    """As much of a VllmConfig as the engine's memory checks read."""
    space, step = SimpleNamespace, server.max_num_batched_tokens
    model = space(max_model_len=server.max_len)
    model.get_total_num_hidden_layers = lambda: server.layers
    model.get_num_kv_heads = lambda parallel_config: server.heads
    model.get_total_num_kv_heads = lambda: server.kv_heads
    return space(
        additional_config={KEY: options.to_dict()},
        model_config=model,
        quant_config=None,
        parallel_config=space(pipeline_parallel_size=server.pipeline_parallel_size),
        cache_config=space(block_size=server.block_size, num_gpu_blocks=blocks(server)),
        scheduler_config=space(max_num_scheduled_tokens=step, long_prefill_token_threshold=0),
    )


def _ledger(server: "Server", options: Options, ranks: Sequence[Any]) -> PageLedger:
    """The ledger of the server's scheduler, without the scheduler."""
    block, step, stages = server.block_size, server.max_num_batched_tokens, server.pipeline_parallel_size
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=16, dtype=torch.float16)
    idle = KVCacheConfig(2, [], [KVCacheGroupSpec(["layer"], spec)])
    ours: dict[str, Any] = {"max_num_batched_tokens": step, "longest_step": step, "num_stages": stages}
    ledger = PageLedger(idle, server.max_len, block, block, enable_caching=False, options=options, **ours)
    ledger.ranks, ledger.capacities = list(range(len(ranks))), list(ranks)
    return ledger
