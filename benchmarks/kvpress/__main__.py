"""The same requests for this project and for NVIDIA's kvpress, at the same budget and in turns.

Our engine gets all requests at once and batches them itself. kvpress runs on Hugging Face transformers, in the two ways
that it supports: all requests in one batch, which needs prompts of equal length, and one request after another. Runs
without a policy compare transformers with our engine alone. Random Llama (8 layers, 8 query and 4 KV heads of 64), in
the same dtype. The first run builds the environment .venv-kvpress.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.bench import LEAST_ROUNDS
from benchmarks.harness.load import page_bytes
from benchmarks.harness.measure import (
    USUAL,
    Estimate,
    kind,
    paired_ratio,
    record,
    record_name,
    save,
    warn_if_busy,
)
from benchmarks.harness.options import add, add_dtype, positive, whole
from benchmarks.harness.scenarios import Scenario, Target, model, show_targets
from benchmarks.harness.server import ended_by_sigterm
from benchmarks.harness.sides import Side, Workload, running
from benchmarks.harness.tables import table, typical
from benchmarks.kvpress.check import check, describe, require_same
from benchmarks.kvpress.environment import kvpress_python
from benchmarks.kvpress.opponent import Opponent
from benchmarks.kvpress.runs import Round, Run, faster, from_outcome, run_batches

POLICIES = ("snapkv", "ada-snapkv")
"""What both have; the parameters are ours by default, but kvpress pools by average."""
WINDOW = 32
TARGETS = {USUAL: 5.0}
"""How many times as fast, by level and dtype."""
CHECKED_TOKENS = 16
FULL, PLAIN = "ours, no eviction", "transformers, one batch"


def ours(policy: str) -> str:
    """Our engine's side."""
    return f"ours, {policy}"


def batched(policy: str) -> str:
    """The side of kvpress with all requests in one batch."""
    return f"kvpress, {policy}, one batch"


def alone(policy: str) -> str:
    """The side of kvpress with one request after another."""
    return f"kvpress, {policy}, one by one"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kvpress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add(
        parser,
        ("requests", whole, 8, "requests that arrive together"),
        ("input-len", whole, 2048, "tokens of each prompt"),
        ("output-len", whole, 256, "tokens of each answer"),
        ("rounds", whole, 3, "runs of each side"),
        ("threads", whole, 1, "OpenMP threads of each program"),
        ("budget", positive, 0.2, "share of the prompt that is kept"),
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES, help="default: all")
    add_dtype(parser)
    parser.add_argument(
        "--name", help="name of the file in benchmarks/results/ (default: by what is measured)"
    )
    arguments = parser.parse_args(argv)
    if arguments.output_len < 2:
        parser.error("--output-len must be at least 2")
    cores = len(os.sched_getaffinity(0))
    if arguments.threads > cores:
        parser.error(f"--threads must be at most {cores}, the number of cores")
    if arguments.budget >= 1:
        parser.error("--budget must be below 1")
    if arguments.budget * arguments.input_len <= WINDOW:
        parser.error(
            f"--input-len {arguments.input_len} and --budget {arguments.budget:g} must keep more than {WINDOW} tokens, "
            f"the window of both programs"
        )
    arguments.policies = list(dict.fromkeys(arguments.policies))
    return arguments


@dataclass(frozen=True)
class Turn:
    """A side's part of a round.

    Attributes:
        side: name.
        run: what answers the requests of the round.
    """

    side: str
    run: Callable[[Workload], Run]


def make_turns(arguments: argparse.Namespace, engines: dict[str, Side], opponent: Opponent) -> list[Turn]:
    """The turns of a round: what is compared stands side by side."""

    def engine(side: Side, policy: str) -> Callable[[Workload], Run]:
        return lambda work: from_outcome(side.run(work, extra_args={"kv_eviction": policy}), work)

    def transformers(policy: str | None, size: int) -> Callable[[Workload], Run]:
        return lambda work: run_batches(
            opponent, work.prompts(), size, work.output_len, policy, arguments.budget
        )

    turns = [
        Turn(FULL, engine(engines[arguments.policies[0]], "full")),
        Turn(PLAIN, transformers(None, arguments.requests)),
    ]
    for policy in arguments.policies:
        turns += [
            Turn(ours(policy), engine(engines[policy], policy)),
            Turn(batched(policy), transformers(policy, arguments.requests)),
            Turn(alone(policy), transformers(policy, 1)),
        ]
    return turns


