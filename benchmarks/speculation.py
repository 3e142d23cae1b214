"""Speculative decoding by ngram: stock vLLM with it, and eviction without and with it, on answers that copy the prompt.

Ngram drafts the tokens that followed the last ones earlier in the text, so it pays where answers repeat their prompt. A
random model repeats nothing. The model here has the layers of the other benchmarks' model, but always predicts the next
number, whatever its cache holds. Prompts count too, with a few mistakes, where drafts are rejected. So all sides draft
and accept the same tokens, and their speeds show what drafts cost. How well a model copies from an evicted cache is
measured by benchmarks.quality.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import command
from benchmarks.harness.bench import Bench
from benchmarks.harness.load import Load, Run, drive
from benchmarks.harness.measure import Estimate, paired_ratio
from benchmarks.harness.models import make_variant
from benchmarks.harness.scenarios import BLOCK, SCRATCH, STOCK, Target, model, show_targets, token_bytes
from benchmarks.harness.server import Server, alone, cpu_environment, run_benchmark
from benchmarks.harness.sides import FIRST_WORD, VOCAB

POLICY = "ada-snapkv"
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
LOUDER = 50
"""Embeddings over those of the random model."""


def with_ngram(side: str) -> str:
    """The side that drafts."""
    return f"{side}, ngram"


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
class Scenario:
    """A load and its sides; everything fits the memory.

    Attributes:
        about: shown in help and results.
        requests, input_len, output_len: see Load.
        every: see CopyLoad.
        budgets: of the sides with eviction, each without and with drafts.
        rounds: how often every side runs.
        dtype: in which the servers compute and keep the KV.
    """

    about: str
    requests: int
    input_len: int
    output_len: int
    every: int
    budgets: tuple[float, ...] = (1.0, 0.2)
    rounds: int = 5
    dtype: str = "bfloat16"

    @property
    def evicting(self) -> dict[str, float]:
        """Name and budget of the sides with eviction and without drafts."""
        return {f"budget {budget:g}": budget for budget in self.budgets}

    @property
    def sides(self) -> list[str]:
        """All that run."""
        return [with_ngram(STOCK), *(name for side in self.evicting for name in (side, with_ngram(side)))]

    @property
    def max_len(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.input_len + self.output_len

    def kv_bytes(self) -> int:
        """KV memory, with the one block that vLLM keeps for itself."""
        return (self.requests * -(-self.max_len // BLOCK) + 1) * BLOCK * token_bytes(self.dtype)

    def load(self, seed: int) -> CopyLoad:
        """The requests of one round."""
        return CopyLoad(self.requests, self.input_len, self.output_len, seed=seed, every=self.every)


SCENARIOS = {"copy": Scenario("answers go on as the prompt does", *(4, 2048, 384), every=25)}


@dataclass(frozen=True)
class Drafting:
    """What a load took and showed on one side.

    Attributes:
        run: see Run.
        drafted, accepted: draft tokens.
    """

    run: Run
    drafted: int
    accepted: int

    @property
    def speed(self) -> float:
        """Output tokens per second."""
        return self.run.tokens_per_second


Round = dict[str, Drafting]


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


def make_server(path: Path, scenario: Scenario, side: str, threads: int | None) -> Server:
    """The server of a side, not started yet."""
    flags = [
        *("--max-model-len", str(scenario.max_len), "--dtype", scenario.dtype),
        *("--kv-cache-memory-bytes", str(scenario.kv_bytes()), "--disable-uvicorn-access-log"),
    ]
    if side.endswith(with_ngram("")):
        flags += ["--speculative-config", json.dumps(NGRAM)]
    if not side.startswith(STOCK):
        budget = scenario.evicting[side.removesuffix(with_ngram(""))]
        flags += ["--kv-eviction", POLICY, "--kv-budget", f"{budget:g}"]
    log = SCRATCH / f"speculation-{side.replace(', ', '-').replace(' ', '-')}.log"
    # Numba drafts; with threads of its own on every core it would take the OpenMP threads along.
    env = cpu_environment(threads, 1) | {"NUMBA_NUM_THREADS": str(threads)}
    return Server(path, log, flags, env)


async def run_once(server: Server, scenario: Scenario, seed: int) -> Drafting:
    """Send a load to one side; other seeds have other prompts."""
    before = await server.snapshot()
    run = await drive(server, scenario.load(seed), scenario.kv_bytes(), scenario.dtype)
    after = await server.snapshot()
    drafted = after.draft_tokens - before.draft_tokens
    return Drafting(run, drafted, after.accepted_drafts - before.accepted_drafts)


async def run_rounds(bench: Bench, name: str, scenario: Scenario) -> list[Round]:
    """All rounds; of each what every side did."""
    rounds = []
    path = copying_model(max(4096, scenario.max_len))
    async with AsyncExitStack() as stack:
        servers = {}
        for side in scenario.sides:
            bench.say(f"{name}, {side}: starting")
            server = make_server(path, scenario, side, bench.threads)
            servers[side] = await stack.enter_async_context(server)
            await run_once(servers[side], replace(scenario, requests=2, output_len=32), 0)
        for number in range(scenario.rounds):
            first = number % len(scenario.sides)
            done = {}
            for side in scenario.sides[first:] + scenario.sides[:first]:
                bench.say(f"{name}, round {number + 1}, {side}")
                with alone(servers[side], servers.values()):
                    done[side] = await run_once(servers[side], scenario, number + 1)
                bench.bar.advance(bench.task)
            rounds.append(done)
    return rounds


def figures(scenario: Scenario, rounds: Sequence[Round]) -> list[Target]:
    """What drafts should reach beside eviction, and what they did."""

    def ratio(side: str, base: str) -> Estimate:
        return paired_ratio([one[side].speed for one in rounds], [one[base].speed for one in rounds])

    results = []
    for side in scenario.evicting:
        ours = with_ngram(side)
        results.append(
            Target(f"{ours}: tokens/s over stock's with ngram", ratio(ours, with_ngram(STOCK)), 1.0)
        )
        results.append(Target(f"{ours}: tokens/s over those without ngram", ratio(ours, side), 1.0))
    return results


def table(title: str, scenario: Scenario, rounds: Sequence[Round]) -> Table:
    """Medians over the rounds."""
    result = Table(title=title)
    for column in ("", "seconds", "tokens/s", "first token, s", "drafted", "accepted"):
        result.add_column(column, justify="right" if column else "left")
    for side in scenario.sides:
        seen = [one[side] for one in rounds]
        result.add_row(
            side,
            f"{median(one.run.wall for one in seen):.1f}",
            f"{median(one.speed for one in seen):.1f}",
            f"{median(one.run.latency['ttft']['p50'] for one in seen):.2f}",
            f"{median(one.drafted for one in seen):.0f}",
            f"{median(one.accepted for one in seen):.0f}",
        )
    return result


SIZES = {
    "requests": "how many",
    "input_len": "tokens of each prompt",
    "output_len": "tokens of each answer",
    "every": "tokens between two mistakes in a prompt, on average",
    "rounds": "how often every side runs",
}
"""What of a scenario can be changed."""


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, dict[str, Scenario]]:
    """Read the command line: the options, and what to run by name."""
    return command.parse("speculation", __doc__, SCENARIOS, SIZES, argv)


def summary(name: str, scenario: Scenario, rounds: list[Round], console: Console) -> dict[str, Any]:
    """Print what a scenario showed; what its record says."""
    own = SCENARIOS[name]
    console.print(table(f"{name}: {scenario.about}, {POLICY}, {scenario.dtype}", scenario, rounds))
    targets = figures(scenario, rounds) if command.is_judged(scenario, own, rounds) else []
    return {
        "scenario": asdict(scenario) | {"kv_bytes": scenario.kv_bytes(), "policy": POLICY, "ngram": NGRAM},
        "rounds": [{side: asdict(drafting) for side, drafting in one.items()} for one in rounds],
        "targets": show_targets(console, targets),
    }


def main() -> int:
    """Run the scenarios; the exit code."""
    arguments, scenarios = parse_arguments()
    runs = sum(len(scenario.sides) * scenario.rounds for scenario in scenarios.values())
    return run_benchmark(command.measure("speculation", arguments, scenarios, runs, run_rounds, summary))


if __name__ == "__main__":
    sys.exit(main())
