"""The schedules by name; a policy says which one it has (:attr:`vllm_kvevict.policies.registry.Policy.schedule`).

Owns which schedule has which name, each of them once. What is asked of a policy here has one answer in every process.
"""

import functools
from collections.abc import Mapping
from typing import Any

from vllm_kvevict.policies import EvictionConfig, available, parameters
from vllm_kvevict.policies.registry import lookup
from vllm_kvevict.schedules.base import Schedule
from vllm_kvevict.schedules.chunked import Chunked
from vllm_kvevict.schedules.decoding import Decoding
from vllm_kvevict.schedules.eviction import Eviction, ResidentRequest
from vllm_kvevict.schedules.evictor import Evictor
from vllm_kvevict.schedules.inputs import sums_up
from vllm_kvevict.schedules.kept_whole import KeptWhole
from vllm_kvevict.schedules.lookahead import lookahead_phase
from vllm_kvevict.schedules.plan import Phase, Plan, part_phases
from vllm_kvevict.schedules.repeat import ByRepeat
from vllm_kvevict.schedules.shared import ByScore, ByWeight
from vllm_kvevict.schedules.whole import Whole

_schedules: dict[str, Schedule] = {}


def register(name: str, schedule: Schedule) -> None:
    """Make a schedule available to policies that name it. Raises ValueError if the name is taken."""
    if name in _schedules:
        raise ValueError(f"schedule {name} is registered already")
    _schedules[name] = schedule


def schedule_of(phase: Phase) -> Schedule:
    """The schedule of a phase."""
    return _schedules[phase.schedule]


def schedule_for(policy: str) -> Schedule:
    """The schedule by which a policy evicts prompts."""
    return _schedules[lookup(policy).schedule]


@functools.lru_cache(maxsize=128)
def plan_of(config: EvictionConfig, n: int, answer: Phase | None = None, ahead: int = 0) -> Plan:
    """The plan of a prompt, or of a prefix, of n tokens.

    Args:
        answer: the phase in which the answer is evicted; None if it is kept.
        ahead: tokens of the answer that are stored before the prompt is evicted.
    """
    later = () if answer is None else (answer,)
    if not config.evicts(n):
        return Plan(config, later)
    name = lookup(config.policy).schedule
    if ahead:
        phase = lookahead_phase(config, name, n, ahead, _schedules[name].repeats_prompt)
        return Plan(config, (phase, *later))
    return Plan(config, (*_schedules[name].phases(config, name, n), *later))


@functools.lru_cache(maxsize=128)
def plan_of_parts(
    config: EvictionConfig, ends: tuple[int, ...], least: int, answer: Phase | None = None, whole: int = 0
) -> Plan:
    """The plan of a prompt that is evicted part by part; arguments as of :func:`part_phases` and :func:`plan_of`."""
    later = () if answer is None else (answer,)
    name = lookup(config.policy).schedule
    parts = part_phases(config, name, ends, least, _schedules[name].most_cached, whole)
    return Plan(config, (*parts, *later), in_turns=True)


def repeats_prompt(plan: Plan) -> bool:
    """Whether the model repeats a request's prompt, or a part of it, before that is evicted."""
    return any(schedule_of(part).repeats_prompt for part in plan.parts)


def eviction_of(evictor: Evictor, resident: ResidentRequest) -> Eviction | None:
    """A request's eviction on a rank, which begins with its phase; None if it is evicted no more."""
    if resident.eviction is None:
        phase = resident.plan.phase_at(resident.tokens)
        if phase is not None:
            schedule = schedule_of(phase)
            kind = schedule.after_lookahead if phase.is_after_lookahead else schedule.eviction
            assert kind is not None
            resident.eviction = kind(evictor, resident, phase)
    return resident.eviction


def most_extra_rows(policy: str, params: Mapping[str, Any], defaults: str) -> int:
    """The most extra tokens that a step computes for one prompt, beside those that it reads.

    Args:
        params: of the policy, those that differ from its defaults.
        defaults: which these are, "measured" or "paper".
    """
    return schedule_for(policy).most_extra_rows(parameters(policy, defaults) | dict(params))


def bounded_policies() -> list[str]:
    """Policies that never hold a whole prompt, however long it is."""
    return [name for name in available() if not schedule_for(name).holds_whole_prompt]


def can_look_ahead(policy: str) -> bool:
    """Whether a policy can evict a prompt once its answer has begun: it needs no sums over all queries."""
    found = lookup(policy)
    return found.evicts and schedule_for(policy).after_lookahead is not None and not sums_up(found.needs)


def lookahead_policies() -> list[str]:
    """Policies that can evict a prompt once its answer has begun."""
    return [name for name in available() if can_look_ahead(name)]


register("whole", Whole())
register("by weight", ByWeight())
register("by score", ByScore())
register("by repeat", ByRepeat())
register("chunked", Chunked())
register("kept whole", KeptWhole())
register("decoding", Decoding())
