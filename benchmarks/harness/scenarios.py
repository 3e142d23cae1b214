"""What the serving benchmarks compare: the model, the loads and the memory they run in, the sides, the targets."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from math import nan
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from benchmarks.harness.baseline import Baseline
from benchmarks.harness.load import HEAD_DIM, Load, Run, drive, entry_bytes, longest
from benchmarks.harness.measure import Estimate, Kind, kind, paired_ratio
from benchmarks.harness.server import Server, cpu_environment
from benchmarks.harness.tables import Columns

LAYERS, HEADS, KV_HEADS, HIDDEN = 8, 8, 4, 512
MIXED: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 512},
    "granitemoehybrid": {"mamba_n_heads": 16, "mamba_d_head": 64, "shared_intermediate_size": 2 * HIDDEN},
}
"""Sizes of models with windows or states beside layers that are evicted."""
BLOCK = 128
"""vLLM's block size on CPU."""
SCRATCH = Path(__file__).parents[1] / "out"
STOCK = "stock"

LEAST_ROUNDS = 3
"""Fewer give no interval that a target could be held against."""

Evicting = tuple[float, int]
"""Budget and lookahead of a side."""
Round = dict[str, Any]
"""What came of every turn, by its name: a ``load.Run``, or a ``documents.Run``."""


