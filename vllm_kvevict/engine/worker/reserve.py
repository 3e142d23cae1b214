"""The memory in which a rank sums up attention while prompts are read; :mod:`vllm_kvevict.engine.scheduler.reserve`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_kvevict.schedules.plan import reserved_heads


def allocate(vllm_config: Any, policies: Sequence[str], device: torch.device) -> Tensor:
    """A rank's reserve, fp32 [max_model_len, local layers * heads], every page of it written once.

    Args:
        policies: those for which it is.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    query_heads, kv_heads = model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)
    heads = reserved_heads(policies, query_heads, kv_heads)
    rows = model.get_num_layers(parallel) * heads
    # A system gives a page of memory when it is written, and vLLM counts on a CPU what was given.
    return torch.empty(model.max_model_len, rows, dtype=torch.float32, device=device).fill_(0)