@contextmanager
def started(arguments: argparse.Namespace, console: Console) -> Iterator[tuple[dict[str, Side], Opponent]]:
    """One engine of ours for each policy and the process of kvpress, all idle until they are asked."""
    python = kvpress_python(console)
    sizes = arguments.requests, arguments.input_len, arguments.output_len
    scenario = Scenario("", *sizes, pool=arguments.requests, dtype=arguments.dtype)
    path = model(max(4096, scenario.max_len))
    console.print("starting kvpress and an engine for each policy", highlight=False)
    with closing(Opponent(python, path, arguments.threads, arguments.dtype)) as opponent:
        opponent.wait()
        engines = {
            policy: Side(
                f"kvpress {policy}",
                path,
                arguments.threads,
                dtype=arguments.dtype,
                max_model_len=scenario.max_len,
                kv_cache_memory_bytes=scenario.kv_bytes(),
                enable_prefix_caching=False,  # one engine is given the same prompts without eviction and with it
                kv_eviction=policy,
                kv_budget=arguments.budget,
                kv_eviction_config={"pooling": "avg", "min_prompt": 0},
            )
            for policy in arguments.policies
        }
        with running(*engines.values()):
            yield engines, opponent


def run_rounds(turns: Sequence[Turn], work: Workload, rounds: int) -> list[Round]:
    """Let the sides take turns, with new prompts in each round; a short round before warms up."""
    for turn in turns:
        turn.run(replace(work, requests=2, output_len=4, seed=-1))
    return [
        {turn.side: turn.run(replace(work, seed=number)) for turn in turns}
        for number in track(range(1, rounds + 1), "rounds")
    ]


def ratio(rounds: Sequence[Round], one: str, other: str, what: Callable[[Run], float]) -> Estimate | None:
    """One side over another, round by round; None if one of them answered nothing in some round."""
    if not all(runs[side].answered for runs in rounds for side in (one, other)):
        return None
    return paired_ratio([what(runs[one]) for runs in rounds], [what(runs[other]) for runs in rounds])


def ratios(rounds: Sequence[Round], policies: Sequence[str]) -> dict[str, dict[str, Estimate | None]]:
    """Ours over theirs: output tokens per second and per CPU second, by the pair of sides."""
    pairs = [(FULL, PLAIN)]
    for policy in policies:
        pairs += [(ours(policy), batched(policy)), (ours(policy), alone(policy))]
    return {
        f"{one} / {other}": {
            "output tokens/s": ratio(rounds, one, other, lambda run: run.tokens_per_second),
            "output tokens per CPU second": ratio(
                rounds, one, other, lambda run: run.output_tokens / run.cpu
            ),
            "milliseconds per decode step": ratio(rounds, one, other, lambda run: run.step_ms),
        }
        for one, other in pairs
    }


def targets(rounds: Sequence[Round], policies: Sequence[str], dtype: str) -> list[Target]:
    """What each policy should reach against kvpress's faster way of each round."""
    found: list[Target] = []
    if (bound := TARGETS.get(kind(dtype))) is None:
        return found
    for policy in policies:
        if theirs := faster(rounds, batched(policy), alone(policy)):
            speed = paired_ratio(
                [one[ours(policy)].tokens_per_second for one in rounds],
                [run.tokens_per_second for run in theirs],
            )
            name = f"output tokens/s of {ours(policy)} / kvpress, its faster way"
            found.append(Target(name, speed, bound))
    return found


