"""The policies by name. A policy is a `Policy` value made and registered by its own module."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .layer import Comm, Kept, LayerInputs, LayerScores
from .params import Parameter, ParamValue

if TYPE_CHECKING:
    from .config import EvictionConfig

ScoreFn = Callable[["EvictionConfig", LayerInputs, int, int, Comm | None], LayerScores]
SelectFn = Callable[["EvictionConfig", Sequence[LayerScores], int, Comm | None], Kept]


@dataclass(frozen=True)
class Policy:
    """What distinguishes one eviction method.

    score(cfg, inputs, layer, num_layers, comm) and select(cfg, layers, n, comm) have the signatures of
    `score_layer` and `select`, and are called only for prompts that are evicted, with checked arguments.
    """

    name: str
    score: ScoreFn
    select: SelectFn
    parameters: tuple[Parameter, ...] = ()
    evicts: bool = True
    """False: keeps everything, takes no budget."""
    needs_queries: bool = False
    """True: `score` reads LayerInputs.q_window."""
    layer_local: bool = True
    """True: `select` needs no scores of other layers, so a layer can be compacted in its own forward."""
    always_kept: str | None = None
    """The parameter that counts unconditionally kept tokens; an absolute budget must exceed it."""


_policies: dict[str, Policy] = {}


def register(policy: Policy) -> None:
    """Make `policy` available under its name. Raises ValueError if the name is taken."""
    if policy.name in _policies:
        raise ValueError(f"policy {policy.name} is registered already")
    _policies[policy.name] = policy


def lookup(name: str) -> Policy:
    """The policy of that name. Raises ValueError listing the names there are."""
    if not isinstance(name, str) or name not in _policies:
        raise ValueError(f"policy must be one of {', '.join(_policies)}, not {name!r}")
    return _policies[name]


def available() -> tuple[str, ...]:
    """Names of all policies, in order of registration."""
    return tuple(_policies)


def parameters(policy: str) -> dict[str, ParamValue]:
    """Names and defaults of the parameters of `policy` (budget and keep_ratio apart)."""
    return {parameter.name: parameter.default for parameter in lookup(policy).parameters}
