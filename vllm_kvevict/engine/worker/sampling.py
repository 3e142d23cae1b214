"""Sampling with drafts on a CPU, without two faults that vLLM's V1 runner has there."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_kvevict.engine import hooks


def repair_sampling(runner: Any) -> None:
    """Let requests with a temperature, ``top_k`` or ``top_p`` be sampled as they ask for, beside drafts.

    A step without drafts is sampled as without speculative decoding: of no rows at all vLLM cannot take the ``top_k``,
    so the engine would end. And what holds for a request is handed to each of its drafts: vLLM writes that to a copy,
    and reads memory that nobody wrote to.

    Args:
        runner: the worker's model runner on a CPU.
    """
    judge = getattr(runner, "rejection_sampler", None)
    if judge is None:
        return

    def make(with_drafts: Callable[..., Any]) -> Callable[..., Any]:
        def forward(metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
            if any(metadata.num_draft_tokens):
                return with_drafts(metadata, draft_probs, logits, sampling_metadata)
            return judge.sampler(logits=logits, sampling_metadata=sampling_metadata)

        return forward

    hooks.wrap("vllm.v1.sample.rejection_sampler:RejectionSampler.forward", make, of=judge)
    _repair_expansion()


@functools.cache
def _repair_expansion() -> None:
    """For all engines of the process."""

    def make(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: expand_batch_to_tokens(*args, **kwargs)

    hooks.wrap("vllm.v1.sample.rejection_sampler:expand_batch_to_tokens", make)


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """The value of its request for each draft token. B requests.

    Args:
        x: [B], a value of each request.
        cu_num_tokens: [B], drafts of the requests up to each.
        num_tokens: drafts of all.
        replace_from, replace_to: the one value is replaced by the other.

    Returns:
        [num_tokens], as x.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return values.repeat_interleave(counts, output_size=num_tokens)
