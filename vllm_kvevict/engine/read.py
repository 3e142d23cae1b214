"""Single values as users give them: each is checked, and refused in one sentence that names its option or field."""

import json
import math
import numbers
from typing import Any

from vllm_kvevict.engine.errors import KVEvictionError
from vllm_kvevict.policies import available
from vllm_kvevict.policies.params import to_int

ALL, UNRESERVED = "all", "unreserved"
"""What may stand for policies in a list of them: every one, and those that need no reserve."""


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


def parameters_of_others(value: Any) -> dict[str, dict[str, Any]]:
    """Parameters by the policy's name."""
    valid = isinstance(value, dict) and all(isinstance(params, dict) for params in value.values())
    if not valid:
        raise KVEvictionError(
            "--kv-eviction-config.policy_params must be an object with an object of parameters for each policy, got "
            f"{value!r}"
        )
    return dict(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise KVEvictionError(f"--kv-eviction-config.{name} must be true or false, got {value!r}")
    return value


def path(name: str, value: Any) -> str | None:
    """A file, or none; whether it can be written is found out at start-up, on the scheduler's machine."""
    if value is not None and (not isinstance(value, str) or not value):
        raise KVEvictionError(f"--kv-eviction-config.{name} must be the path of a file, got {value!r}")
    return value


def policies(value: Any) -> str | tuple[str, ...]:
    """Policies that requests may name: one name or word, or several."""
    valid = (*available(), ALL, UNRESERVED)
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or any(name not in valid for name in names):
        raise KVEvictionError(
            f"--kv-eviction-config.policies must be {ALL}, {UNRESERVED} or a list of policies (of "
            f"{', '.join(available())}), got {value!r}"
        )
    return value if isinstance(value, str) else tuple(names)


def listed(policies: str | tuple[str, ...]) -> str:
    return policies if isinstance(policies, str) else json.dumps(policies)


def whole_or_none(name: str, value: Any) -> int | None:
    return None if value is None else whole(f"--kv-eviction-config.{name}", value)


def whole(name: str, value: Any, least: int = 1) -> int:
    """A whole number; JSON may say 3000.0."""
    number = to_int(value)
    if number is None or number < least:
        raise KVEvictionError(f"{name} must be a whole number of at least {least}, got {value!r}", name)
    return number
