"""Parameters of policies: the server's, and what a request says instead."""

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_kvevict.engine.errors import KVEvictionError
from vllm_kvevict.policies import EvictionConfig, parameters
from vllm_kvevict.policies.params import DEFAULTS, WINDOW, Parameter, ParamValue
from vllm_kvevict.policies.registry import lookup
from vllm_kvevict.policy_list import parse_parameters, values

ANY_BUDGET = 1.0
"""A budget that goes with all parameters."""


def policy_config(
    policy: str, budget: float, params: Mapping[str, Any] | None = None, defaults: str = DEFAULTS[0]
) -> EvictionConfig:
    """Build the policy's configuration from a budget as users write it (ratio or tokens).

    Args:
        defaults: whose values parameters take that are not given.

    Raises:
        ValueError: naming the parameter that is unknown, inapplicable or out of range.
    """
    params = {"defaults": defaults, **(params or {})}
    if policy == "full":
        return EvictionConfig(policy, **params)
    if budget <= 1:
        return EvictionConfig(policy, keep_ratio=budget, **params)
    return EvictionConfig(policy, budget=int(budget), **params)


def known_config(policy: str, budget: float, params: Mapping[str, Any], defaults: str) -> EvictionConfig:
    """:func:`policy_config`; requests choose from few configurations, again and again."""
    return _known_config(policy, budget, json.dumps(dict(params), sort_keys=True), defaults)


@functools.lru_cache(maxsize=256)
def _known_config(policy: str, budget: float, params: str, defaults: str) -> EvictionConfig:
    return policy_config(policy, budget, json.loads(params), defaults)


def check_parameters(
    policy: str,
    budget: float,
    params: Mapping[str, Any],
    defaults: str,
    flag: str,
    others: Iterable[str] = (),
    named: str | None = None,
) -> None:
    """Refuse parameters of the server that the policy does not have, or values that it cannot take.

    Args:
        flag: before the parameters' names.
        others: what else may stand in their place.
        named: what an error of the values begins with, if it is not the flag.

    Raises:
        KVEvictionError: one sentence.
    """
    known = parameters(policy)
    for name in params:
        if name not in known:
            valid = ", ".join([*known, *others]) or "none"
            raise KVEvictionError(f"{flag}.{name} does not apply to policy {policy} (valid: {valid})")
    try:
        policy_config(policy, budget, params, defaults)
    except ValueError as error:
        raise KVEvictionError(f"{named or flag}: {error}") from None


def parameters_of_request(policy: str, text: Any, most_window: int) -> dict[str, ParamValue]:
    """The parameters that a request gives for a policy, each checked on its own.

    Args:
        text: NAME=VALUE[,NAME=VALUE].
        most_window: the largest window that it may have.

    Raises:
        ValueError: one sentence, what is wrong and what requests may set.
    """
    settable = {p.name: p for p in lookup(policy).parameters if p.by_request}
    valid = f"requests may set for policy {policy}: {', '.join(settable) or 'none'}"
    try:
        if not isinstance(text, str):
            raise ValueError(f"it must be text of the form NAME=VALUE[,NAME=VALUE], got {text!r}")
        given = values(parse_parameters(text))
        return {name: _value_of_request(policy, name, value, most_window) for name, value in given.items()}
    except ValueError as error:
        raise ValueError(f"{error} ({valid})") from None


def _value_of_request(policy: str, name: str, value: Any, most_window: int) -> ParamValue:
    known: dict[str, Parameter] = {parameter.name: parameter for parameter in lookup(policy).parameters}
    if name not in known:
        raise ValueError(f"{name} is not a parameter of policy {policy}")
    result = known[name].parse_of_request(value)
    if name == WINDOW.name and isinstance(result, int) and result > most_window:
        raise ValueError(
            f"window must be at most {most_window} on this server (--kv-eviction-config.max_window), not {result}"
        )
    return result


def overridden(policy: str, params: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """The server's parameters of a policy with a request's in their place.

    What the request's leave without use goes: a server's kernel is no error where a request says pooling=decay.
    """
    unused = {
        parameter.name
        for parameter in lookup(policy).parameters
        if any(other in by and by[other] == value for other, value in parameter.unless)
    }
    return {name: value for name, value in params.items() if name not in unused} | dict(by)
