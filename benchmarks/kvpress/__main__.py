"""The same requests for this project and for NVIDIA's kvpress, by policy snapkv at the same budget and in turns.

Our engine gets all requests at once and batches them itself. kvpress runs on Hugging Face transformers with all
requests in one batch, the faster of its two ways, which needs prompts of equal length. Runs without a policy compare
transformers with our engine alone. Random Llama (8 layers, 8 query and 4 KV heads of 64), in the same dtype. The first
run builds the environment .venv-kvpress.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

from rich.progress import track

from benchmarks.harness.measure import USUAL, Estimate, kind, paired_ratio
from benchmarks.harness.options import positive, whole
from benchmarks.harness.scenarios import Scenario, Target, model
from benchmarks.harness.sides import Outcome, Side, Workload, running
from benchmarks.harness.tables import table, typical
from benchmarks.kvpress.check import CHECKED_TOKENS, check, require_same
from benchmarks.kvpress.opponent import Opponent, kvpress_python
from benchmarks.micro import loop
from benchmarks.micro.loop import Found

POLICY = "snapkv"
"""The parameters are ours by default, but kvpress pools by average."""
WINDOW = 32
TARGETS = {USUAL: 5.0}
"""How many times as fast, by level and dtype."""
FULL, PLAIN = "ours, no eviction", "transformers, one batch"
OURS, THEIRS = f"ours, {POLICY}", f"kvpress, {POLICY}, one batch"
PAIRS = (FULL, PLAIN), (OURS, THEIRS)
SPEED = "output tokens/s"
FIGURES: dict[str, Callable[[Outcome], float]] = {
    SPEED: lambda run: run.output_tokens / run.wall,
    "output tokens per CPU second": lambda run: run.output_tokens / run.cpu,
    "milliseconds per decode step": lambda run: 1e3 * run.decode_seconds / decode_steps(run),
}
COMMAND = "kvpress"
OPTIONS = (
    ("requests", whole, 8, "requests that arrive together"),
    ("input-len", whole, 2048, "tokens of each prompt"),
    ("output-len", whole, 256, "tokens of each answer"),
    ("rounds", whole, 3, "runs of each side"),
    ("threads", whole, 1, "OpenMP threads of each program"),
    ("budget", positive, 0.2, "share of the prompt that is kept"),
)
Round = dict[str, Outcome]
"""One run of each side, by the side's name."""
Turns = Mapping[str, Callable[[Workload], Outcome]]
"""By side, what answers the requests of a round; what is compared stands side by side."""


def refuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    if arguments.output_len < 2:
        return "--output-len must be at least 2"
    if arguments.budget >= 1:
        return "--budget must be below 1"
    if arguments.budget * arguments.input_len <= WINDOW:
        return f"--input-len and --budget must keep more than {WINDOW} tokens, the window of both programs"
    return None


def decode_steps(run: Outcome) -> int:
    """Steps that read no prompt; those that do may decode other requests as well."""
    return sum(not prompt_tokens for _, prompt_tokens, _ in run.steps)


def make_turns(side: Side, opponent: Opponent, budget: float) -> Turns:
    """The sides of a round."""

    def engine(policy: str) -> Callable[[Workload], Outcome]:
        return lambda work: all_read(side.run(work, extra_args={"kv_eviction": policy}), work)

    def transformers(policy: str | None) -> Callable[[Workload], Outcome]:
        return lambda work: opponent.run(work, policy, budget)

    return {
        FULL: engine("full"),
        PLAIN: transformers(None),
        OURS: engine(POLICY),
        THEIRS: transformers(POLICY),
    }


def all_read(run: Outcome, work: Workload) -> Outcome:
    """The run, unless prompt tokens came from a cache, which the other program does not have: then RuntimeError."""
    read, wanted = sum(tokens for _, tokens, _ in run.steps), work.requests * work.input_len
    if read < wanted:
        raise RuntimeError(f"the engine read {read} of {wanted} prompt tokens")
    return run


