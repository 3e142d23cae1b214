"""Where the parts of a prompt end that are evicted one after the other, as a request's fields say. Owns nothing."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from vllm_kvevict.engine import read
from vllm_kvevict.engine.errors import KVEvictionError
from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.policies.registry import lookup, policies_for_parts

TURNS = "kv_turns"
"""The field of ``vllm_xargs``: a list of token counts, ascending."""

MOST_TURNS = 8192
"""Of a request: work and memory grow with them, and no chat has as many (what the front-end finds is below 6400)."""

LASTING = "kv_turns_lasting"
"""What the front-end adds where some of a chat's turns change with the next question: tokens of those that do not."""


WHOLE = "kv_turns_whole"
"""What the front-end adds where the part before the first user message stays whole: its tokens, one of the ends."""


def turns_of(fields: Mapping[str, Any], prompt_len: int, config: EvictionConfig) -> tuple[int, ...] | None:
    """Numbers of tokens of a prompt after which it may be evicted; None if the request does not say so.

    Args:
        config: the request's policy.

    Raises:
        KVEvictionError: one sentence naming the field.
    """
    if LASTING in fields:
        read.whole(LASTING, fields[LASTING], least=0)
    if WHOLE in fields:
        read.whole(WHOLE, fields[WHOLE])
    if TURNS not in fields:
        return None
    given = fields[TURNS]
    if not isinstance(given, list) or not given:
        raise _refusal(f"must be a list of token counts, got {given!r}")
    if len(given) > MOST_TURNS:
        raise _refusal(f"must have at most {MOST_TURNS} entries, got {len(given)}")
    ends = tuple(read.whole(TURNS, end) for end in given)
    if any(later <= earlier for earlier, later in pairwise(ends)):
        raise _refusal(f"must be strictly ascending, got {given!r}")
    if ends[-1] > prompt_len:
        raise _refusal(f"must not exceed the length of the prompt, {prompt_len} tokens, got {ends[-1]}")
    if fields.get("kv_prefix_len") is not None:
        raise _refusal("cannot be given together with kv_prefix_len")
    check_parts(config.policy, config.budget, TURNS, TURNS)
    return ends


def whole_of(fields: Mapping[str, Any], ends: Sequence[int]) -> int:
    """Tokens at a prompt's front that stay whole, as far as a request says so; 0 for none.

    Args:
        ends: as of :func:`turns_of`.

    Raises:
        KVEvictionError: one sentence naming the field.
    """
    if WHOLE not in fields:
        return 0
    whole = read.whole(WHOLE, fields[WHOLE])
    if whole not in ends:
        raise KVEvictionError(f"{WHOLE} must be one of {TURNS}, {list(ends)}, got {whole}", WHOLE)
    return whole


def are_lasting(fields: Mapping[str, Any], tokens: int) -> bool:
    """Whether so many tokens at a prompt's front stay the same when its chat goes on, as far as a request says so."""
    return tokens <= fields.get(LASTING, tokens)


def check_parts(policy: str, tokens: int | None, name: str, field: str | None = None) -> None:
    """Refuse what cannot evict a prompt part by part.

    Args:
        tokens: the budget, if it is a number of tokens.
        name: the field or flag that asks for it.
        field: as of :class:`KVEvictionError`.

    Raises:
        KVEvictionError: one sentence that begins with the name.
    """
    if not lookup(policy).parts:
        choices = ", ".join(policies_for_parts())
        raise KVEvictionError(f"{name} cannot be used with policy {policy} (choose from {choices})", field)
    if tokens is not None:
        raise KVEvictionError(
            f"{name} needs a budget that is a share of the tokens, from 0 to 1, since each part keeps a share of its "
            f"own, got {tokens} tokens",
            field,
        )


def _refusal(problem: str) -> KVEvictionError:
    return KVEvictionError(f"{TURNS} {problem}", TURNS)
