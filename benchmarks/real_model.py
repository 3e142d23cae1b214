"""Compare policies on a small real model and real text: how far answers change, and how many are still right.

Starts the server in fp32, runs `vllm-kvevict quality fidelity`, `run` and `report` for each length and scope, and ends
the server. Started again, it continues. Each length and scope gets a folder with a report; `table.md` sums them up.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.harness.measure import RESULTS, warn_if_busy
from benchmarks.harness.options import add, add_start_patience, positive, whole
from benchmarks.harness.scenarios import SCRATCH
from benchmarks.harness.server import Server, ServerError, cpu_environment, run_benchmark
from vllm_kvevict.policies import available
from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.findings import read_folder, too_hard
from vllm_kvevict.quality.measures import Measures
from vllm_kvevict.quality.options import BUDGETS, parse_budget, parse_policy
from vllm_kvevict.quality.results import AT_ONCE, FULL, Column, Result
from vllm_kvevict.quality.scores import NONE, Scores
from vllm_kvevict.quality.tables import budget_name, table
from vllm_kvevict.schedules.registry import bounded_policies

CONTROL = "streaming-llm"
"""It keeps the beginning and the end, so it must miss what lies between."""
TABLE = "table.md"
HEADER = ["policy", "budget", "score, share of the full cache's", "agreement", "KL"]
MEANING = (
    "Score: the mean over the tasks that count, those in which the full cache gets at least 0.8, as a share of the "
    "full cache's on the same samples. Agreement and KL: how often the compressed cache's first choice is the full "
    "cache's token, and how far the distributions are apart (nats per token, a lower bound). Brackets hold paired 95 % "
    "bootstrap intervals."
)
ENTRIES = (
    "entries as for vllm-kvevict quality, such as ada-snapkv:kernel=31; always measured: full, and streaming-llm, the "
    "control; take is asked questions but not scored"
)
LONGEST_ANSWER = 768  # and room for a chunk of the prompt that kvzip repeats
console = Console()

Serve = Callable[[argparse.Namespace], AbstractAsyncContextManager[str]]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, and fill in what depends on other arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_model", description=__doc__)
    policies = [policy for policy in available() if policy != FULL and policy not in bounded_policies()]
    parser.add_argument("--scopes", nargs="+", choices=AT_ONCE, default=list(AT_ONCE))
    add(
        parser,
        ("policies", parse_policy, policies, ENTRIES),
        ("budgets", parse_budget, list(BUDGETS), "budgets"),
        ("tokens", whole, [1024], "lengths"),
        ("tasks", str, [], "kinds of prompts, of both commands; none for all"),
        ("samples", whole, 20, "questions of each task"),
        ("fidelity-samples", whole, 10, "answers of each task"),
        ("seed", int, 2026, "of the questions"),
        ("model", str, None, f"folder or name (default: {checkpoint.NAME})"),
        ("output", Path, RESULTS / "quality" / "real", "folder"),
        ("threads", whole, 1, "of the server"),
        ("memory", positive, 2.0, "GiB for the KV cache"),
        ("concurrency", whole, 2, "questions at once"),
    )
    add_start_patience(parser)
    arguments = parser.parse_args(argv)
    arguments.policies = list(dict.fromkeys([FULL, CONTROL, *arguments.policies]))
    return arguments


def served_name(arguments: argparse.Namespace) -> str:
    """What requests and results call the model: no folder of this machine."""
    return Path(arguments.model).name if arguments.model else checkpoint.NAME


@asynccontextmanager
async def serve(arguments: argparse.Namespace) -> AsyncIterator[str]:
    """A server with all policies; its URL. The checkpoint is built if it is missing.

    Raises:
        CheckpointError: it cannot be built.
    """
    flags = [
        *("--dtype", "float32", "--enforce-eager", "--served-model-name", served_name(arguments)),
        *("--max-model-len", str(max(arguments.tokens) + LONGEST_ANSWER)),
        *("--kv-cache-memory-bytes", str(int(arguments.memory * 2**30))),
        *("--kv-eviction", FULL, "--kv-eviction-config.policies", "all"),
        *("--kv-eviction-config.min_prompt", "0"),
    ]
    env = {**cpu_environment(arguments.threads, 1), "TORCHDYNAMO_DISABLE": "1"}
    model = arguments.model or checkpoint.build(lambda step: console.print(step, highlight=False))
    async with Server(Path(model), SCRATCH / "serve-real-model.log", flags, env) as server:
        yield f"{server.url}/v1"


@dataclass(frozen=True)
class Part:
    """One length and scope.

    Attributes:
        folder: of its results.
        tokens: of each prompt, at most.
        scope: see Column.
    """

    folder: Path
    tokens: int
    scope: str

    @property
    def title(self) -> str:
        """Of its report, and of its section in the table."""
        return f"{self.tokens:,} tokens, scope {self.scope}"


def parts(arguments: argparse.Namespace) -> list[Part]:
    """One for each length and scope."""
    return [
        Part(arguments.output / f"{tokens}-{scope}", tokens, scope)
        for tokens in dict.fromkeys(arguments.tokens)
        for scope in dict.fromkeys(arguments.scopes)
    ]


def commands(arguments: argparse.Namespace, part: Part, url: str) -> list[list[str]]:
    """Words behind `vllm-kvevict quality` that measure and report a part."""
    # Results note this command; a folder of this machine would mean nothing to others.
    folder = os.path.relpath(part.folder)
    shared = ["--url", url, "--model", served_name(arguments), "--output", folder]
    shared += ["--tokens", str(part.tokens), "--scopes", part.scope, "--seed", str(arguments.seed)]
    shared += ["--budgets", *(f"{budget:g}" for budget in arguments.budgets), "--min-prompt", "0"]
    shared += ["--timeout", "3600", *(["--tasks", *arguments.tasks] if arguments.tasks else [])]
    # Not those that evict while they read.
    scored = [policy for policy in arguments.policies if Column(policy).asked not in bounded_policies()]
    answers = ["--samples", str(arguments.fidelity_samples), "--policies", *scored]
    questions = ["--samples", str(arguments.samples), "--concurrency", str(arguments.concurrency)]
    questions += ["--family", "text", "--policies", *arguments.policies]
    report = ["report", folder, "--title", f"{served_name(arguments)}, {part.title}"]
    return [["fidelity", *shared, *answers], ["run", *shared, *questions], report]


async def quality(words: Sequence[str]) -> None:
    """Run one command of `vllm-kvevict quality`; it is interrupted when this task is.

    Raises:
        ServerError: it failed; what it says is on the terminal.
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "vllm_kvevict", "quality", *words)
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if code:
        raise ServerError(f"vllm-kvevict quality {words[0]} ended with exit code {code}")


