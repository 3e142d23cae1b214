"""What happens to a request: when and how it is evicted, and what is settled when it is admitted.

Owns nothing: a plan has no state, and is equal in every process, since it follows from configuration and length alone.
"""

import bisect
import functools
from dataclasses import dataclass

from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.policies.registry import lookup
from vllm_kvevict.schedules import inputs
from vllm_kvevict.schedules.base import Schedule
from vllm_kvevict.schedules.registry import begins_with_cached, leaves_cached, schedule_of


def needs_reserve(policy: str) -> bool:
    """Whether requests of a policy hold so much beside their KV that workers keep a reserve for it."""
    return bool(inputs.shapes(lookup(policy).needs, 1, 1))


@dataclass(frozen=True)
class Plan:
    """When and how a request is evicted. It follows from its configuration and its length, in every process alike.

    Attributes:
        config: the policy and its parameters.
        evict_at: number of tokens after which it is evicted for the last time; None when it is kept whole.
        positions: all numbers of tokens after which it is evicted, ascending; ``evict_at`` is the last.
    """

    config: EvictionConfig
    evict_at: int | None
    positions: tuple[int, ...] = ()

    @property
    def schedule(self) -> Schedule:
        """The way in which the policy evicts."""
        return schedule_of(self.config)

    def reserved(self, dims: inputs.HeadDims, in_one_step: bool = False) -> int:
        """What it takes of the workers' reserve until its eviction: numbers for each layer and query head.

        Args:
            in_one_step: whether one step reads all up to its eviction: it scores by the queries themselves.
        """
        if self.evict_at is None:
            return 0
        return inputs.size(self.config.inputs, self.evict_at, dims, in_one_step)

    def next_eviction(self, tokens: int) -> int | None:
        """The first position of an eviction after ``tokens`` tokens, None when there is none."""
        later = bisect.bisect_right(self.positions, tokens)
        return self.positions[later] if later < len(self.positions) else None

    def most_cached(self, tokens: int) -> int:
        """The most tokens that a request may begin with which an earlier one has left uncompressed.

        The last one is computed in any case, and those whose queries choose: queries are not stored.

        Args:
            tokens: to be read.
        """
        return tokens - 1 if self.evict_at is None else self._most_cached

    @functools.cached_property
    def _most_cached(self) -> int:
        # Asked of every waiting request in every step.
        n = self.evict_at or 0
        return n - max(1, self.config.window_for(n)) if begins_with_cached(self.config) else 0

    def leaves(self, tokens: int) -> int:
        """Tokens that a request leaves uncompressed for others once so many are read."""
        if self.evict_at is None:
            return tokens
        return self.evict_at if leaves_cached(self.config) else 0

    def extra_tokens(self, position: int) -> int:
        """Tokens before ``evict_at`` that a step that ends at ``position`` computes as well, only to choose by them."""
        if self.evict_at is None or position >= self.evict_at or position not in self.positions:
            return 0
        return self.schedule.probe(self.config, self.evict_at)

    def extra_entries(self, tokens: int, page_size: int) -> int:
        """Entries that each row of a request with so many tokens may hold beside them, until it is evicted."""
        if self.evict_at is None or tokens != self.evict_at:
            return 0
        return self.schedule.extra_entries(self.config, self.evict_at, page_size)

    def window(self, position: int) -> slice:
        """Tokens whose queries choose at an eviction, if they are not such extra ones."""
        assert self.evict_at is not None
        return self.schedule.window(self.config, self.evict_at, position)


@functools.lru_cache(maxsize=128)
def plan_of(config: EvictionConfig, n: int) -> Plan:
    """The plan of a prompt, or of a prefix, of n tokens."""
    if not config.evicts(n):
        return Plan(config, None)
    return Plan(config, n, schedule_of(config).positions(config, n))


@dataclass(frozen=True)
class Admission:
    """One admission of one request, as the scheduler tells it to every worker.

    Attributes:
        request_id: vLLM's internal request id.
        epoch: 1 for the first admission, +1 after each preemption.
        plan: the request's, the same in each of its admissions.
        by_layer: whether its first step evicts it, layer by layer, each layer into the pages of the one before.
        reserved_at: where in the workers' reserve its place begins; None if it needs none.
        prefix: number of the cached prefix that it begins with, which is evicted already; None if it reads it itself.
        segments: number of each segment that it begins with, which are not, and how many columns of it.
        cached: tokens in them.
    """

    request_id: str
    epoch: int
    plan: Plan
    by_layer: bool = False
    reserved_at: int | None = None
    prefix: int | None = None
    segments: tuple[tuple[int, int], ...] = ()
    cached: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that it has stored from the start."""
        return self.cached if self.prefix is None else self.plan.evict_at or 0
