"""Single values as users give them: each is checked, and refused in one sentence that names its option or field."""

import json
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_kvevict.engine.errors import KVEvictionError
from vllm_kvevict.policies import available
from vllm_kvevict.policies.params import DEFAULTS, to_int
from vllm_kvevict.policies.registry import decoding_policies

ALL, UNRESERVED = "all", "unreserved"
"""What may stand for policies in a list of them: every one, and those that need no reserve."""

MOST_TOKENS = 1 << 40
"""No text has as many; sums of a few such numbers still fit whatever counts tokens."""


def budget(value: Any, name: str = "--kv-budget") -> float:
    """Check a budget: ``0 < X <= 1`` is a ratio of the prompt, an integral ``X > 1`` is tokens per KV head.

    Args:
        value: a number, or text that holds one (as the command line gives it).
        name: the flag or field to name in errors.

    Raises:
        KVEvictionError: for anything else (0, nan, 2.5, text, booleans).
    """
    expected = f"{name} must be a ratio in (0, 1] or a whole number of tokens above 1, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)):
        raise KVEvictionError(expected, name)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise KVEvictionError(expected, name) from None
    if not math.isfinite(number) or number <= 0 or (number > 1 and number != int(number)):
        raise KVEvictionError(expected, name)
    return number


def of_others(flag: str, value: Any) -> dict[str, dict[str, Any]]:
    """Parameters by the policy's name."""
    if not isinstance(value, dict) or not all(isinstance(params, dict) for params in value.values()):
        raise KVEvictionError(
            f"{flag} must be an object with an object of parameters for each policy, got {value!r}"
        )
    return dict(value)


def truth(flag: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise KVEvictionError(f"{flag} must be true or false, got {value!r}")
    return value


def path(flag: str, value: Any) -> str | None:
    """A file, or none; whether it can be written is found out at start-up, on the scheduler's machine."""
    if value is not None and (not isinstance(value, str) or not value):
        raise KVEvictionError(f"{flag} must be the path of a file, got {value!r}")
    return value


def policies(flag: str, value: Any) -> str | tuple[str, ...]:
    """Policies that requests may name: one name or word, or several."""
    valid = (*available(), ALL, UNRESERVED)
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or any(name not in valid for name in names):
        raise KVEvictionError(
            f"{flag} must be {ALL}, {UNRESERVED} or a list of policies (of {', '.join(available())}), got {value!r}"
        )
    return value if isinstance(value, str) else tuple(names)


def listed(policies: str | tuple[str, ...]) -> str:
    return policies if isinstance(policies, str) else json.dumps(policies)


def one_of(*words: str) -> "Reader":
    """What reads one of some words."""

    def read(flag: str, value: Any) -> str:
        if value not in words:
            raise KVEvictionError(f"{flag} must be {' or '.join(words)}, got {value!r}")
        return str(value)

    return read


def whole_or_none(flag: str, value: Any) -> int | None:
    return None if value is None else whole(flag, value)


def whole(name: str, value: Any, least: int = 1) -> int:
    """A whole number, of tokens or less; JSON may say 3000.0."""
    number = to_int(value)
    if number is None or number < least:
        raise KVEvictionError(f"{name} must be a whole number of at least {least}, got {value!r}", name)
    if number > MOST_TOKENS:
        raise KVEvictionError(f"{name} must be at most {MOST_TOKENS}, got {value!r}", name)
    return number


def lookahead(flag: str, value: Any) -> int:
    """Tokens of an answer."""
    tokens = whole(flag, value, least=0)
    if tokens > 64:
        raise KVEvictionError(f"{flag} must be at most 64, got {value!r}", flag)
    return tokens


Reader = Callable[[str, Any], Any]
"""From the name of a flag and a value what the value means; raises KVEvictionError."""


@dataclass(frozen=True)
class Option:
    """An engine option: its default, how a value is read, and what it does, for help texts."""

    default: Any
    read: Reader
    meaning: str


def decode_policy(flag: str, value: Any) -> str | None:
    """A policy that can evict answers, or none."""
    if value is not None and value not in decoding_policies():
        raise KVEvictionError(f"{flag} must be one of {', '.join(decoding_policies())}, got {value!r}")
    return None if value is None else str(value)


SCOPE = one_of("prompt", "prefix", "turns")
"""What of a prompt is evicted: all of it with the question in view, or what comes before the question without it, or
that turn by turn."""
NOT_GIVEN = f"whose values parameters take that are not given: {' or '.join(DEFAULTS)}"

ENGINE_OPTIONS = {
    "min_prompt": Option(256, partial(whole, least=0), "shorter prompts, in tokens, are kept whole"),
    "min_turn": Option(
        None, whole_or_none, "turns with fewer tokens are evicted with the next (as min_prompt)"
    ),
    "keep_first": Option(False, truth, "what comes before a chat's first user message stays whole"),
    "page_size": Option(32, whole, "tokens in a page"),
    "decode_reserve": Option(512, whole, "output tokens that admission reserves memory for, per request"),
    "scope": Option(
        "prompt",
        SCOPE,
        "what is evicted: the prompt, the prefix before the question, or a chat's turns one by one",
    ),
    "kernels": Option(True, truth, "use vllm-kvevict's kernels where they are faster"),
    "policies": Option(
        UNRESERVED, policies, f"policies that requests may choose: {ALL}, {UNRESERVED} or a list"
    ),
    "defaults": Option(DEFAULTS[0], one_of(*DEFAULTS), NOT_GIVEN),
    "policy_params": Option({}, of_others, "parameters of policies besides the server's own, by policy"),
    "max_window": Option(
        None,
        whole_or_none,
        "largest window that a request may set; null: the largest of the policies that it may choose",
    ),
    "decode_interval": Option(
        None,
        whole_or_none,
        "tokens between evictions of an answer; null: an eighth of its budget, at least 128",
    ),
    "decode_window": Option(
        None,
        whole_or_none,
        "last tokens of an answer that always stay; their queries score the others; null: 16, with rkv 8",
    ),
    "decode_policy": Option(
        None,
        decode_policy,
        "the policy that evicts answers; null: the server's own if it can, else ada-snapkv",
    ),
    "lookahead": Option(
        0,
        lookahead,
        "tokens of an answer, at most 64, that see the whole prompt, which is evicted then",
    ),
    "eviction_log": Option(None, path, "file that gets one line of JSON for each eviction"),
}
"""Entries of ``--kv-eviction-config`` beside the policy's own parameters."""