async def run(arguments: argparse.Namespace, start: Serve = serve) -> None:
    """Measure all parts, and write the table anew after each.

    Args:
        start: starts a server.
    """
    sections: list[str] = []
    async with start(arguments) as url:
        for part in parts(arguments):
            for words in commands(arguments, part, url):
                await quality(words)
            sections += section(part)
            (arguments.output / TABLE).write_text("\n".join([MEANING, "", *sections]))


def section(part: Part) -> list[str]:
    """Policy by budget, as Markdown."""
    report = read_folder(part.folder, part.title, min(BUDGETS))
    scores, hard = report.scores, too_hard(report.full)
    evicting = sorted(
        (column for column in scores.columns if column.budget is not None), key=lambda one: one.budget or 0
    )
    counting = [f"{task} {score:.2f}" for task, score in report.full.items() if task not in hard]
    unable = f" The model cannot do: {', '.join(hard)}." if hard else ""
    return [
        f"## {part.title}",
        "",
        f"Tasks that count, and the full cache's score: {', '.join(counting) or 'none'}.{unable}",
        "",
        *table(HEADER, [row(scores, report.fidelity, column) for column in evicting], left=1),
        "",
    ]


def row(scores: Scores[Result], fidelity: Measures | None, column: Column) -> list[str]:
    """Cells of one policy and budget; a dash where nothing was measured."""
    share = scores.ratio(column, scores.full) if scores.full else None
    had = {result.task for result in scores.results if result.column == column}
    some = "" if had.issuperset(scores.tasks) else f" ({', '.join(sorted(had))} only)"
    cells: list[str] = [f"{column.policy}{some}", budget_name(column.budget or 0), str(share or NONE)]
    if fidelity is None or not fidelity.of(column):
        return [*cells, NONE, NONE]
    means = (fidelity.agreement.mean(column), fidelity.divergence.mean(column))
    return [*cells, *(str(mean or NONE) for mean in means)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit code."""
    arguments = parse_arguments(argv)
    warn_if_busy(console)
    try:
        return run_benchmark(run(arguments))
    except (checkpoint.CheckpointError, OSError, ValueError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
