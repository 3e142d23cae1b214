"""The policies by name. A policy is a `Policy` value made and registered by its own module."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .inputs import Input, inputs_of
from .layer import Comm, Kept, LayerInputs, LayerScores
from .params import DEFAULTS, Parameter, ParamValue

Config = TypeVar("Config")
"""What a policy's functions take as configuration: EvictionConfig, which asks this module for the policy."""

ScoreFn = Callable[[Config, LayerInputs, int, int, Comm | None], LayerScores]
SelectFn = Callable[[Config, Sequence[LayerScores], int, Comm | None], Kept]


@dataclass(frozen=True)
class Policy(Generic[Config]):
    """What distinguishes one eviction method.

    score(cfg, inputs, layer, num_layers, comm) and select(cfg, layers, n, comm) have the signatures of
    `score_layer` and `select`, and are called only for prompts that are evicted, with checked arguments.
    """

    name: str
    summary: str
    """What it keeps, in a few words for the table of policies."""
    source: str
    """The paper, and where in it."""
    score: ScoreFn[Config]
    select: SelectFn[Config]
    parameters: tuple[Parameter, ...] = ()
    url: str = ""
    """Where the paper can be read."""
    evicts: bool = True
    """False: keeps everything, takes no budget."""
    needs: tuple[Input, ...] = ()
    """What `score` reads besides keys; names of inputs will do."""
    window_needs: tuple[Input, ...] = ()
    """What `score` reads besides unless the parameter `window` is 0."""
    window_rows: str | None = None
    """How `score` combines the window's rows, "mean", "max" or "recent", if of queries and keys it reads nothing but
    what tokens receive of the window's attention (`received`); the parameter `rows`, where the policy has it,
    counts instead."""
    schedule: str = "whole"
    """When it evicts, one of those in `vllm_kvevict.schedules`. "whole": at the end of the prompt, each layer without
    the others. "by weight": likewise, with layer budgets from the weights of all layers. "by score": likewise, the
    candidates of all layers compete (see whole_model). "by repeat": likewise, once the prompt was repeated (see kvzip).
    "chunked": several times while the prompt is read (see take)."""
    heads_compete: bool = False
    """Whether the KV heads of a layer share its budget."""
    guarantee: str = "alpha"
    """The parameter, where the policy has it, for the share of its budget that each head is sure of."""
    layer_budgets: Callable[[Config, int, int], list[int]] | None = None
    """Of (cfg, n, num_layers): tokens per KV head that each layer keeps, where that depends on the layer but not on
    data; None where every layer gets B."""
    always_kept: tuple[str, ...] = ()
    """Parameters that count unconditionally kept tokens; an absolute budget must exceed their sum."""
    window: str = "window"
    """The parameter, where the policy has it, that counts unconditionally kept last tokens."""
    last: int = 0
    """Unconditionally kept last tokens of a policy without such a parameter."""
    check: Callable[[Mapping[str, ParamValue]], None] | None = None
    """Raises ValueError where parameters do not go together."""
    experimental: bool = False
    decodes: bool = False
    """Whether it can evict answers while they are written: whether its `score` may be called for each row of a layer
    apart, and its `select` takes rows of different lengths, as `best_of_each_head` and `best_of_each_layer` do."""
    scores_rows: bool = False
    """Whether its `score` takes rows of different lengths in one call, as `window_scores` does; if not it is called for
    one row after another."""
    compares_entries: bool = False
    """Whether it compares every entry with every other, so that its work grows with the square of the budget."""
    prompts: bool = True
    """Whether it can evict prompts; False: made for answers alone."""
    parts: bool = True
    """Whether it can evict a prompt part by part, each beside what earlier parts have left: whether `score` takes
    `earlier_keys`."""

    def __post_init__(self) -> None:
        for field in ("needs", "window_needs"):
            object.__setattr__(self, field, inputs_of(getattr(self, field)))


_policies: dict[str, Policy] = {}


def register(policy: Policy) -> None:
    """Make `policy` known under its name. Raises ValueError if the name is taken."""
    if policy.name in _policies:
        raise ValueError(f"policy {policy.name} is registered already")
    _policies[policy.name] = policy


def lookup(name: str) -> Policy:
    """The policy of that name. Raises ValueError listing the names there are."""
    if not isinstance(name, str) or name not in _policies:
        raise ValueError(f"policy must be one of {', '.join(_policies)}, not {name!r}")
    return _policies[name]


def available() -> tuple[str, ...]:
    """Names of all policies for prompts, in order of registration."""
    return tuple(name for name, policy in _policies.items() if policy.prompts)


def policies_for_parts() -> tuple[str, ...]:
    """Names of all policies that can evict a prompt part by part, in order of registration."""
    return tuple(name for name in available() if lookup(name).parts)


def decoding_policies() -> tuple[str, ...]:
    """Names of all policies that can evict answers while they are written, in order of registration."""
    return tuple(name for name, policy in _policies.items() if policy.decodes)


def parameters(policy: str, defaults: str = "measured") -> dict[str, ParamValue]:
    """Names and defaults of the parameters of `policy` (budget and keep_ratio apart).

    Raises ValueError unless `defaults` is "measured" or "paper".
    """
    if defaults not in DEFAULTS:
        raise ValueError(f"defaults must be {' or '.join(DEFAULTS)}, not {defaults!r}")
    return {parameter.name: parameter.default_of(defaults) for parameter in lookup(policy).parameters}