@dataclass(frozen=True)
class Comparison(ABC):
    """Sides that serve the same load in the same KV memory, in turns.

    Attributes:
        about: shown in help and results.
        rounds: how often every turn runs.
        dtype: in which the servers compute and keep the KV.
        pool: how many of the longest requests the KV memory holds whole, were there no windows or states.
        architecture: of the model; layers are evicted that have neither a window nor a state.
        all_evicted: whether it has no others.
    """

    about: str
    _: KW_ONLY
    pool: int
    rounds: int = 3
    dtype: str = "bfloat16"
    architecture: str = "llama"
    all_evicted: bool = False

    @property
    @abstractmethod
    def sides(self) -> Sequence[str]:
        """Their names; stock vLLM is the first, if it takes part."""

    layers = LAYERS
    """Of the model."""

    def kv_bytes(self) -> int:
        """KV memory of each side, over all ranks, with the one block that vLLM keeps for itself."""
        blocks = self.pool * -(-self.whole_len // BLOCK) + 1
        return blocks * BLOCK * token_bytes(self.dtype, self.layers)

    @property
    def whole_len(self) -> int:
        """Tokens of a request of which the memory holds so many."""
        return self.max_len

    @property
    @abstractmethod
    def max_len(self) -> int:
        """Tokens of the longest request."""

    @abstractmethod
    def server(self, side: str, threads: int | None) -> Server:
        """A side's server, not started yet; OpenMP threads of each rank, None: as vLLM places them."""

    def model(self) -> Path:
        """That all sides serve."""
        return model(max(4096, self.max_len), architecture=self.architecture, all_evicted=self.all_evicted)

    def serve(
        self,
        side: str,
        flags: Sequence[str],
        env: Mapping[str, str],
        ranks: int = 1,
        vllm: Path | None = None,
    ) -> Server:
        """A server with these flags, and those that all sides of all comparisons have; vLLM's defaults otherwise."""
        shared = [
            *("--max-model-len", str(self.max_len), "--dtype", self.dtype),
            *("--kv-cache-memory-bytes", str(self.kv_bytes() // ranks)),  # of each rank
            *("--disable-uvicorn-access-log", "--enable-prompt-tokens-details"),
        ]
        log = SCRATCH / f"serve-{side.replace(',', '').replace(' ', '-')}.log"
        return Server(self.model(), log, [*shared, *flags], env, vllm=vllm)

    @abstractmethod
    def first(self) -> Self:
        """A small load, with which a server is warmed up."""

    @abstractmethod
    async def send(self, server: Server, turn: str, number: int) -> Any:
        """Send the load of a turn and wait for the answers; rounds of other numbers have other prompts."""

    @abstractmethod
    def columns(self) -> Columns:
        """Of the table of medians."""

    @abstractmethod
    def targets(self, name: str, rounds: Sequence[Round]) -> list["Target"]:
        """What the scenario of this name should reach, and what it did."""

    @property
    def title(self) -> str:
        """Of the table."""
        return f"{self.about}, {self.dtype}"

    def schedule(self, number: int = 0) -> dict[str, str]:
        """The side of each turn, in order; another side begins each round."""
        first = number % len(self.sides)
        return {side: side for side in (*self.sides[first:], *self.sides[:first])}

    def ratios(self, rounds: Sequence[Round]) -> dict[str, dict[str, Estimate]]:
        """Ratios by side and figure, for the record."""
        return {}

    def is_judged(self, own: "Comparison", rounds: Sequence[Round]) -> bool:
        """Whether it ran as the scenario that has the targets, and often enough."""
        return replace(self, rounds=own.rounds, dtype=own.dtype) == own and len(rounds) >= LEAST_ROUNDS


@dataclass(frozen=True)
class Scenario(Comparison):
    """Requests that come at once or at a rate; stock vLLM, and eviction at some budgets and lookaheads.

    Attributes:
        requests, input_len, output_len, spread, rate: see Load.
        policy: of the sides with eviction.
        budgets, lookaheads: one side with eviction for each two of them.
        tensor, pipeline: ranks of each server.
        baseline: another version of this package, which serves each budget once more.
    """

    requests: int
    input_len: int
    output_len: int
    budgets: tuple[float, ...] = (0.2,)
    lookaheads: tuple[int, ...] = (0,)
    policy: str = "ada-snapkv"
    spread: float = 0.0
    rate: float | None = None
    tensor: int = 1
    pipeline: int = 1
    baseline: Baseline | None = field(default=None, compare=False)

    @property
    def max_len(self) -> int:
        """Tokens of the longest possible request."""
        return longest(self.input_len, self.spread) + longest(self.output_len, self.spread)

    @property
    def ranks(self) -> int:
        """Worker processes of each server."""
        return self.tensor * self.pipeline

    @property
    def reference(self) -> str:
        """The side of stock vLLM, over which ratios are taken."""
        return STOCK

    @property
    def evicting(self) -> dict[str, Evicting]:
        """The sides with eviction that are compared with stock vLLM, by their names."""
        sides = itertools.product(self.budgets, self.lookaheads)
        return {f"budget {budget:g}{with_lookahead(ahead)}": (budget, ahead) for budget, ahead in sides}

    @property
    def baselines(self) -> list[str]:
        """The sides that the baseline serves."""
        return [of_baseline(side) for side in self.evicting if self.baseline]

    @property
    def sides(self) -> list[str]:
        """Stock vLLM, the sides with eviction, and these again by the baseline."""
        return [self.reference, *self.evicting, *self.baselines]

    def flags(self, side: str) -> list[str]:
        """What a side's server is told that no other is."""
        if side == STOCK:
            return []
        budget, ahead = self.evicting[side.removesuffix(of_baseline(""))]
        flags = ["--kv-eviction", self.policy, "--kv-budget", f"{budget:g}"]
        return [*flags, "--kv-eviction-config.lookahead", str(ahead)] if ahead else flags

    def environment(self, threads: int | None) -> dict[str, str]:
        """Of every server; ``threads`` are OpenMP threads of each rank, None: as vLLM places them."""
        return cpu_environment(threads, self.ranks)

    @property
    def whole_len(self) -> int:
        """Without the spread."""
        return self.input_len + self.output_len

    def load(self, seed: int) -> Load:
        """The requests of one run."""
        return Load(self.requests, self.input_len, self.output_len, self.spread, self.rate, seed)

    def first(self) -> Self:
        """Two requests with short answers; the servers have no room for longer ones than the scenario's."""
        return replace(self, requests=2, output_len=min(4, self.output_len), spread=0.0, rate=None)

    async def send(self, server: Server, turn: str, number: int) -> Run:
        """Send the requests; the same ones to all sides."""
        return await drive(server, self.load(number), self.kv_bytes(), self.dtype)

    def server(self, side: str, threads: int | None) -> Server:
        """A side's server; the baseline's sides get what ours get."""
        flags = []
        if self.ranks > 1:
            flags += ["--tensor-parallel-size", str(self.tensor)]
            flags += ["--pipeline-parallel-size", str(self.pipeline)]
        flags += self.flags(side)
        vllm = self.baseline.vllm if self.baseline and side in self.baselines else None
        return self.serve(side, flags, self.environment(threads), self.ranks, vllm)

    @property
    def title(self) -> str:
        """The load and the memory that it runs in."""
        return (
            f"{self.requests} x ({self.input_len} in, {self.output_len} out), KV memory for {self.pool}, "
            f"{self.policy}, {self.dtype}"
        )

    def columns(self) -> Columns:
        """Stock vLLM does not tell what its pages hold."""
        return {
            "seconds": (lambda run: run.wall, ".2f"),
            "CPU s": (lambda run: run.cpu, ".2f"),
            "tokens/s": (lambda run: run.tokens_per_second, ".1f"),
            "at once": (lambda run: run.peak_running, "g"),
            "preempted": (lambda run: run.preemptions, "g"),
            "KV MiB": (lambda run: run.physical_bytes / 2**20, ".1f"),
            "live MiB": (lambda run: nan if run.logical_bytes is None else run.logical_bytes / 2**20, ".1f"),
            "evicting": (lambda run: nan if run.logical_bytes is None else run.evict_share, ".1%"),
            "accepted": (lambda run: run.accepted, "g"),
        }

    def ratios(self, rounds: Sequence[Round]) -> dict[str, dict[str, Estimate]]:
        """What each side with eviction reached, over stock vLLM and over the baseline."""
        return {side: self.figures(side, rounds) for side in self.evicting}

    def figures(self, side: str, rounds: Sequence[Round]) -> dict[str, Estimate]:
        """What a side with eviction reached."""
        result = {
            SPEED: over(rounds, speed, side, self.reference),
            PER_CPU: over(rounds, lambda run: run.tokens_per_cpu_second, side, self.reference),
        }
        without = side.removesuffix(with_lookahead(self.evicting[side][1]))
        if side != without and without in self.sides:
            result[OVER_NONE] = over(rounds, speed, side, without)
        if self.baseline:
            result[OVER_BASELINE] = over(rounds, speed, side, of_baseline(side))
        return result

    def targets(self, name: str, rounds: Sequence[Round]) -> list["Target"]:
        """What the scenario of this name should reach on this processor and in its dtype."""
        bounds = TARGETS.get(kind(self.dtype), {}).get(name, {})
        wanted = [
            Target(f"{side}: {measure}", reached[measure], bound)
            for side, reached in self.ratios(rounds).items()
            for measure, bound in bounds.items()
        ]
        if name == "pool-bound" and bounds:
            wanted += counts(self, rounds, RUNNING_AT_ONCE, PREEMPTIONS)
        return wanted


def counts(scenario: Scenario, rounds: Sequence[Round], at_once: int, preemptions: int) -> list["Target"]:
    """How many requests should run at once in the worst run with eviction, and how many may be preempted."""
    ours = [one[side] for one in rounds for side in scenario.evicting]
    return [
        Target("requests running at once", min(run.peak_running for run in ours), at_once),
        Target("preemptions", max(run.preemptions for run in ours), preemptions, at_most=True),
    ]


def token_bytes(dtype: str, layers: int = LAYERS) -> int:
    """Keys and values of one token in so many layers and all heads."""
    return layers * KV_HEADS * entry_bytes(dtype)


def with_lookahead(ahead: int) -> str:
    """What a side's name ends with."""
    return f", lookahead {ahead}" if ahead else ""


def of_baseline(side: str) -> str:
    """The side that the baseline serves with the same budget."""
    return f"{side}, baseline"


SCENARIOS = {
    "memory-bound": Scenario("memory for 3 of 24 requests with long answers", *(24, 2048, 768), pool=3),
    "fits": Scenario(
        "everything fits: what the extension costs, with and without evictions",
        *(8, 512, 128),
        pool=8,
        budgets=(1.0, 0.2),
        rounds=7,
    ),
    "pool-bound": Scenario(
        "memory for 4 of 24 requests: eviction lets more run at once", *(24, 2048, 256), pool=4, rounds=7
    ),
    "overhead": Scenario(
        "everything fits and nothing is evicted: what the extension costs on long prompts",
        *(8, 2048, 128),
        pool=8,
        budgets=(1.0,),
        rounds=7,
    ),
    "prefill-bound": Scenario(
        "everything fits and prompts dominate: eviction has little to save", *(8, 4096, 32), pool=8, rounds=7
    ),
}

OVER_BASELINE = "output tokens/s over the baseline's"
OVER_NONE = "output tokens/s over no lookahead's"
SPEED, PER_CPU = "output tokens/s over stock's", "output tokens per CPU second over stock's"
TARGETS: dict[Kind, dict[str, dict[str, float]]] = {
    ("avx512", "bfloat16"): {
        "memory-bound": {SPEED: 1.6},
        "fits": {PER_CPU: 0.97},
        "pool-bound": {SPEED: 1.25},
        "overhead": {SPEED: 0.92},
        "prefill-bound": {SPEED: 1.2},
    },
    ("avx2", "float32"): {"pool-bound": {SPEED: 2.3}},
}
"""What the low end of a ratio's interval should reach, by level and dtype."""
RUNNING_AT_ONCE, PREEMPTIONS = 12, 2
"""What pool-bound should reach in every run, besides, where it has a target."""


@dataclass(frozen=True)
class Target:
    """A result and what it should reach.

    Attributes:
        name: what was measured.
        value: an estimate, whose whole interval counts, or the count of the worst run.
        bound: what it should be.
        at_most: whether the bound is an upper one.
    """

    name: str
    value: Estimate | float
    bound: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        if self.at_most:
            return (self.value.high if isinstance(self.value, Estimate) else self.value) <= self.bound
        return (self.value.low if isinstance(self.value, Estimate) else self.value) >= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        value = str(self.value) if isinstance(self.value, Estimate) else f"{self.value:g}"
        return f"{self.name}: {value}, target {sign} {self.bound:g}: {'met' if self.met else 'MISSED'}"


def show_targets(console: Console, targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Print whether each target is reached; what goes into the record."""
    for target in targets:
        console.print(str(target), style="green" if target.met else "red", highlight=False)
    return [{**asdict(target), "met": target.met} for target in targets]


def speed(run: Any) -> float:
    """Output tokens per second."""
    return run.tokens_per_second


def over(rounds: Sequence[Round], what: Callable[[Any], float], ours: str, theirs: str) -> Estimate:
    """A figure of one turn over that of another, round by round."""
    return paired_ratio([what(one[ours]) for one in rounds], [what(one[theirs]) for one in rounds])


def model(max_len: int, layers: int = LAYERS, architecture: str = "llama", all_evicted: bool = False) -> Path:
    """The random model of all speed benchmarks, bf16 on disk; engines turn it into the dtype that they are given.

    Args:
        all_evicted: whether all its layers are of the kind that is evicted.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from benchmarks.harness.models import ARCHITECTURES, make_model

    disable_progress_bar()
    settings, name = {}, f"model-{layers}-layers-{max_len}"
    if architecture in MIXED:
        name = f"{architecture}-{'all-evicted-' * all_evicted}{name}"
        kinds = ARCHITECTURES[architecture]["layer_types"]
        kinds = kinds[-1:] if all_evicted else kinds  # the last one is evicted
        settings = {**MIXED[architecture], "layer_types": (kinds * layers)[:layers]}
        settings["num_hidden_layers"] = layers
    return make_model(
        SCRATCH / name,
        architecture,
        hidden=HIDDEN,
        layers=layers,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_len=max_len,
        dtype=torch.bfloat16,
        **settings,
    )
