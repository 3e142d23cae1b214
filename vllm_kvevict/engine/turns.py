"""Where the parts of a prompt end that are evicted one after the other, as a request's fields say. Owns nothing."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from vllm_kvevict.engine import read
from vllm_kvevict.engine.errors import KVEvictionError
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.policies.registry import lookup, policies_for_parts

TURNS = "kv_turns"
"""The field of ``vllm_xargs``: a list of token counts, ascending."""


def turns_of(fields: Mapping[str, Any], prompt_len: int, config: EvictionConfig) -> tuple[int, ...] | None:
    """Numbers of tokens of a prompt after which it may be evicted; None if the request does not say so.

    Args:
        config: the request's policy.

    Raises:
        KVEvictionError: one sentence naming the field.
    """
    if TURNS not in fields:
        return None
    given = fields[TURNS]
    if not isinstance(given, list) or not given:
        raise _refusal(f"must be a list of token counts, got {given!r}")
    ends = tuple(read.whole(TURNS, end) for end in given)
    if any(later <= earlier for earlier, later in pairwise(ends)):
        raise _refusal(f"must be strictly ascending, got {given!r}")
    if ends[-1] > prompt_len:
        raise _refusal(f"must not exceed the length of the prompt, {prompt_len} tokens, got {ends[-1]}")
    if fields.get("kv_prefix_len") is not None:
        raise _refusal("cannot be given together with kv_prefix_len")
    _check_policy(config)
    return ends


def _check_policy(config: EvictionConfig) -> None:
    """Refuse what cannot evict a prompt part by part."""
    if not lookup(config.policy).parts:
        raise _refusal(
            f"cannot be used with policy {config.policy} (choose from {', '.join(policies_for_parts())})"
        )
    if config.budget is not None:
        raise _refusal(
            "needs a budget that is a share of the tokens, from 0 to 1, since each part keeps a share of its own, got "
            f"{config.budget} tokens"
        )


def _refusal(problem: str) -> KVEvictionError:
    return KVEvictionError(f"{TURNS} {problem}", TURNS)