@contextmanager
def started(arguments: argparse.Namespace) -> Iterator[tuple[Side, Opponent]]:
    """An engine of ours and the process of kvpress, both idle until they are asked."""
    python = kvpress_python()
    sizes = arguments.requests, arguments.input_len, arguments.output_len
    scenario = Scenario("", *sizes, pool=arguments.requests, dtype=arguments.dtype)
    path = model(max(4096, scenario.max_len))
    with closing(Opponent(python, path, arguments.threads, arguments.dtype)) as opponent:
        opponent.wait()
        side = Side(
            "kvpress",
            path,
            arguments.threads,
            dtype=arguments.dtype,
            max_model_len=scenario.max_len,
            kv_cache_memory_bytes=scenario.kv_bytes(),
            enable_prefix_caching=False,  # it is given the same prompts without eviction and with it
            kv_eviction=POLICY,
            kv_budget=arguments.budget,
            kv_eviction_config={"pooling": "avg", "min_prompt": 0},
        )
        with running(side):
            yield side, opponent


def run_rounds(turns: Turns, work: Workload, rounds: int) -> list[Round]:
    """Let the sides take turns, with new prompts in each round; a short round before warms up."""
    for run in turns.values():
        run(replace(work, requests=2, output_len=4, seed=-1))
    return [
        {side: run(replace(work, seed=number)) for side, run in turns.items()}
        for number in track(range(1, rounds + 1), "rounds")
    ]


def ratios(rounds: Sequence[Round]) -> dict[str, dict[str, Estimate]]:
    """Ours over theirs, round by round, by the pair of sides."""
    return {
        f"{ours} / {theirs}": {
            name: paired_ratio([what(one[ours]) for one in rounds], [what(one[theirs]) for one in rounds])
            for name, what in FIGURES.items()
        }
        for ours, theirs in PAIRS
    }


def targets(compared: Mapping[str, Mapping[str, Estimate]], dtype: str) -> list[Target]:
    """What our speed should reach on this processor and in this dtype."""
    pair, bound = f"{OURS} / {THEIRS}", TARGETS.get(kind(dtype))
    return [] if bound is None else [Target(f"{SPEED} of {pair}", compared[pair][SPEED], bound)]


def measure(arguments: argparse.Namespace) -> Found:
    """What both compute, then the rounds."""
    work = Workload(arguments.requests, arguments.input_len, arguments.output_len)
    asked = replace(work, output_len=min(work.output_len, CHECKED_TOKENS), seed=-2)
    with started(arguments) as (side, opponent):
        checks = {
            "no eviction": check(side, opponent, asked, None, 1.0),
            POLICY: check(side, opponent, asked, POLICY, arguments.budget),
        }
        require_same(checks)
        rounds = run_rounds(make_turns(side, opponent, arguments.budget), work, arguments.rounds)
    columns = {name: (figure, ".2f") for name, figure in FIGURES.items()}
    columns |= {"prefill s": (lambda run: run.prefill_seconds, ".2f")}
    title = f"{work.requests} x ({work.input_len} in, {work.output_len} out), {arguments.dtype}"
    runs = typical(title, {side: [one[side] for one in rounds] for side in rounds[0]}, columns)
    compared = ratios(rounds)
    shown = table("ours / theirs, 95 % interval", ["sides"], [*FIGURES])
    for pair, figures in compared.items():
        shown.add_row(pair, *map(str, figures.values()))
    results: dict[str, Any] = {
        "kvpress_versions": opponent.versions,
        "checks": checks,
        "ratios": {
            pair: {name: asdict(value) for name, value in figures.items()}
            for pair, figures in compared.items()
        },
        "rounds": [{side: run.summary() for side, run in one.items()} for one in rounds],
    }
    return Found(results, [runs, shown], targets=targets(compared, arguments.dtype))


if __name__ == "__main__":
    sys.exit(loop.run("kvpress", import_module("benchmarks.kvpress.__main__")))
