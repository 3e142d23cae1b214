"""The schedules by name; a policy says which one it has (:attr:`vllm_kvevict.policies.registry.Policy.schedule`).

Owns which schedule has which name, each of them once. What is asked of a policy here has one answer in every process.
"""

from collections.abc import Mapping
from typing import Any

from vllm_kvevict.policies import EvictionConfig, available, parameters
from vllm_kvevict.policies.registry import lookup
from vllm_kvevict.schedules.base import Schedule
from vllm_kvevict.schedules.chunked import Chunked
from vllm_kvevict.schedules.inputs import sums_up
from vllm_kvevict.schedules.repeat import ByRepeat
from vllm_kvevict.schedules.shared import ByScore, ByWeight
from vllm_kvevict.schedules.whole import Whole

_schedules: dict[str, Schedule] = {}


def register(name: str, schedule: Schedule) -> None:
    """Make a schedule available to policies that name it. Raises ValueError if the name is taken."""
    if name in _schedules:
        raise ValueError(f"schedule {name} is registered already")
    _schedules[name] = schedule


def schedule_of(config: EvictionConfig) -> Schedule:
    """The schedule of a policy."""
    return _schedules[lookup(config.policy).schedule]


def most_extra_rows(policy: str, params: Mapping[str, Any], defaults: str) -> int:
    """The most token rows that a step computes for one prompt beside the tokens that it reads.

    Args:
        params: of the policy, those that differ from its defaults.
        defaults: which these are, "measured" or "paper".
    """
    return _schedules[lookup(policy).schedule].most_extra_rows(parameters(policy, defaults) | dict(params))


def begins_with_cached(config: EvictionConfig) -> bool:
    """Whether a prompt that is evicted may begin with uncompressed KV that an earlier one has left.

    Not if its scores add up over the queries of all tokens, which are not stored; nor if later tokens are read with the
    earlier ones evicted, so that their KV is another.
    """
    return not sums_up(config.inputs) and leaves_cached(config)


def leaves_cached(config: EvictionConfig) -> bool:
    """Whether what a prompt is read to, until it is evicted, is what any other prompt with the same tokens is."""
    return schedule_of(config).holds_whole_prompt


def bounded_policies() -> list[str]:
    """Policies that never hold a whole prompt, however long it is."""
    return [name for name in available() if not _schedules[lookup(name).schedule].holds_whole_prompt]


def repeating_policies() -> list[str]:
    """Policies that have the model read a prompt a second time."""
    return [name for name in available() if _schedules[lookup(name).schedule].repeats_prompt]


register("whole", Whole())
register("by weight", ByWeight())
register("by score", ByScore())
register("by repeat", ByRepeat())
register("chunked", Chunked())
