"""Scenarios of throughput with speculative decoding: answers that go on as their prompt does.

Ngram drafts the tokens that followed the last ones earlier in the text, so it pays where answers repeat their prompt.
A draft model guesses. How well a model copies from an evicted cache is measured by ``vllm-kvevict quality``.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.load import Load
from benchmarks.harness.measure import Estimate
from benchmarks.harness.models import make_variant
from benchmarks.harness.scenarios import (
    SCRATCH,
    SPEED,
    STOCK,
    Evicting,
    Round,
    Scenario,
    Target,
    model,
    over,
    speed,
)
from benchmarks.harness.sides import FIRST_WORD, VOCAB

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
LOUDER = 50
"""Embeddings over those of the random model."""
DRAFTS = 3
"""Tokens that a draft model guesses at once."""
OVER_PLAIN = "output tokens/s over those without drafts"


@dataclass(frozen=True)
class CopyLoad(Load):
    """Requests that count in token ids and miscount now and then; see Load.

    Attributes:
        every: tokens between two mistakes, on average.
    """

    every: int = 1

    def prompts(self) -> list[tuple[list[int], int]]:
        """Token ids and output length of every request."""
        choose = random.Random(f"{self}")
        words = range(FIRST_WORD, VOCAB)

        def prompt() -> list[int]:
            start = choose.choice(words)
            right = [words[(start + index) % len(words)] for index in range(self.input_len)]
            return [choose.choice(words) if choose.random() < 1 / self.every else token for token in right]

        return [(prompt(), self.output_len) for _ in range(self.requests)]


@dataclass(frozen=True)
class Copying(Scenario):
    """Answers that go on as their prompt does, where drafts pay; eviction without and with drafts.

    A random model repeats nothing. The model here has the layers of the other one, but always predicts the next number,
    whatever its cache holds. Prompts count too, with a few mistakes, where drafts are rejected. So all sides draft and
    accept the same tokens, and their speeds show what drafts cost.

    Attributes:
        every: see CopyLoad.
        method: how vLLM drafts.
    """

    every: int = 25
    method: str = "ngram"

    def drafted(self, side: str) -> str:
        """The side that drafts."""
        return f"{side}, {self.method}"

    def plain(self, side: str) -> str:
        """The side without drafts."""
        return side.removesuffix(self.drafted(""))

    @property
    def reference(self) -> str:
        """Stock vLLM drafts, too."""
        return self.drafted(STOCK)

    @property
    def evicting(self) -> dict[str, Evicting]:
        """The sides with eviction and drafts."""
        return {self.drafted(side): how for side, how in super().evicting.items()}

    @property
    def sides(self) -> list[str]:
        """Also those without drafts."""
        return [self.reference, *(one for side in self.evicting for one in (self.plain(side), side))]

    def flags(self, side: str) -> list[str]:
        """What a side's server is told that no other is."""
        plain = self.plain(side)
        drafting = [] if plain == side else ["--speculative-config", json.dumps(self.drafts())]
        return [*drafting, *super().flags(plain if plain == STOCK else self.drafted(plain))]

    def drafts(self) -> dict[str, Any]:
        """What vLLM is told of its drafts."""
        if self.method == "ngram":
            return NGRAM
        drafter = str(copying_drafter(max(4096, self.max_len)))
        return {"method": self.method, "model": drafter, "num_speculative_tokens": DRAFTS}

    def environment(self, threads: int | None) -> dict[str, str]:
        """Numba drafts; with threads of its own on every core it would take the OpenMP threads along."""
        return super().environment(threads) | {"NUMBA_NUM_THREADS": str(threads or 1)}

    def model(self) -> Path:
        """The one that counts."""
        return copying_model(max(4096, self.max_len))

    def load(self, seed: int) -> CopyLoad:
        """The requests of one run."""
        return CopyLoad(self.requests, self.input_len, self.output_len, seed=seed, every=self.every)

    def figures(self, side: str, rounds: Sequence[Round]) -> dict[str, Estimate]:
        """Also what drafts bring beside eviction."""
        plain = over(rounds, speed, side, self.plain(side))
        return super().figures(side, rounds) | {OVER_PLAIN: plain}

    def targets(self, name: str, rounds: Sequence[Round]) -> list[Target]:
        """Drafts should not cost more than they bring, beside stock vLLM with drafts and beside no drafts."""
        return [
            Target(f"{side}: {measure}", reached[measure], 1.0)
            for side, reached in self.ratios(rounds).items()
            for measure in (SPEED, OVER_PLAIN)
        ]


def copying_model(max_len: int) -> Path:
    """The random Llama of the speed benchmarks, made to answer each token with the next one, in a circle."""
    from safetensors.torch import load_file

    base = model(max_len)
    weights = load_file(base / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"] * LOUDER
    weights["model.embed_tokens.weight"] = embeddings
    head = embeddings.roll(1, 0)
    head[FIRST_WORD] = embeddings[VOCAB - 1]
    head[:FIRST_WORD] = 0
    weights["lm_head.weight"] = head
    return make_variant(SCRATCH / f"copying-{max_len}", base, weights)


def copying_drafter(max_len: int) -> Path:
    """The first layer of the model that counts, which counts as well."""
    from safetensors.torch import load_file

    target = copying_model(max_len)
    weights = load_file(target / "model.safetensors")
    kept = {name: one for name, one in weights.items() if ".layers." not in name or ".layers.0." in name}
    return make_variant(SCRATCH / f"copying-drafter-{max_len}", target, kept, num_hidden_layers=1)


COPY = Copying("answers go on as the prompt does", *(4, 2048, 384), pool=4, budgets=(1.0, 0.2), rounds=5)
SCENARIOS = {
    "speculation-copy": COPY,
    # Its own KV needs room as well.
    "speculation-draft-model": replace(
        COPY, about="the same, drafted by a model of one layer", pool=5, method="draft_model"
    ),
}
