"""Requests against two engines in the same KV memory: stock vLLM and vLLM with eviction, in turns."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.measure import Estimate, paired_ratio, record, save
from benchmarks.sides import Outcome, Side, Workload, running
from vllm_kvevict.policies import available

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 8, 8, 4, 64, 512
BLOCK = 128
"""vLLM's block size on CPU."""
SCRATCH = Path(__file__).parent / "out"
PAIRS = 7
TOKEN_BYTES = LAYERS * KV_HEADS * 2 * HEAD_DIM * 2


@dataclass(frozen=True)
class Scenario:
    """A workload and the memory it runs in.

    Attributes:
        about: shown in help and results.
        pool: how many full requests (prompt and output) the KV memory holds.
        budget: of the engine with eviction.
    """

    about: str
    requests: int
    input_len: int
    output_len: int
    pool: int
    budget: float

    def kv_bytes(self) -> int:
        """KV memory, with the one block that vLLM keeps for itself."""
        blocks = self.pool * -(-(self.input_len + self.output_len) // BLOCK) + 1
        return blocks * BLOCK * TOKEN_BYTES


SCENARIOS = {
    "pool-bound": Scenario(
        "memory for 4 of 24 requests: eviction lets more run at once", 24, 2048, 256, 4, 0.2
    ),
    "overhead": Scenario(
        "everything fits and nothing is evicted: what the extension costs", 8, 2048, 128, 8, 1.0
    ),
    "prefill-bound": Scenario(
        "everything fits and prompts dominate: eviction has little to save", 8, 4096, 32, 8, 0.2
    ),
}


@dataclass(frozen=True)
class Target:
    """A result and what it should reach.

    Attributes:
        name: what was measured.
        value: the result.
        bound: what it should be.
        at_most: whether the bound is an upper one.
    """

    name: str
    value: float
    bound: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        return (
            f"{self.name}: {self.value:.3g}, target {sign} {self.bound:g}: {'met' if self.met else 'MISSED'}"
        )


def targets(name: str, speed: Estimate, ours: Sequence[Outcome]) -> list[Target]:
    """What a scenario should reach."""
    tokens_per_second = "output tokens/s, times stock's"
    if name == "pool-bound":
        return [
            Target("requests running at once", min(run.peak_running for run in ours), 12),
            Target("preemptions", max(run.preemptions for run in ours), 2, at_most=True),
            Target(tokens_per_second, speed.median, 1.25),
        ]
    return [Target(tokens_per_second, speed.median, 0.92)] if name == "overhead" else []


def model(max_len: int) -> Path:
    """The random Llama of all speed benchmarks, bf16."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from benchmarks.models import make_model

    disable_progress_bar()
    return make_model(
        SCRATCH / f"model-{max_len}",
        hidden=HIDDEN,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_len=max_len,
        dtype=torch.bfloat16,
    )


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Scenario]:
    """Read the command line: the options and the scenario with its changes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description=__doc__,
        epilog=" ".join(f"{name}: {scenario.about}." for name, scenario in SCENARIOS.items()),
    )
    parser.add_argument("scenario", nargs="?", choices=SCENARIOS, default="pool-bound", help="%(default)s")
    parser.add_argument("--policy", choices=available(), default="ada-snapkv", help="default: %(default)s")
    for field, kind, text in (
        ("budget", float, "--kv-budget"),
        ("requests", int, "requests that arrive together"),
        ("input-len", int, "tokens of each prompt"),
        ("output-len", int, "tokens of each answer"),
        ("pool", int, "full requests that the KV memory holds"),
    ):
        parser.add_argument(f"--{field}", type=kind, metavar="N", help=f"{text} (default: the scenario's)")
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, metavar="N", help="runs of each side (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="OpenMP threads of each engine (default: all %(default)s cores)",
    )
    parser.add_argument("--name", help="of the file in benchmarks/results/ (default: throughput-SCENARIO)")
    arguments = parser.parse_args(argv)
    names = ("budget", "requests", "input_len", "output_len", "pool")
    changes = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if any(value <= 0 for value in changes.values()):
        parser.error("sizes must be positive")
    return arguments, replace(SCENARIOS[arguments.scenario], **changes)


