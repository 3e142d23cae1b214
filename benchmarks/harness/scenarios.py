"""What the serving benchmarks run: the model, the loads and the memory they run in, the sides, the targets."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.baseline import Baseline
from benchmarks.harness.load import HEAD_DIM, Load, Run, entry_bytes, longest
from benchmarks.harness.measure import Estimate, Kind, kind, paired_ratio
from benchmarks.harness.server import Server, cpu_environment

LAYERS, HEADS, KV_HEADS, HIDDEN = 8, 8, 4, 512
BLOCK = 128
"""vLLM's block size on CPU."""
SCRATCH = Path(__file__).parents[1] / "out"
STOCK = "stock"

Round = dict[str, Run]
"""One run of every turn, by the turn's name."""


@dataclass(frozen=True)
class Turn:
    """A run within a round.

    Attributes:
        name: of the run in tables and results; the side's own name for the full load.
        side: whose server runs it.
        input_len, output_len: tokens of each request.
    """

    name: str
    side: str
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Scenario:
    """A load, the memory it runs in, and the sides that run it.

    Attributes:
        about: shown in help and results.
        requests, input_len, output_len, spread, rate: see Load.
        pool: how many full requests (prompt and output) the KV memory holds.
        policy: of the sides with eviction.
        budgets: one side with eviction for each.
        rounds: how often every turn runs.
        tensor, pipeline: ranks of each server.
        dtype: in which the servers compute and keep the KV.
        baseline: another version of this package, which serves each budget once more.
    """

    about: str
    requests: int
    input_len: int
    output_len: int
    pool: int
    budgets: tuple[float, ...] = (0.2,)
    policy: str = "ada-snapkv"
    rounds: int = 7
    spread: float = 0.0
    rate: float | None = None
    tensor: int = 1
    pipeline: int = 1
    dtype: str = "bfloat16"
    baseline: Baseline | None = None

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
    def evicting(self) -> dict[str, float]:
        """Name and budget of the sides with eviction that are compared with stock vLLM."""
        return {f"budget {budget:g}": budget for budget in self.budgets}

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
        budget = self.evicting[side.removesuffix(of_baseline(""))]
        return ["--kv-eviction", self.policy, "--kv-budget", f"{budget:g}"]

    def environment(self, threads: int | None) -> dict[str, str]:
        """Of every server; ``threads`` are OpenMP threads of each rank, None: as vLLM places them."""
        return cpu_environment(threads, self.ranks)

    def model(self) -> Path:
        """That all sides serve."""
        return model(max(4096, self.max_len))

    def kv_bytes(self) -> int:
        """KV memory of all ranks, with the one block that vLLM keeps for itself."""
        blocks = self.pool * -(-(self.input_len + self.output_len) // BLOCK) + 1
        return blocks * BLOCK * token_bytes(self.dtype)

    def load(self, input_len: int, output_len: int, seed: int) -> Load:
        """The requests of one run."""
        return Load(self.requests, input_len, output_len, self.spread, self.rate, seed)

    def turns(self, number: int = 0) -> list[Turn]:
        """The runs of a round, in order."""
        return [Turn(side, side, self.input_len, self.output_len) for side in self.sides]

    def figures(self, side: str, rounds: Sequence["Round"]) -> dict[str, Estimate]:
        """What a side with eviction reached, as ratios."""

        def ratio(what: Callable[[Run], float], one: str, other: str) -> Estimate:
            return compare(rounds, lambda runs: what(runs[one]), lambda runs: what(runs[other]))

        result = {
            SPEED: ratio(lambda run: run.tokens_per_second, side, self.reference),
            PER_CPU: ratio(lambda run: run.tokens_per_cpu_second, side, self.reference),
        }
        if self.baseline:
            result[OVER_BASELINE] = ratio(lambda run: run.tokens_per_second, side, of_baseline(side))
        return result

    def targets(self, name: str, rounds: Sequence["Round"]) -> list["Target"]:
        """What the scenario of this name should reach on this processor and in its dtype."""
        bounds = TARGETS.get(kind(self.dtype), {}).get(name, {})
        wanted = [
            Target(f"{side}: {measure}", reached[measure], bound)
            for side, reached in ratios(self, rounds).items()
            for measure, bound in bounds.items()
        ]
        if name == "pool-bound" and bounds:
            wanted += counts(self, rounds, RUNNING_AT_ONCE, PREEMPTIONS)
        return wanted


def counts(scenario: Scenario, rounds: Sequence["Round"], at_once: int, preemptions: int) -> list["Target"]:
    """How many requests should run at once in the worst run with eviction, and how many may be preempted."""
    ours = [one[side] for one in rounds for side in scenario.evicting]
    return [
        Target("requests running at once", min(run.peak_running for run in ours), at_once),
        Target("preemptions", max(run.preemptions for run in ours), preemptions, at_most=True),
    ]


def token_bytes(dtype: str, layers: int = LAYERS) -> int:
    """Keys and values of one token in so many layers and all heads."""
    return layers * KV_HEADS * entry_bytes(dtype)


def of_baseline(side: str) -> str:
    """The side that the baseline serves with the same budget."""
    return f"{side}, baseline"


def prefill(name: str) -> str:
    """The turn that computes the prompts of another turn and one token of each answer."""
    return f"{name}, prefill"


SCENARIOS = {
    "memory-bound": Scenario(
        "memory for 3 of 24 requests with long answers", *(24, 2048, 768), pool=3, rounds=3
    ),
    "fits": Scenario(
        "everything fits: what the extension costs, with and without evictions",
        *(8, 512, 128),
        pool=8,
        budgets=(1.0, 0.2),
    ),
    "pool-bound": Scenario(
        "memory for 4 of 24 requests: eviction lets more run at once", *(24, 2048, 256), pool=4
    ),
    "overhead": Scenario(
        "everything fits and nothing is evicted: what the extension costs on long prompts",
        *(8, 2048, 128),
        pool=8,
        budgets=(1.0,),
    ),
    "prefill-bound": Scenario(
        "everything fits and prompts dominate: eviction has little to save", *(8, 4096, 32), pool=8
    ),
}

OVER_BASELINE = "output tokens/s over the baseline's"
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
        return f"{self.name}: {self.value}, target {sign} {self.bound:g}: {'met' if self.met else 'MISSED'}"


def show_targets(console: Console, targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Print whether each target is reached; what goes into the record."""
    for target in targets:
        console.print(str(target), style="green" if target.met else "red", highlight=False)
    return [{**asdict(target), "met": target.met} for target in targets]


def compare(
    rounds: Sequence[Round], ours: Callable[[Round], float], theirs: Callable[[Round], float]
) -> Estimate:
    """Ratio of two figures of the same round, over all rounds."""
    return paired_ratio([ours(one) for one in rounds], [theirs(one) for one in rounds])


def ratios(scenario: Scenario, rounds: Sequence[Round]) -> dict[str, dict[str, Estimate]]:
    """The figures of each side with eviction."""
    return {side: scenario.figures(side, rounds) for side in scenario.evicting}


def decode_seconds(name: str, runs: Round) -> float:
    """Seconds that a turn takes beyond computing its prompts."""
    return runs[name].wall - runs[prefill(name)].wall


def model(max_len: int, layers: int = LAYERS) -> Path:
    """The random Llama of all speed benchmarks, bf16 on disk; engines turn it into the dtype that they are given."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from benchmarks.harness.models import make_model

    disable_progress_bar()
    return make_model(
        SCRATCH / f"model-{layers}-layers-{max_len}",
        hidden=HIDDEN,
        layers=layers,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_len=max_len,
        dtype=torch.bfloat16,
    )


def make_server(scenario: Scenario, side: str, threads: int | None) -> Server:
    """The server of a side, not started yet; threads as of :meth:`Scenario.environment`.

    Apart from the eviction all sides get the same, and vLLM's defaults otherwise; the baseline's sides what ours get.
    """
    flags = [
        *("--max-model-len", str(scenario.max_len), "--dtype", scenario.dtype),
        *("--kv-cache-memory-bytes", str(scenario.kv_bytes() // scenario.ranks)),  # of each rank
        "--disable-uvicorn-access-log",
    ]
    if scenario.ranks > 1:
        flags += ["--tensor-parallel-size", str(scenario.tensor)]
        flags += ["--pipeline-parallel-size", str(scenario.pipeline)]
    flags += scenario.flags(side)
    log = SCRATCH / f"serve-{side.replace(',', '').replace(' ', '-')}.log"
    vllm = scenario.baseline.vllm if scenario.baseline and side in scenario.baselines else None
    return Server(scenario.model(), log, flags, scenario.environment(threads), vllm=vllm)