def runs_table(title: str, rounds: Sequence[Round]) -> Table:
    """Medians of every side over the rounds in which it answered."""
    columns = {
        "tokens/s": (lambda run: run.tokens_per_second, ".2f"),
        "seconds": (lambda run: run.wall, ".2f"),
        "CPU s": (lambda run: run.cpu, ".2f"),
        "prefill s": (lambda run: run.prefill, ".2f"),
        "decode s": (lambda run: run.decode, ".2f"),
        "ms/step": (lambda run: run.step_ms, ".2f"),
        "KV MiB": (lambda run: (run.stored_bytes or 0) / 2**20, ".1f"),
        "failed": (lambda run: len(run.errors), "g"),
    }
    answered = {side: [one[side] for one in rounds if one[side].answered] for side in rounds[0]}
    return typical(title, answered, columns)


def show(
    console: Console, arguments: argparse.Namespace, rounds: Sequence[Round], checks: dict[str, dict]
) -> dict[str, Any]:
    """Print tables, checks and targets; what goes into the record."""
    size = f"{arguments.requests} x ({arguments.input_len} in, {arguments.output_len} out), {arguments.dtype}"
    title = f"{size}, budget {arguments.budget:g}, threads of each side: {arguments.threads}"
    console.print(runs_table(title, rounds))
    console.print("prefill s: steps that read prompts (ours also decode in them); KV MiB: after the prefill")
    for errors in {error for one in rounds for run in one.values() for error in run.errors}:
        console.print(f"kvpress failed: {errors}", style="yellow", highlight=False)
    compared = ratios(rounds, arguments.policies)
    shown = table("ours / theirs, 95 % interval", ["sides"], [*next(iter(compared.values()))])
    for pair, figures in compared.items():
        shown.add_row(pair, *("failed" if value is None else str(value) for value in figures.values()))
    console.print(shown)
    for name, found in checks.items():
        console.print(describe(name, found), highlight=False)
    wanted = targets(rounds, arguments.policies, arguments.dtype) if len(rounds) >= LEAST_ROUNDS else []
    if not wanted:
        reason = f"{LEAST_ROUNDS} rounds are needed, in which kvpress answered"
        if kind(arguments.dtype) not in TARGETS:
            reason = f"there is none for {' and '.join(kind(arguments.dtype))}"
        console.print(f"no target: {reason}", style="yellow")
    return {
        "checks": checks,
        "ratios": {
            pair: {name: value and asdict(value) for name, value in figures.items()}
            for pair, figures in compared.items()
        },
        "targets": show_targets(console, wanted),
        "rounds": [{side: asdict(run) for side, run in one.items()} for one in rounds],
    }


def measure(arguments: argparse.Namespace, console: Console) -> None:
    """Run everything, print it and save it."""
    load = warn_if_busy(console)
    work = Workload(arguments.requests, arguments.input_len, arguments.output_len)
    asked = replace(work, output_len=min(work.output_len, CHECKED_TOKENS), seed=-2)
    with started(arguments, console) as (engines, opponent):
        checks = {"no eviction": check(engines[arguments.policies[0]], opponent, asked, None, 1.0)}
        for policy in arguments.policies:
            checks[policy] = check(engines[policy], opponent, asked, policy, arguments.budget)
        require_same(checks)
        rounds = run_rounds(make_turns(arguments, engines, opponent), work, arguments.rounds)
    for policy in arguments.policies:
        # Measured only in the check: to listen while the clock runs would cost time.
        for one in rounds:
            one[ours(policy)].stored_bytes = checks[policy]["ours_pages"] * page_bytes(arguments.dtype)
    results = {
        "settings": vars(arguments),
        "load_average_at_start": load,
        "kvpress_versions": opponent.versions,
        **show(console, arguments, rounds, checks),
    }
    name = arguments.name or record_name("kvpress", arguments.dtype)
    console.print(f"written to {save(name, record('kvpress', results))}")


def main() -> int:
    """The exit code."""
    arguments, console = parse_arguments(), Console(width=130)
    try:
        with ended_by_sigterm():
            measure(arguments, console)
    except KeyboardInterrupt:
        print("interrupted; all processes were ended", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
