"""The memory in which a rank sums up attention while prompts are read; :mod:`vllm_kvevict.engine.scheduler.reserve`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_kvevict.policies import needs


def allocate(vllm_config: Any, policies: Sequence[str], device: torch.device) -> Tensor:
    """A rank's reserve, fp32 [max_model_len, local layers * heads], every page of it written once.

    Args:
        policies: those for which it is. The heads are the local query heads, or the KV heads if none needs more.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = model.get_num_kv_heads(parallel)
    if any("col_sums" in needs(policy) for policy in policies):
        heads = model.get_num_attention_heads(parallel)
    rows = model.get_num_layers(parallel) * heads
    # A system gives a page of memory when it is written, and vLLM counts on a CPU what was given.
    return torch.empty(model.max_model_len, rows, dtype=torch.float32, device=device).fill_(0)
