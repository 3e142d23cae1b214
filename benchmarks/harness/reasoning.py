"""Scenarios of throughput whose answers are long, and evicted while they are written."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.measure import USUAL, kind
from benchmarks.harness.scenarios import SPEED, STOCK, Evicting, Round, Scenario, Target, counts

POLICY = "ada-snapkv"
"""Whose side is held against the targets."""
EVICTING = "share of the time spent on evicting answers"
SPEEDS, USUAL_SPEED = {USUAL: 2.4}, 2.0
"""Output tokens/s of ``reasoning-long`` over stock's, by level and dtype, and elsewhere."""
FITS_SPEED = 0.97
AT_ONCE, MOST_EVICTING = 12, 0.08
"""Requests at once in every run of it, and the share of a run that evictions may take."""


@dataclass(frozen=True)
class LongAnswers(Scenario):
    """Prompts are kept whole; answers are evicted while they are written, by ``policy``.

    Attributes:
        decode_budget: entries of an answer that each KV head keeps on average.
        decode_interval: tokens from one eviction to the next.
    """

    budgets: tuple[float, ...] = (1.0,)
    decode_budget: int = 448
    decode_interval: int = 128

    @property
    def evicting(self) -> dict[str, Evicting]:
        """The one side with eviction, and the budget of its prompts."""
        return {self.policy: (self.budgets[0], 0)}

    @property
    def evicts(self) -> bool:
        """Whether answers are long enough to be evicted; an answer's last token is not stored."""
        return self.output_len > self.decode_budget + self.decode_interval

    def flags(self, side: str) -> list[str]:
        """What a side's server is told that no other is."""
        if side == STOCK:
            return []
        return [
            *("--kv-eviction", POLICY, "--kv-budget", f"{self.budgets[0]:g}"),
            *("--kv-decode-budget", str(self.decode_budget)),
            *("--kv-eviction-config.decode_interval", str(self.decode_interval)),
            *("--kv-eviction-config.decode_policy", self.policy),
        ]

    def targets(self, name: str, rounds: Sequence[Round]) -> list[Target]:
        """What the usual policy should reach."""
        if self.policy != POLICY:
            return []
        reached = self.ratios(rounds)[POLICY]
        bound = SPEEDS.get(kind(self.dtype), USUAL_SPEED) if self.evicts else FITS_SPEED
        speed = Target(f"{POLICY}: {SPEED}", reached[SPEED], bound)
        if not self.evicts:
            return [speed]
        most = max(one[POLICY].evict_share for one in rounds)
        share = Target(EVICTING, most, MOST_EVICTING, at_most=True)
        return [speed, *counts(self, rounds, AT_ONCE, 0), share]


SCENARIOS = {
    "reasoning-long": LongAnswers(
        "answers of 4,096 tokens, memory for 3 of 24 requests", *(24, 512, 4096), pool=3
    ),
    "reasoning-fits": LongAnswers(
        "everything fits and no answer is evicted: what being able to costs", *(8, 512, 576), pool=8, rounds=7
    ),
}
