"""The scenario of throughput whose entries are stored in 8 bits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.load import INT8, Run, drive
from benchmarks.harness.measure import Estimate
from benchmarks.harness.scenarios import SPEED, Evicting, Round, Scenario, Target, counts, over, speed
from benchmarks.harness.server import Server
from vllm_kvevict.kernels import processor

OWN, TWICE, EIGHT_BITS = "own dtype", "own dtype, twice the memory", "8 bits"
OVER = "output tokens/s over"
BOUNDS = {SPEED: 1.8, f"{OVER} {TWICE}": 0.97}
AT_ONCE = {"bfloat16": 11, "float32": 23}
"""Requests that should run at once. An entry has 136 bytes in place of 256 or 512, so memory for two requests of 2,304
tokens and one block holds 8,914 or 17,829 tokens: one prompt that is read whole, and about so many that keep 410 of
their tokens and write 256 more."""


@dataclass(frozen=True)
class Quantised(Scenario):
    """Eviction in the model's dtype, with as much memory as the others and with twice as much, and in 8 bits.

    Stock vLLM has fp8 where its CPU attention serves that; elsewhere the model's dtype.
    """

    @property
    def evicting(self) -> dict[str, Evicting]:
        """The side that is held against the others."""
        return {EIGHT_BITS: (self.budgets[0], 0)}

    @property
    def sides(self) -> list[str]:
        """Stock vLLM, and three with eviction."""
        return [self.reference, OWN, TWICE, EIGHT_BITS]

    def flags(self, side: str) -> list[str]:
        """What a side's server is told that no other is."""
        if side == self.reference:
            return ["--kv-cache-dtype", "fp8"] if processor.level() in ("amx", "avx512") else []
        return super().flags(EIGHT_BITS) + ["--kv-cache-dtype", INT8] * (side == EIGHT_BITS)

    def of(self, side: str) -> "Quantised":
        """The same with the side's memory."""
        return replace(self, pool=2 * self.pool) if side == TWICE else self

    def server(self, side: str, threads: int | None) -> Server:
        """A side's server, in its memory."""
        return Scenario.server(self.of(side), side, threads)

    async def send(self, server: Server, turn: str, number: int) -> Run:
        """Send the requests; the same ones to all sides."""
        dtype = INT8 if turn == EIGHT_BITS else self.dtype
        return await drive(server, self.load(number), self.of(turn).kv_bytes(), dtype)

    def ratios(self, rounds: Sequence[Round]) -> dict[str, dict[str, Estimate]]:
        """What each side with eviction reached over stock vLLM, and 8 bits over the others."""
        found = {side: {SPEED: over(rounds, speed, side, self.reference)} for side in self.sides[1:]}
        for of in (OWN, TWICE):
            found[EIGHT_BITS][f"{OVER} {of}"] = over(rounds, speed, EIGHT_BITS, of)
        return found

    def targets(self, name: str, rounds: Sequence[Round]) -> list[Target]:
        """What 8 bits should reach."""
        reached = self.ratios(rounds)[EIGHT_BITS]
        speeds = [Target(f"{EIGHT_BITS}: {of}", reached[of], bound) for of, bound in BOUNDS.items()]
        return [*speeds, *counts(self, rounds, AT_ONCE[self.dtype], 0)]


SCENARIOS = {
    "quantised": Quantised(
        "memory for 2 of 24 requests: 8 bits let more run", *(24, 2048, 256), pool=2, rounds=5
    )
}
