"""Compile the project's Triton kernels at start-up: vLLM's own warm-up does not reach most of them."""

import itertools
from typing import TYPE_CHECKING

import torch

from vllm_kvevict.cache.format import dtype_of
from vllm_kvevict.engine.worker.batch import Served
from vllm_kvevict.policies import EvictionConfig, LayerScores, select
from vllm_kvevict.policies.params import COMBINED_ROWS

if TYPE_CHECKING:
    from vllm_kvevict.engine.worker.runtime import Runtime

WINDOW = 32
"""Rows of the window where no policy that the server allows scores by it."""


def warm_up(runtime: "Runtime") -> None:
    """Store, score and evict a prompt of zeros, and decode a token; under tensor parallelism all ranks must call it."""
    cache, pages, evictor = runtime.rank.cache, runtime.rank.pages, runtime.rank.evictor
    windows = runtime.options.kernel_windows
    window = max(windows, default=WINDOW)
    n, layers, heads = 2 * window, cache.num_layers, cache.num_kv_heads
    request_slot = cache.open()
    step = cache.extend([request_slot], [n])
    dtype = dtype_of(cache.memory.layout.computed_key)
    entries = cache.storage.new_zeros(n, heads, cache.head_dim, dtype=dtype)
    pages.append(*pages.encode(entries, entries), cache.entry_slots(step)[0])
    query = cache.storage.new_zeros(window, heads * runtime.rank.group, cache.head_dim, dtype=dtype)
    assert pages.window_attention is not None
    table = cache.table(request_slot, 0)
    # Whatever a request's policy asks for.
    for size, rows in itertools.product(windows, COMBINED_ROWS):
        pages.window_attention(query[:size], table, n, 1.0, runtime.rank.softcap, rows)
    scores = torch.zeros(heads, n - window, device=query.device)
    scored = [
        LayerScores(
            evictor.first_layer + layer, evictor.num_model_layers, heads, scores, device=scores.device
        )
        for layer in range(layers)
    ]
    config = EvictionConfig("ada-snapkv", budget=window + window // 2 + 1, window=window)
    chosen = select(config, scored, n, evictor.comm)
    cache.compact(request_slot, 0, list(itertools.chain.from_iterable(chosen)))
    cache.settle(request_slot)
    step = cache.extend([request_slot], [1])
    if runtime.rank.decode_attention is not None:
        runtime.rank.decode_attention.set_arena(cache.tables.arena)
        query, decodes = query[:1], Served(step.request_slots, None)
        key, value = pages.encode(entries[:1], entries[:1])
        runtime.rank.decode(0, decodes, query, key, value, torch.empty_like(query), 1.0)
    cache.close([request_slot])
