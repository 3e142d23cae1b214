"""How answers are evicted while they are written, as the server's options say."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvevict.decode_interval import default_interval
from vllm_kvevict.engine.errors import KVEvictionError
from vllm_kvevict.engine.parameters import known_config
from vllm_kvevict.policies import EvictionConfig, parameters
from vllm_kvevict.policies.answers import default_window
from vllm_kvevict.schedules.plan import Phase, answer_phase

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

    def phase(self, budget: int, begins: int, name: str = "--kv-decode-budget") -> Phase:
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
