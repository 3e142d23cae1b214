"""EvictionConfig: one policy, its budget and its parameters, checked once and then immutable."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .inputs import Q_WINDOW, Input, ModelPart
from .params import ParamValue, to_float, to_int
from .registry import Policy, available, decoding_policies, lookup, parameters


@dataclass(frozen=True, init=False, repr=False)
class EvictionConfig:
    """A policy with its budget B: tokens kept per KV head, averaged over heads and layers, window included.

    Exactly one of budget (tokens, an integer >= 1; 1024.0 is accepted) and keep_ratio (in (0, 1], a share
    of the prompt) must be given; policy "full" takes neither. Omitted parameters take the policy's
    defaults (see `parameters`), with defaults="paper" those of its paper. pooling="avg" does not change
    the default kernel; SnapKV's original setting is pooling="avg", kernel=5. A parameter that others
    leave without use (kernel with pooling="decay") is none of the configuration's, and giving both is an
    error; where only the default leaves it without use, the paper's default is taken instead.

    Raises ValueError with one sentence that names the offending parameter and what is valid.
    Hashable, picklable; `EvictionConfig(**cfg.to_dict()) == cfg`, also through JSON.
    """

    policy: str
    budget: int | None
    keep_ratio: float | None
    items: tuple[tuple[str, ParamValue], ...]
    least_window: int = 0

    def __init__(
        self,
        policy: str,
        *,
        budget: int | float | None = None,
        keep_ratio: float | None = None,
        defaults: str = "measured",
        **params: Any,
    ) -> None:
        method = lookup(policy)
        tokens, ratio = _check_budget(method, budget, keep_ratio)
        values = _check_parameters(method, params, defaults)
        if tokens is not None:
            _check_always_kept(method, tokens, values)
        if method.check:
            method.check(values)
        self._set(policy=policy, budget=tokens, keep_ratio=ratio, items=tuple(values.items()))

    def _set(self, **fields: Any) -> None:
        """What only a new object may do."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        settings = [f"{name}={value!r}" for name, value in self.to_dict().items() if name != "policy"]
        return f"EvictionConfig({', '.join([repr(self.policy), *settings])})"

    @property
    def params(self) -> dict[str, Any]:
        """The policy's parameters with their values, without those that others leave without use (a fresh dict)."""
        return dict(self.items)

    def to_dict(self) -> dict[str, Any]:
        """A plain dict of JSON values: policy, the budget that was given, and all of `params`."""
        chosen = {"budget": self.budget, "keep_ratio": self.keep_ratio}
        return {"policy": self.policy, **{k: v for k, v in chosen.items() if v is not None}, **self.params}

    def budget_for(self, n: int) -> int:
        """B for a prompt of n tokens: min(n, budget), or min(n, max(1, floor(keep_ratio*n + 1e-9))).

        n under "full". The 1e-9 repairs products that fall just below the integer that is meant, such as
        150*(1 - 0.8).
        """
        if self.keep_ratio is not None:
            return min(n, max(1, math.floor(self.keep_ratio * n + 1e-9)))
        return n if self.budget is None else min(n, self.budget)

    def window_for(self, n: int) -> int:
        """Number of last tokens of an n-token prompt that stay, and whose queries score the others.

        A ratio can give a budget that the window alone would use up (B <= window): then the window
        shrinks to max(1, B//2). 0 for policies that protect no last tokens, except after a lookahead.
        """
        method = lookup(self.policy)
        window: int = self.params.get(method.window, method.last)
        if self.keep_ratio is not None and window and self.budget_for(n) <= window:
            window = max(1, self.budget_for(n) // 2)
        return min(max(window, self.least_window), n)

    def for_lookahead(self, n: int, ahead: int) -> "EvictionConfig":
        """The same for a prompt of n tokens that is evicted when `ahead` tokens of its answer are stored.

        These stay beside the B tokens that a prompt of n keeps, and their queries choose: they are in the window.
        """
        method, params = lookup(self.policy), self.params
        if method.window in params:
            params[method.window] = self.window_for(n)
        later = copy.copy(self)
        budget = self.budget_for(n) + ahead
        later._set(budget=budget, keep_ratio=None, items=tuple(params.items()), least_window=ahead)
        return later

    def for_part(self, n: int, begins: int) -> "EvictionConfig":
        """The same for a part of a prompt, of n tokens behind `begins` others, that is evicted on its own.

        What follows the part is not known, so its last tokens get less room: the window takes at most a quarter of what
        the part keeps. Attention sinks are a prompt's first tokens, so later parts have none.
        """
        changed = self.params
        if window := changed.get(name := lookup(self.policy).window):
            changed[name] = min(window, max(1, self.budget_for(n) // 4))
        if begins and "sinks" in changed:
            changed["sinks"] = 0
        part = copy.copy(self)
        # Not by the constructor: rows may keep nothing of a later part, since something is left before it.
        part._set(items=tuple(changed.items()))
        return part

    def evicts(self, n: int) -> bool:
        """Whether a prompt of n tokens loses entries: never under "full", else when n > B."""
        return n > self.budget_for(n)

    @property
    def needs(self) -> frozenset[str]:
        """Names of `inputs`."""
        return frozenset(what.name for what in self.inputs)

    @property
    def inputs(self) -> tuple[Input, ...]:
        """What scoring reads besides keys."""
        method = lookup(self.policy)
        return method.needs + (method.window_needs if self.params.get("window") else ())

    @property
    def needs_of_model(self) -> tuple[ModelPart, ...]:
        """What its inputs need of the model."""
        return tuple(what.of_model for what in self.inputs if what.of_model)

    @property
    def combines_rows_by(self) -> str | None:
        """How the window's rows are combined, "mean", "max" or "recent"; None if more of the queries is read.

        LayerInputs.window_mean, window_max or window_recent can then stand in for queries and keys.
        """
        rows: str | None = self.params.get("rows", lookup(self.policy).window_rows)
        return rows if Q_WINDOW in self.inputs else None

    @property
    def heads_compete(self) -> bool:
        """Whether the KV heads of a layer share its budget."""
        return lookup(self.policy).heads_compete

    @property
    def guarantees_heads(self) -> bool:
        """Whether each head is sure of a share of its layer's budget."""
        return bool(self.params.get(lookup(self.policy).guarantee))

    def layer_budgets(self, n: int, num_layers: int) -> list[int]:
        """Tokens per KV head, window included, that each layer keeps of n tokens, unless data decides."""
        known = lookup(self.policy).layer_budgets
        return known(self, n, num_layers) if known else [self.budget_for(n)] * num_layers


def _check_always_kept(method: Policy, tokens: int, values: Mapping[str, Any]) -> None:
    kept = {name: values[name] for name in method.always_kept}
    if method.last:
        kept["the last tokens"] = method.last
    if kept and tokens <= sum(kept.values()):
        names, sizes = " + ".join(kept), ", ".join(f"{name}={size}" for name, size in kept.items())
        raise ValueError(f"budget must exceed {names}, which is part of it, but budget={tokens} and {sizes}")


def _check_budget(
    method: Policy, budget: int | float | None, keep_ratio: float | None
) -> tuple[int | None, float | None]:
    if not method.evicts:
        if budget is not None or keep_ratio is not None:
            raise ValueError(f"policy {method.name} keeps everything and takes neither budget nor keep_ratio")
        return None, None
    if (budget is None) == (keep_ratio is None):
        raise ValueError(
            f"policy {method.name} takes exactly one of budget (an integer >= 1) "
            "and keep_ratio (a number in (0, 1])"
        )
    if budget is not None:
        tokens = to_int(budget)
        if tokens is None or tokens < 1:
            raise ValueError(f"budget must be an integer >= 1 (tokens per KV head), not {budget!r}")
        return tokens, None
    ratio = to_float(keep_ratio)
    if ratio is None or not 0 < ratio <= 1:
        raise ValueError(f"keep_ratio must be a number in (0, 1], not {keep_ratio!r}")
    return None, ratio


def _check_parameters(method: Policy, given: Mapping[str, Any], defaults: str) -> dict[str, Any]:
    values: dict[str, Any] = dict(parameters(method.name, defaults))
    valid = ", ".join(parameter.name for parameter in method.parameters) or "none"
    for name in given:
        if name not in values:
            known = any(name in parameters(other) for other in (*available(), *decoding_policies()))
            problem = "does not apply to" if known else "is not a parameter of"
            raise ValueError(f"{name} {problem} policy {method.name} (valid parameters: {valid})")
    values |= _making_room(method, values, given)
    for parameter in method.parameters:
        if parameter.name in given:
            values[parameter.name] = parameter.parse(given[parameter.name])
    return _without_unused(method, values, given)


def _making_room(method: Policy, values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The paper's default of what would leave a given parameter without use, and is not given itself.

    Who gives a kernel alone means a pooling that has one.
    """
    by_name = {parameter.name: parameter for parameter in method.parameters}
    found = {}
    for name in given:
        for other, value in by_name[name].unless:
            if other not in given and values[other] == value:
                found[other] = by_name[other].default_of("paper")
    return found


def _without_unused(method: Policy, values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values without those that others leave without use; ValueError names both where one of them was given."""
    used = dict(values)
    for parameter in method.parameters:
        for other, value in parameter.unless:
            if values.get(other) != value:
                continue
            if parameter.name in given:
                raise ValueError(
                    f"{parameter.name} is not used with {other}={value}: leave {parameter.name} out, or give another "
                    f"{other}"
                )
            used.pop(parameter.name, None)
    return used
