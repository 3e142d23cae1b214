"""What the user asked for: the server's options.

The options travel as plain JSON in ``VllmConfig.additional_config["kv_eviction"]``, so that every process
(front-end, engine core, workers) reads the same thing without sharing an object.
"""

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvevict.engine import read
from vllm_kvevict.engine.decoding import DecodeOptions
from vllm_kvevict.engine.devices import this_device
from vllm_kvevict.engine.errors import KVEvictionError
from vllm_kvevict.engine.names import KEY as KEY
from vllm_kvevict.engine.parameters import ANY_BUDGET, check_parameters, known_config
from vllm_kvevict.engine.read import ALL, ENGINE_OPTIONS, UNRESERVED
from vllm_kvevict.policies import EvictionConfig, available
from vllm_kvevict.policies.answers import policy_for_answers
from vllm_kvevict.policies.inputs import Q_WINDOW
from vllm_kvevict.policies.registry import decoding_policies, lookup, policies_for_parts
from vllm_kvevict.schedules import inputs
from vllm_kvevict.schedules.plan import Phase, Plan, needs_reserve
from vllm_kvevict.schedules.registry import can_look_ahead, lookahead_policies, plan_of, schedule_for

DEFAULT_BUDGET = 0.2
LONG = 1 << 40  # tokens of a prompt that is longer than any window

ENGINE_DEFAULTS = {name: option.default for name, option in ENGINE_OPTIONS.items()}

SCOPE_FLAG = "--kv-eviction-config.scope"


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
        lookahead: tokens of an answer that are stored before its prompt is evicted; 0: it is evicted once it is read.
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
    lookahead: int = ENGINE_DEFAULTS["lookahead"]
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
        options._check_scope()
        options._check_lookahead()
        if decode_budget:
            options.decoding.phase(decode_budget, 1)
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

    def _check_scope(self) -> None:
        """Refuse a policy, or budget, that cannot evict what the scope says, and what only another scope does."""
        if self.scope == "turns":
            tokens = int(self.budget) if self.budget > 1 else None
            check_parts(self.policy, tokens, f"{SCOPE_FLAG} {self.scope}")
        elif self.keep_first:
            raise KVEvictionError(
                f"--kv-eviction-config.keep_first has no effect with scope {self.scope}, which has no parts: use "
                f"{SCOPE_FLAG} turns"
            )

    def _check_lookahead(self) -> None:
        """Refuse what cannot wait for an answer."""
        flag = "--kv-eviction-config.lookahead"
        if self.lookahead and not can_look_ahead(self.policy):
            able = ", ".join(lookahead_policies())
            raise KVEvictionError(
                f"{flag} cannot be used with --kv-eviction {self.policy} (choose from {able})"
            )
        if self.lookahead and self.scope != "prompt":
            raise KVEvictionError(f"{flag} needs {SCOPE_FLAG} prompt, got {self.scope}")
        answer = self.decoding.default_phase
        if answer is not None and self.lookahead > answer.most_lookahead:
            raise KVEvictionError(
                f"{flag} must be at most {answer.most_lookahead} with --kv-decode-budget {self.decode_budget}, since "
                f"the prompt is evicted before the answer is, got {self.lookahead}"
            )

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
    def kept_queries(self) -> tuple[int, int]:
        """Queries that workers keep of a request at most, 0 for none; and entries that each of its rows has at least
        when they choose."""
        answer, found = self.decoding.default_phase, []
        if answer is not None and answer.keeps_queries:
            found.append((answer.window, answer.positions[0] - answer.begins))
        reading = [
            config
            for config in self.configs
            if self.lookahead
            and can_look_ahead(config.policy)
            and Q_WINDOW in (*lookup(config.policy).needs, *lookup(config.policy).window_needs)
        ]
        if reading:
            # The server's own windows may be wider than those of requests.
            windows = (self.most_window, *(config.window_for(LONG) for config in reading))
            found.append((max(self.lookahead, *windows), max(1, self.min_prompt) + self.lookahead))
        if not found:
            return 0, 0
        queries, entries = zip(*found, strict=True)
        return max(queries), min(entries)

    @property
    def kernel_windows(self) -> list[int]:
        """Numbers of rows that a GPU's kernel for the window's attention is compiled for; others would take seconds."""
        windows = {config.window_for(LONG) for config in self.configs if config.combines_rows_by}
        return sorted(windows | {max(window, self.lookahead) for window in windows})

    @property
    def most_repeated(self) -> int:
        """The most tokens of a step that repeats a prompt; 0 where no request may have a policy that does."""
        found = ((schedule_for(config.policy), config.params) for config in self.configs)
        return max(
            (schedule.most_extra_rows(of) for schedule, of in found if schedule.repeats_prompt), default=0
        )

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

    @property
    def config(self) -> EvictionConfig:
        """The server's own policy, which requests have that name no other."""
        return known_config(self.policy, self.budget, self.params, self.defaults)

    def evicts(self, config: EvictionConfig, n: int) -> bool:
        """Whether a prompt, or a prefix, of n tokens loses entries under a configuration."""
        return n >= self.min_prompt and config.evicts(n)

    def plan_with(
        self, config: EvictionConfig, n: int, answer: Phase | None = None, lookahead: int = 0
    ) -> Plan:
        """The plan of such a prompt, or prefix, and of its answer, of which ``lookahead`` tokens are awaited first."""
        if self.evicts(config, n):
            return plan_of(config, n, answer, lookahead)
        return Plan(config, () if answer is None else (answer,))


def check_parts(policy: str, tokens: int | None, name: str, field: str | None = None) -> None:
    """Refuse what cannot evict a prompt part by part.

    Args:
        tokens: the budget, if it is a number of tokens.
        name: the field or flag that asks for it.
        field: as of :class:`KVEvictionError`.

    Raises:
        KVEvictionError: one sentence that begins with the name.
    """
    if not lookup(policy).parts:
        choices = ", ".join(policies_for_parts())
        raise KVEvictionError(f"{name} cannot be used with policy {policy} (choose from {choices})", field)
    if tokens is not None:
        needs = (
            "a budget that is a share of the tokens, from 0 to 1, since each part keeps a share of its own"
        )
        raise KVEvictionError(f"{name} needs {needs}, got {tokens} tokens", field)


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
