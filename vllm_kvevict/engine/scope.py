"""What of a prompt a server evicts whose requests do not say so themselves (``scope``). Owns nothing."""

from collections.abc import Mapping
from typing import Any

from vllm_kvevict.engine.errors import KVEvictionError
from vllm_kvevict.engine.turns import TURNS, check_parts

PREFIX_LEN = "kv_prefix_len"
"""The field of ``vllm_xargs``: a number of tokens."""

FIELDS = {"prefix": PREFIX_LEN, "turns": TURNS}
"""By scope, the field in which a request says where it is evicted, and the front-end where a chat is."""

ARE_FOUND = {"prefix": "the question", "turns": "the ends of turns"}
"""By scope, what the front-end looks for in chats."""

FLAG = "--kv-eviction-config.scope"


def check_scope(scope: str, policy: str, budget: float, keep_first: bool = False) -> None:
    """Refuse a server's policy, or budget, that cannot evict what its scope says, and what only another one does.

    Raises:
        KVEvictionError: one sentence naming the flag.
    """
    if scope == "turns":
        check_parts(policy, int(budget) if budget > 1 else None, f"{FLAG} {scope}")
    elif keep_first:
        raise KVEvictionError(
            f"--kv-eviction-config.keep_first has no effect with scope {scope}, which has no parts: use {FLAG} turns"
        )


def says_so(fields: Mapping[str, Any]) -> bool:
    """Whether a request says itself where it is evicted."""
    return TURNS in fields or fields.get(PREFIX_LEN) is not None


def with_found(
    scope: str, fields: Mapping[str, Any], found: int | list[int] | None, missing: str | None
) -> dict[str, Any] | None:
    """A request's fields and where it is evicted, None if nothing of it is.

    Args:
        scope: ``prefix`` or ``turns``.
        found: what the front-end has found in a chat, as the scope's field says it.
        missing: why nothing was found, if the prompt is a chat.

    Raises:
        KVEvictionError: one sentence naming the scope's field.
    """
    field = FIELDS[scope]
    if found is None:
        reason = missing or (
            "the server has not rendered this prompt as a chat, so it cannot find "
            f"{ARE_FOUND[scope]} (if another process has, that one needs the same --kv-eviction flags)"
        )
        raise KVEvictionError(f"{field} is required with {FLAG} {scope}: {reason}", field)
    return {**fields, field: found} if found else None