def run_pairs(sides: Sequence[Side], workload: Workload, pairs: int) -> list[list[Outcome]]:
    """Let the sides run the same requests in turns, new requests in each pair.

    Returns:
        For each pair the outcome of each side.
    """
    rounds = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("starting two engines", total=(pairs + 1) * len(sides))
        with running(*sides):
            for index in range(pairs + 1):
                # The first, short round warms up and is not counted.
                work = replace(workload, seed=index) if index else replace(workload, output_len=4, seed=-1)
                outcomes = []
                for side in sides:
                    bar.update(task, description=side.name if index else f"{side.name}: warming up")
                    outcomes.append(side.run(work))
                    bar.advance(task)
                if index:
                    rounds.append(outcomes)
            bar.update(task, description="done")
    return rounds


def compare(stock: Sequence[Outcome], ours: Sequence[Outcome], what: Callable[[Outcome], float]) -> Estimate:
    """Ours over stock's."""
    return paired_ratio([what(run) for run in ours], [what(run) for run in stock])


def main() -> int:
    """Run one scenario; the exit code."""
    arguments, scenario = parse_arguments()
    console = Console()
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 0.5 * cores:
        console.print(
            f"The load average is {load:.1f} on {cores} cores: others are working here, so the results will be noisy, "
            f"above all with as many threads as cores.",
            style="yellow",
        )
    length = scenario.input_len + scenario.output_len
    settings = {
        "max_model_len": length,
        "kv_cache_memory_bytes": scenario.kv_bytes(),
        "dtype": "bfloat16",
    }
    path = model(max(4096, length))
    sides = [
        Side("stock vLLM", path, arguments.threads, **settings),
        Side(
            f"{arguments.policy} {scenario.budget:g}",
            path,
            arguments.threads,
            **settings,
            kv_eviction=arguments.policy,
            kv_budget=scenario.budget,
        ),
    ]
    workload = Workload(scenario.requests, scenario.input_len, scenario.output_len)
    rounds = run_pairs(sides, workload, arguments.pairs)
    stock, ours = [pair[0] for pair in rounds], [pair[1] for pair in rounds]

    measures: dict[str, Callable[[Outcome], float]] = {
        "output tokens/s": lambda run: run.output_tokens / run.wall,
        "seconds": lambda run: run.wall,
        "CPU seconds": lambda run: run.cpu,
        "seconds in steps with prompt tokens": lambda run: run.prefill_seconds,
        "seconds in steps with output tokens only": lambda run: run.decode_seconds,
    }
    ratios = {name: compare(stock, ours, what) for name, what in measures.items()}
    result = Table(
        title=f"{arguments.scenario}: {scenario.requests} x ({scenario.input_len} in, {scenario.output_len} out), "
        f"KV memory for {scenario.pool}"
    )
    result.add_column("median")
    for column in (*(side.name for side in sides), "ratio [95 %]"):
        result.add_column(column, justify="right")
    for name, what in measures.items():
        result.add_row(
            name, *(f"{median(what(run) for run in runs):.2f}" for runs in (stock, ours)), str(ratios[name])
        )
    for label, name in (("most running at once", "peak_running"), ("preemptions", "preemptions")):
        result.add_row(label, *(_span([getattr(run, name) for run in runs]) for runs in (stock, ours)), "")
    console.print(result)

    reached = targets(arguments.scenario, ratios["output tokens/s"], ours)
    if scenario != SCENARIOS[arguments.scenario]:
        reached = []  # they hold for the scenario's own sizes
    for target in reached:
        console.print(str(target), style="green" if target.met else "red", highlight=False)
    content = {
        "scenario": asdict(scenario),
        "policy": arguments.policy,
        "threads": arguments.threads,
        "load_average_at_start": load,
        "ratios": {name: asdict(ratio) for name, ratio in ratios.items()},
        "targets": [{**asdict(target), "met": target.met} for target in reached],
        "pairs": [
            {"stock": left.summary(), "ours": right.summary()}
            for left, right in zip(stock, ours, strict=True)
        ],
    }
    name = arguments.name or f"throughput-{arguments.scenario}"
    console.print(f"written to {save(name, record('throughput', content))}")
    return 0


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


if __name__ == "__main__":
    sys.exit(main())
