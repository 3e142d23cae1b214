"""Memory that a rank takes at start-up, beside the KV cache: for sums over prompts, for queries that choose later.

Who has which part of it: :mod:`vllm_kvevict.engine.scheduler.reserve`, :mod:`vllm_kvevict.schedules.ring`.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_pp_group

from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.memory import evicted_layers_of_stages, ring_shape
from vllm_kvevict.schedules.ring import QueryRing


def allocate(vllm_config: Any, size: int, device: torch.device) -> Tensor:
    """A rank's reserve, fp32 [size, local evicted layers * local query heads], every page of it written once."""
    heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    rows = _evicted_layers(vllm_config) * heads
    # A system gives a page of memory when it is written, and vLLM counts on a CPU what was given.
    return torch.empty(size, rows, dtype=torch.float32, device=device).fill_(0)


def _evicted_layers(vllm_config: Any) -> int:
    """Layers of this rank that are evicted."""
    return len(evicted_layers_of_stages(vllm_config)[get_pp_group().rank_in_group])


def allocate_ring(vllm_config: Any, options: Options, device: torch.device) -> QueryRing | None:
    """Memory for the last queries of requests that are evicted by them after a step; None if none are."""
    shape = ring_shape(vllm_config, options, _evicted_layers(vllm_config))
    if shape is None:
        return None
    return QueryRing(
        torch.empty(shape, dtype=vllm_config.model_config.dtype, device=device).fill_(0),
        vllm_config.scheduler_config.max_num_seqs,
    )
