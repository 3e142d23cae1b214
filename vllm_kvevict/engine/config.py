"""What the user asked for: the server's options and what one request makes of them.

The options travel as plain JSON in ``VllmConfig.additional_config["kv_eviction"]``, so that every process
(front-end, engine core, workers) reads the same thing without sharing an object.
"""

import functools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvevict.engine import read
from vllm_kvevict.engine.decoding import (
    ANSWER_FROM,
    BUDGET,
    DecodeOptions,
    answer_from,
)
from vllm_kvevict.engine.devices import this_device
from vllm_kvevict.engine.errors import KVEvictionError
from vllm_kvevict.engine.names import KEY as KEY
from vllm_kvevict.engine.parameters import (
    ANY_BUDGET,
    FIELD,
    check_parameters,
    known_config,
    overridden,
    parameters_of_request,
)
from vllm_kvevict.engine.read import ALL, ENGINE_OPTIONS, UNRESERVED
from vllm_kvevict.engine.scope import check_scope, says_so, with_found
from vllm_kvevict.engine.turns import LASTING, TURNS, WHOLE, turns_of, whole_of
from vllm_kvevict.policies import EvictionConfig, available
from vllm_kvevict.policies.answers import policy_for_answers
from vllm_kvevict.policies.registry import decoding_policies, lookup
from vllm_kvevict.schedules import inputs
from vllm_kvevict.schedules.plan import Phase, Plan, needs_reserve
from vllm_kvevict.schedules.registry import plan_of, plan_of_parts
from vllm_kvevict.schedules.repeat_prompts import RepeatPrompts

DEFAULT_BUDGET = 0.2
LONG = 1 << 40  # tokens of a prompt that is longer than any window

ENGINE_DEFAULTS = {name: option.default for name, option in ENGINE_OPTIONS.items()}

REQUEST_FIELDS = ("kv_eviction", "kv_budget", FIELD, "kv_prefix_len", TURNS, BUDGET, ANSWER_FROM)
"""Fields of ``vllm_xargs`` that a request may carry."""

REPEAT_ROWS = "kv_repeat_rows"
"""The field for :meth:`RepeatPrompts.to_lists`, which depends on tokenizer and chat template."""

KNOWN_FIELDS = (*REQUEST_FIELDS, REPEAT_ROWS, LASTING, WHOLE)
"""Fields of ours that requests come with; the last three if they were rendered before."""

TRANSFER = "kv_transfer_params"
OTHERS_FIELDS = (TRANSFER, "kv_cache_report_mode")
"""Fields that begin like ours and are vLLM's."""


