"""The memory in which a rank sums prompts up while they are read; :mod:`vllm_kvevict.engine.scheduler.reserve`."""

from typing import Any

import torch
from torch import Tensor


def allocate(vllm_config: Any, size: int, device: torch.device) -> Tensor:
    """A rank's reserve, fp32 [size, local layers * local query heads], every page of it written once."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    rows = model.get_num_layers(parallel) * model.get_num_attention_heads(parallel)
    # A system gives a page of memory when it is written, and vLLM counts on a CPU what was given.
    return torch.empty(size, rows, dtype=torch.float32, device=device).fill_(0)
