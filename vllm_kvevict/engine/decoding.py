"""How answers are evicted while they are written, as the server's options and a request's fields say."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvevict.decode_interval import default_interval
from vllm_kvevict.engine import read
from vllm_kvevict.engine.errors import KVEvictionError
from vllm_kvevict.engine.parameters import known_config
from vllm_kvevict.policies import EvictionConfig, parameters
from vllm_kvevict.policies.answers import default_window
from vllm_kvevict.policies.registry import lookup
from vllm_kvevict.schedules.plan import Phase, answer_phase

BUDGET, ANSWER_FROM = "kv_decode_budget", "kv_answer_from"
"""The fields of ``vllm_xargs``."""

LEAST_BUDGET = 4
"""Entries of an answer; with fewer, evictions would overtake what the scheduler hears of them."""


@dataclass(frozen=True)
class DecodeOptions:
    """The server's options for answers.

    Attributes:
        budget: entries of an answer that each KV head keeps on average; 0: answers are kept.
        interval, window: as given, None for the defaults.
        policy: that evicts answers.
        params: of the policy, as the server has them for prompts.
        defaults: whose values other parameters take.
        page_size: tokens of one KV head in a page.
    """

    budget: int
    interval: int | None
    window: int | None
    policy: str
    params: Mapping[str, Any]
    defaults: str
    page_size: int

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            KVEvictionError: one sentence naming the flag.
        """
        if self.budget:
            self.phase(self.budget, 1, "--kv-decode-budget")

    def config(self, budget: int) -> EvictionConfig:
        """The policy for an answer. Raises ValueError as of the constructor.

        Only the answer's own entries compete, so none of them are the first tokens of a text.
        """
        params, known = dict(self.params), parameters(self.policy)
        for name, value in (("window", self.window_for()), ("sinks", 0), ("skip_layers", 0)):
            if name in known:
                params[name] = value
        return known_config(self.policy, budget, params, self.defaults)

    def window_for(self) -> int:
        """Last tokens of an answer that always stay."""
        if self.window is not None:
            return self.window
        return default_window(self.policy)

    def interval_for(self, budget: int) -> int:
        """Tokens from one eviction to the next, at a budget."""
        if self.interval is not None:
            return self.interval
        return default_interval(budget, self.page_size)

    def phase(self, budget: int, begins: int, name: str = BUDGET) -> Phase:
        """The phase of an answer behind a prompt of ``begins`` tokens.

        Raises:
            KVEvictionError: one sentence naming the flag or field.
        """
        if budget < LEAST_BUDGET:
            raise KVEvictionError(f"{name} must be 0 (off) or at least {LEAST_BUDGET}, got {budget}", name)
        try:
            config = self.config(budget)
        except ValueError as error:
            raise KVEvictionError(f"{name}: {error}", name) from None
        return answer_phase(config, self.interval_for(budget), begins)

    @property
    def default_phase(self) -> Phase | None:
        """The phase of an answer whose request says nothing of it; None if it is kept."""
        return self.phase(self.budget, 1) if self.budget else None

    def budget_of(self, fields: Mapping[str, Any]) -> int:
        """The budget of one request's answer, 0 where it is kept.

        Raises:
            KVEvictionError: one sentence naming the field.
        """
        if BUDGET not in fields:
            return self.budget
        budget = read.whole(BUDGET, fields[BUDGET], least=0)
        if budget and not self.budget:
            raise KVEvictionError(
                f"{BUDGET} needs a server that was started with --kv-decode-budget, which sets memory aside for it",
                BUDGET,
            )
        if budget > self.budget and lookup(self.policy).compares_entries:
            raise KVEvictionError(
                f"{BUDGET} must be at most {self.budget}, the server's --kv-decode-budget: its policy {self.policy} "
                f"compares every entry with every other, got {budget}",
                BUDGET,
            )
        return budget


def answer_from(fields: Mapping[str, Any], prompt_len: int, prefix_len: int | None, budget: int) -> int:
    """Tokens of a prompt before those that count as an answer already written; all of them if nothing is said.

    Raises:
        KVEvictionError: one sentence naming the field.
    """
    if ANSWER_FROM not in fields:
        return prompt_len
    first = read.whole(ANSWER_FROM, fields[ANSWER_FROM])
    if not budget:
        raise KVEvictionError(
            f"{ANSWER_FROM} says where an answer begins that is evicted, but {BUDGET} is 0", ANSWER_FROM
        )
    if not (prefix_len or 1) <= first <= prompt_len:
        least = "1" if prefix_len is None else f"kv_prefix_len ({prefix_len})"
        raise KVEvictionError(
            f"{ANSWER_FROM} must be from {least} to the length of the prompt, {prompt_len} tokens, got {first}",
            ANSWER_FROM,
        )
    return first
