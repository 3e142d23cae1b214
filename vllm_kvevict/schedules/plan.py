"""What happens to one request: when and how it is evicted."""

import bisect
from dataclasses import dataclass

from vllm_kvevict.policies import EvictionConfig, needs
from vllm_kvevict.schedules.base import Schedule
from vllm_kvevict.schedules.registry import schedule_of


def needs_reserve(policy: str) -> bool:
    """Whether requests of a policy hold so much beside their KV that workers keep a reserve for it."""
    return "col_sums" in needs(policy)


@dataclass(frozen=True)
class Plan:
    """What happens to one admission of one request; decided by the scheduler, carried out by every worker.

    Attributes:
        request_id: vLLM's internal request id.
        epoch: 1 for the first admission, +1 after each preemption.
        evict_at: number of tokens after which the request is evicted, for the last time; None when it is kept whole.
        config: the policy and its parameters.
        cuts: earlier numbers of tokens after which it is evicted, ascending.
        recycles: whether it is evicted layer by layer, each layer into the pages of the one before, if everything up
            to evict_at is read in one step.
        reserved_at: where in the workers' reserve its tokens begin, if the policy needs one.
    """

    request_id: str
    epoch: int
    evict_at: int | None
    config: EvictionConfig
    cuts: tuple[int, ...] = ()
    recycles: bool = False
    reserved_at: int = 0

    @property
    def schedule(self) -> Schedule:
        """The way in which the policy evicts."""
        return schedule_of(self.config)

    @property
    def reserved(self) -> int:
        """Tokens of the workers' reserve that it takes until its eviction."""
        return self.evict_at if self.evict_at is not None and needs_reserve(self.config.policy) else 0

    @property
    def probe(self) -> int:
        """Token rows that accompany the step that reaches one of ``cuts``: the prompt's last tokens, up to evict_at."""
        if self.evict_at is None or not self.cuts:
            return 0
        return self.schedule.probe(self.config, self.evict_at)

    def window(self, position: int) -> slice:
        """Tokens whose queries choose at an eviction, if they are not a probe's."""
        assert self.evict_at is not None
        return self.schedule.window(self.config, self.evict_at, position)

    def next_eviction(self, tokens: int) -> int | None:
        """The first position of an eviction after ``tokens`` tokens, None when there is none."""
        if self.evict_at is None or tokens >= self.evict_at:
            return None
        later = bisect.bisect_right(self.cuts, tokens)
        return self.cuts[later] if later < len(self.cuts) else self.evict_at