@dataclass(frozen=True)
class Options:
    """The server's eviction options, checked.

    Attributes:
        policy: name of the default policy.
        budget: default budget (ratio up to 1, else tokens per KV head).
        params: the default policy's parameters, names as in ``policies.parameters(policy)``.
        min_prompt: prompts (or prefixes) shorter than this are kept whole.
        min_turn: parts of a prompt shorter than this are evicted with the part behind them; None for min_prompt.
        keep_first: in scope ``turns``, what comes before a chat's first user message stays whole.
        page_size: tokens of one KV head in a page.
        decode_reserve: tokens of output that admission expects of a request at most.
        scope: ``prompt``, ``prefix`` or ``turns``, for requests that give neither ``kv_prefix_len`` nor ``kv_turns``.
        kernels: use the project's own kernels where there is one for the machine and the model.
        defaults: whose values parameters take that are not given, ``measured`` or ``paper``.
        policies: what requests may name besides ``policy`` and ``full``: a policy, ``all``, ``unreserved``, or several.
        policy_params: parameters of other policies than the default one, by name.
        max_window: the largest window that a request may set; None for :attr:`most_window`.
        decode_budget: entries of an answer that each KV head keeps on average while it is written; 0: all.
        decode_interval, decode_window, decode_policy: as of :class:`DecodeOptions`; None for the defaults.
        eviction_log: file to which the scheduler appends a line of JSON for each evicted request; None for no file.
        check: verify ledger against workers after every step (``VLLM_KVEVICT_CHECK=1``).
    """

    policy: str
    budget: float = DEFAULT_BUDGET
    params: Mapping[str, Any] = field(default_factory=dict)
    min_prompt: int = ENGINE_DEFAULTS["min_prompt"]
    min_turn: int | None = ENGINE_DEFAULTS["min_turn"]
    keep_first: bool = ENGINE_DEFAULTS["keep_first"]
    page_size: int = ENGINE_DEFAULTS["page_size"]
    decode_reserve: int = ENGINE_DEFAULTS["decode_reserve"]
    scope: str = ENGINE_DEFAULTS["scope"]
    kernels: bool = ENGINE_DEFAULTS["kernels"]
    policies: str | tuple[str, ...] = ENGINE_DEFAULTS["policies"]
    defaults: str = ENGINE_DEFAULTS["defaults"]
    policy_params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_window: int | None = ENGINE_DEFAULTS["max_window"]
    decode_budget: int = 0
    decode_interval: int | None = ENGINE_DEFAULTS["decode_interval"]
    decode_window: int | None = ENGINE_DEFAULTS["decode_window"]
    decode_policy: str | None = ENGINE_DEFAULTS["decode_policy"]
    eviction_log: str | None = ENGINE_DEFAULTS["eviction_log"]
    check: bool = False

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "Options":
        """Check the options of ``additional_config["kv_eviction"]``.

        Args:
            raw: ``policy``, optionally ``budget``, engine options and policy parameters, side by side.

        Raises:
            KVEvictionError: one sentence naming the flag or the entry of ``--kv-eviction-config``.
        """
        raw = dict(raw)
        policy = raw.pop("policy", None)
        if policy is None:
            raise KVEvictionError("--kv-budget and --kv-eviction-config need --kv-eviction POLICY")
        if policy not in available():
            raise KVEvictionError(
                f"--kv-eviction: unknown policy {policy!r} (choose from {', '.join(available())})"
            )
        budget = read.budget(raw.pop("budget", DEFAULT_BUDGET))
        decode_budget = read.whole("--kv-decode-budget", raw.pop("decode_budget", 0), least=0)
        engine = _take_engine_options(raw)
        flag, named = "--kv-eviction-config", f"--kv-eviction {policy}"
        check_parameters(policy, budget, raw, engine["defaults"], flag, ENGINE_DEFAULTS, named)
        options = cls(policy, budget, raw, decode_budget=decode_budget, **engine)
        options._check_policy_params()
        check_scope(options.scope, policy, budget, options.keep_first)
        options.decoding.check()
        return options

    def to_dict(self) -> dict[str, Any]:
        """The JSON form that :meth:`parse` reads back."""
        engine = {name: getattr(self, name) for name in ENGINE_DEFAULTS}
        if not isinstance(self.policies, str):
            engine["policies"] = list(self.policies)
        ours = {"policy": self.policy, "budget": self.budget, "decode_budget": self.decode_budget}
        return {**ours, "check": self.check, **engine, **self.params}

    def allows(self, policy: str) -> bool:
        """Whether a request may name a policy."""
        named = (self.policies,) if isinstance(self.policies, str) else self.policies
        if policy in (self.policy, "full", *named) or ALL in named:
            return True
        return UNRESERVED in named and not needs_reserve(policy)

    def _check_policy_params(self) -> None:
        """Refuse parameters of policies that there are not, have others, or are given elsewhere."""
        flag = "--kv-eviction-config.policy_params"
        for policy, params in self.policy_params.items():
            if policy not in (*available(), *decoding_policies()):
                raise KVEvictionError(
                    f"{flag}: unknown policy {policy!r} (choose from {', '.join(available())})"
                )
            if policy == self.policy:
                raise KVEvictionError(
                    f"{flag} is for policies other than the server's own: set a parameter of {policy} with "
                    "--kv-eviction-config.NAME VALUE"
                )
            if not self.allows(policy) and policy != self.decoding.policy:
                raise KVEvictionError(
                    f"{flag}.{policy} has no effect, since requests may not choose {policy} on this server: name it in "
                    "--kv-eviction-config.policies"
                )
            check_parameters(policy, ANY_BUDGET, params, self.defaults, f"{flag}.{policy}")

    def params_of(self, policy: str) -> Mapping[str, Any]:
        """The parameters that the server sets for a policy."""
        return self.params if policy == self.policy else self.policy_params.get(policy, {})

    @functools.cached_property
    def decoding(self) -> DecodeOptions:
        """What is said of answers."""
        policy = self.decode_policy or policy_for_answers(self.policy)
        return DecodeOptions(
            self.decode_budget,
            self.decode_interval,
            self.decode_window,
            policy,
            self.params_of(policy),
            self.defaults,
            self.page_size,
        )

    @property
    def configs(self) -> list[EvictionConfig]:
        """What requests have that set no parameters: each policy that they may choose, at any budget."""
        allowed = [policy for policy in available() if self.allows(policy)]
        return [known_config(policy, ANY_BUDGET, self.params_of(policy), self.defaults) for policy in allowed]

    @property
    def least_turn(self) -> int:
        """Tokens of a part of a prompt that is evicted on its own."""
        return self.min_prompt if self.min_turn is None else self.min_turn

    @property
    def most_window(self) -> int:
        """The largest window that a request may set."""
        if self.max_window is not None:
            return self.max_window
        return max(config.params.get("window", 0) for config in self.configs)

    @property
    def kernel_windows(self) -> list[int]:
        """Numbers of rows that a GPU's kernel for the window's attention is compiled for; others would take seconds."""
        return sorted({config.window_for(LONG) for config in self.configs if config.combines_rows_by})

    @property
    def reserved_for(self) -> list[str]:
        """Policies that requests may have and that need a reserve."""
        return [policy for policy in available() if self.allows(policy) and needs_reserve(policy)]

    def reserve_size(self, max_model_len: int, dims: inputs.HeadDims) -> int:
        """What workers reserve for them: as much as one prompt of ``max_model_len`` tokens needs, of any of them.

        Numbers for each layer and query head.
        """
        sizes = [inputs.size(lookup(name).needs, max_model_len, dims) for name in self.reserved_for]
        return max(sizes, default=0)

    def request_config(self, extra_args: Mapping[str, Any] | None) -> tuple[EvictionConfig, int | None]:
        """Apply one request's ``vllm_xargs`` to the server's options.

        Parameters that it does not give are those that the server has for the policy that it names, and the policy's
        defaults, of the server's kind; the budget is inherited unless given.

        Returns:
            The policy's configuration, and ``kv_prefix_len`` or None.

        Raises:
            KVEvictionError: one sentence naming the field.
        """
        fields = extra_args or {}
        check_names(fields)
        policy = fields.get("kv_eviction", self.policy)
        self._check_allowed(policy)
        budget = read.budget(fields["kv_budget"], "kv_budget") if "kv_budget" in fields else self.budget
        prefix_len = fields.get("kv_prefix_len")
        if prefix_len is not None:
            prefix_len = read.whole("kv_prefix_len", prefix_len)
        params = self._params_of_request(policy, fields)
        try:
            return known_config(policy, budget, params, self.defaults), prefix_len
        except ValueError as error:
            named = next((name for name in ("kv_budget", FIELD) if name in fields), "kv_eviction")
            raise KVEvictionError(f"{named}: {error}", named) from None

    def _params_of_request(self, policy: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """The server's parameters of a policy, with those of the request in their place."""
        if FIELD not in fields:
            return self.params_of(policy)
        given = parameters_of_request(policy, fields[FIELD], self.most_window)
        params = overridden(policy, self.params_of(policy), given)
        try:
            known_config(policy, ANY_BUDGET, params, self.defaults)
        except ValueError as error:
            raise KVEvictionError(f"{FIELD}: {error}", FIELD) from None
        return params

    def _check_allowed(self, policy: Any) -> None:
        """Refuse a policy that there is not, or that requests may not name."""
        if policy not in available():
            raise KVEvictionError(
                f"kv_eviction: unknown policy {policy!r} (choose from {', '.join(available())})",
                "kv_eviction",
            )
        if not self.allows(policy):
            raise KVEvictionError(
                f"kv_eviction: requests may not choose {policy} on this server (--kv-eviction-config.policies "
                f"{read.listed(self.policies)}): start it with --kv-eviction-config.policies {ALL}, or with a list "
                f"that names {policy}",
                "kv_eviction",
            )

    def plan(self, prompt_len: int, extra_args: Mapping[str, Any] | None = None) -> Plan:
        """Decide whether, where and how a request of ``prompt_len`` tokens is evicted.

        Raises:
            KVEvictionError: one sentence naming the field of ``vllm_xargs``.
        """
        config, prefix_len = self.request_config(extra_args)
        if prefix_len is not None and prefix_len > prompt_len:
            raise KVEvictionError(
                f"kv_prefix_len must not exceed the length of the prompt, {prompt_len} tokens, got {prefix_len}",
                "kv_prefix_len",
            )
        fields = extra_args or {}
        turns, budget = turns_of(fields, prompt_len, config), self.decoding.budget_of(fields)
        begins = answer_from(fields, prompt_len, turns[-1] if turns else prefix_len, budget)
        answer = self.decoding.phase(budget, begins) if budget else None
        if turns is not None:
            whole = self._first_part(config, whole_of(fields, turns))
            return plan_of_parts(config, turns, self.least_turn, answer, whole)
        return self.plan_with(config, begins if prefix_len is None else prefix_len, answer)

    def _first_part(self, config: EvictionConfig, whole: int) -> int:
        """So many tokens of a prompt in parts, which stay whole, as a part of their own; 0 where they fill no page that
        others could share, or no part is evicted."""
        return whole if whole >= self.page_size and config.evicts(LONG) else 0

    def plan_with(self, config: EvictionConfig, n: int, answer: Phase | None = None) -> Plan:
        """The plan of a prompt, or of a prefix, of n tokens under a configuration, and of its answer."""
        if n < self.min_prompt:
            return Plan(config, () if answer is None else (answer,))
        return plan_of(config, n, answer)

    def fields_in_scope(
        self,
        prompt_len: int,
        found: int | list[int] | None,
        extra_args: dict[str, Any] | None,
        missing: str | None = None,
        most_output: int | None = None,
    ) -> dict[str, Any] | None:
        """Check one request's ``vllm_xargs`` and add what the server's scope asks for.

        Args:
            prompt_len: tokens of the prompt.
            found: of a chat, tokens before the last user message, or after which its turns end; None if nobody knows.
            extra_args: the request's ``vllm_xargs``, left as they are.
            missing: why nobody knows, if the prompt is a chat.
            most_output: tokens that the answer may have.

        Raises:
            KVEvictionError: one sentence naming the field.
        """
        plan, fields = self.plan(prompt_len, extra_args), extra_args or {}
        if self.scope == "prompt" or plan.prompt is None or says_so(fields):
            return extra_args
        # For one token nothing has to be evicted: its KV is gone at once.
        nothing = found is None and most_output == 1
        in_scope = None if nothing else with_found(self.scope, fields, found, missing)
        if in_scope is not None:
            self.plan(prompt_len, in_scope)
            return in_scope
        # Keeping everything takes no parameters.
        return {name: value for name, value in fields.items() if name != FIELD} | {"kv_eviction": "full"}


def check_names(fields: Iterable[str]) -> None:
    """Refuse fields of ``vllm_xargs`` that begin like ours and are not.

    Raises:
        KVEvictionError: one sentence naming the field.
    """
    for name in fields:
        if name.startswith("kv_") and name not in (*KNOWN_FIELDS, *OTHERS_FIELDS):
            raise KVEvictionError(f"{name} is unknown (valid: {', '.join(REQUEST_FIELDS)})", name)


def repeat_prompts_of(params: Any) -> RepeatPrompts | None:
    """What the front-end found to ask a model that repeats a request's prompt; None if nothing is to be repeated.

    Args:
        params: the request's SamplingParams, or None.
    """
    fields = (params.extra_args if params else None) or {}
    return RepeatPrompts.from_lists(fields[REPEAT_ROWS]) if REPEAT_ROWS in fields else None


def options_of(vllm_config: Any) -> Options | None:
    """The options that vLLM's configuration carries; None when eviction is off."""
    config = vllm_config.additional_config
    if not isinstance(config, dict) or KEY not in config:
        return None
    return _parse(json.dumps(config[KEY], sort_keys=True))


def require_options(vllm_config: Any) -> Options:
    """The same where eviction is known to be on."""
    options = options_of(vllm_config)
    assert options is not None
    return options


@functools.lru_cache(maxsize=8)
def _parse(options: str) -> Options:
    """Options from their JSON; every request asks for its server's."""
    return Options.parse(json.loads(options))


def _take_engine_options(raw: dict[str, Any]) -> dict[str, Any]:
    """Take the engine's options out of those that were given; what is left are the policy's parameters."""
    check = raw.pop("check", os.environ.get("VLLM_KVEVICT_CHECK") == "1")
    engine = {"check": read.truth("--kv-eviction-config.check", check)}
    for name, option in ENGINE_OPTIONS.items():
        engine[name] = option.read(f"--kv-eviction-config.{name}", raw.pop(name, option.default))
    device = this_device()
    if device is not None and engine["page_size"] % device.page_multiple:
        raise KVEvictionError(
            f"--kv-eviction-config.page_size must be a multiple of {device.page_multiple}, got {engine['page_size']}"
        )
    return engine
