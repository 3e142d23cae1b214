"""Compare policies on a small real model and real text: how far answers change, and how many are still right.

Starts the server in fp32, runs `vllm-kvevict quality fidelity` and `quality run` for each length and scope, and ends
the server. Started again, it continues. Each length and scope gets a folder with a report; `table.md` sums them up.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from rich.console import Console

from benchmarks.harness.measure import RESULTS, warn_if_busy
from benchmarks.harness.options import add_start_patience, positive, whole
from benchmarks.harness.quality_columns import Columns, own_columns, split
from benchmarks.harness.quality_folders import locked, pack, unpack, write_table
from benchmarks.harness.quality_hours import Part, fidelity_tasks, print_hours, scored
from benchmarks.harness.scenarios import SCRATCH
from benchmarks.harness.server import Server, ServerError, cpu_environment, run_benchmark
from vllm_kvevict.policies import available
from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.endpoint import Endpoint, EndpointError
from vllm_kvevict.quality.options import BUDGETS, parse_budget, parse_policy
from vllm_kvevict.quality.questions import TASKS
from vllm_kvevict.quality.results import AT_ONCE, FULL
from vllm_kvevict.schedules.registry import bounded_policies

CONTROL = "streaming-llm"
"""It keeps the beginning and the end, so it must miss what lies between."""
PUBLISHED, TUNED = RESULTS / "quality" / "real", SCRATCH / "real-tuning"
SEEDS = {False: 2026, True: 100}
"""By whether parameters are being chosen: results of one seed must not be published with what was chosen on it."""
LONGEST_ANSWER = 768  # and room for a chunk of the prompt that kvzip repeats
PORT = 8761
console = Console()

Serve = Callable[[argparse.Namespace, Sequence[str]], AbstractAsyncContextManager[str]]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, and fill in what depends on other arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_model", description=__doc__)
    _add_grid(parser)
    _add_run(parser)
    arguments = parser.parse_args(argv)
    if wrong := [task for task in arguments.tasks if task not in TASKS]:
        parser.error(f"--tasks: unknown {', '.join(wrong)} (choose from {', '.join(TASKS)})")
    if arguments.seed is None:
        arguments.seed = SEEDS[arguments.tune]
    arguments.output = arguments.output or (TUNED if arguments.tune else PUBLISHED)
    arguments.policies = list(dict.fromkeys([FULL, CONTROL, *arguments.policies]))
    return arguments


def _add_grid(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is measured")
    policies = [policy for policy in available() if policy != FULL and policy not in bounded_policies()]
    group.add_argument(
        "--policies",
        nargs="+",
        type=parse_policy,
        default=policies,
        metavar="POLICY",
        help="entries as for vllm-kvevict quality, such as ada-snapkv:kernel=31; full and streaming-llm, the control, "
        "are always measured; take is asked questions but not scored (default: all but take)",
    )
    group.add_argument("--budgets", nargs="+", type=parse_budget, default=list(BUDGETS), metavar="X")
    group.add_argument("--scopes", nargs="+", choices=AT_ONCE, default=list(AT_ONCE))
    group.add_argument(
        "--tokens", nargs="+", type=whole, default=[1024], metavar="N", help="lengths (default: 1024)"
    )
    group.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK", help="default: all")
    group.add_argument(
        "--samples", type=whole, default=20, metavar="N", help="questions of each task (default: 20)"
    )
    group.add_argument(
        "--fidelity-samples", type=whole, default=10, metavar="N", help="answers of each task (default: 10)"
    )
    group.add_argument("--seed", type=int, metavar="N", help=f"default: {SEEDS[False]}")
    group.add_argument(
        "--tune",
        action="store_true",
        help=f"measure in order to choose parameters: seed {SEEDS[True]}, and results in benchmarks/out/{TUNED.name}",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how")
    group.add_argument("--model", metavar="FOLDER_OR_NAME", help=f"default: {checkpoint.NAME}")
    group.add_argument(
        "--output", type=Path, metavar="FOLDER", help="default: benchmarks/results/quality/real"
    )
    group.add_argument("--dry-run", action="store_true", help="only say how many hours it takes")
    group.add_argument("--threads", type=whole, default=1, metavar="N", help="of the server (default: 1)")
    group.add_argument("--port", type=whole, default=PORT, metavar="N", help="default: %(default)s")
    add_start_patience(group)
    group.add_argument(
        "--memory", type=positive, default=2.0, metavar="GIB", help="for the KV cache (default: %(default)s)"
    )
    group.add_argument(
        "--concurrency", type=whole, default=2, metavar="N", help="questions at once (default: %(default)s)"
    )


def model_of(arguments: argparse.Namespace) -> str:
    """Folder or name of the model; the checkpoint is built if it is missing.

    Raises:
        CheckpointError: it cannot be built.
    """
    return arguments.model or str(checkpoint.build(lambda step: console.print(step, highlight=False)))


def served_name(arguments: argparse.Namespace) -> str:
    """What requests and results call the model: no folder of this machine."""
    return Path(arguments.model).name if arguments.model else checkpoint.NAME


@asynccontextmanager
async def serve(arguments: argparse.Namespace, eviction: Sequence[str]) -> AsyncIterator[str]:
    """A server with these flags of ours; its URL."""
    flags = [
        *("--dtype", "float32", "--enforce-eager", "--served-model-name", served_name(arguments)),
        *("--max-model-len", str(max(arguments.tokens) + LONGEST_ANSWER)),
        *("--kv-cache-memory-bytes", str(int(arguments.memory * 2**30))),
        *eviction,
        *("--kv-eviction-config.min_prompt", "0"),
    ]
    env = {**cpu_environment(arguments.threads, 1), "TORCHDYNAMO_DISABLE": "1"}
    model = Path(model_of(arguments))
    async with Server(model, SCRATCH / "serve-real-model.log", flags, env, arguments.port) as server:
        yield f"{server.url}/v1"


async def takes_parameters(url: str, policies: Sequence[str]) -> bool:
    """Whether requests may set parameters of policies."""
    async with Endpoint(url) as endpoint:
        await endpoint.find_model(None)
        try:
            await endpoint.require_parameters(policies)
        except EndpointError:
            return False
    return True


def parts(arguments: argparse.Namespace) -> list[Part]:
    """One for each length and scope."""
    return [
        Part(arguments.output / f"{tokens}-{scope}", tokens, scope)
        for tokens in dict.fromkeys(arguments.tokens)
        for scope in dict.fromkeys(arguments.scopes)
    ]


def commands(arguments: argparse.Namespace, part: Part, policies: Sequence[str], url: str) -> list[list[str]]:
    """Words behind `vllm-kvevict quality` that measure some policies."""
    shared = ["--url", url, "--model", served_name(arguments), "--output"]
    # Results note this command; a folder of this machine would mean nothing to others.
    shared += [
        os.path.relpath(part.folder),
        "--tokens",
        str(part.tokens),
        "--scopes",
        part.scope,
        "--seed",
        str(arguments.seed),
    ]
    shared += ["--budgets", *(f"{budget:g}" for budget in arguments.budgets), "--min-prompt", "0"]
    shared += ["--timeout", "3600"]
    answers = ["--samples", str(arguments.fidelity_samples), "--tasks", *fidelity_tasks(arguments.tasks)]
    questions = ["--samples", str(arguments.samples), "--concurrency", str(arguments.concurrency)]
    questions += ["--family", "text", "--tasks", *arguments.tasks]
    return [
        ["fidelity", *shared, *answers, "--policies", *scored(policies)],
        ["run", *shared, *questions, "--policies", *policies],
    ]


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


async def measure(arguments: argparse.Namespace, url: str, policies: Sequence[str]) -> None:
    """Measure some policies of one server in all parts, and write the reports again after each part."""
    for part in parts(arguments):
        for words in commands(arguments, part, policies, url):
            await quality(words)
        title = f"{served_name(arguments)}, {part.tokens:,} tokens, scope {part.scope}"
        await quality(["report", os.path.relpath(part.folder), "--title", title])
        write_table(arguments.output, parts(arguments))


async def compare(arguments: argparse.Namespace, start: Serve) -> None:
    """Everything that is asked for, each server after the one before it.

    Args:
        start: starts a server.
    """
    plain, tuned = split(arguments.policies)
    async with start(arguments, ["--kv-eviction", FULL, "--kv-eviction-config.policies", "all"]) as url:
        together = not tuned or await takes_parameters(url, tuned)
        apart = [] if together else own_columns(tuned)
        if apart:
            arguments.policies = [*plain, *(own.label for own in apart)]
        if arguments.dry_run:
            await print_hours(arguments, url, parts(arguments), console)
            return
        await measure(arguments, url, arguments.policies if together else plain)
    for own in apart:
        await _measure_own(arguments, own, start)


async def _measure_own(arguments: argparse.Namespace, own: Columns, start: Serve) -> None:
    """Measure a policy whose parameters its server must be started with."""
    console.print(f"a server of its own for {own.label}", highlight=False)
    async with start(arguments, own.flags) as url:
        await measure(arguments, url, [FULL, own.label])


async def run(arguments: argparse.Namespace, start: Serve = serve) -> None:
    """Compare; results are compressed at the end, whatever the end is.

    Args:
        start: starts a server.
    """
    with locked(arguments.output):
        for part in parts(arguments):
            unpack(part.folder)
        try:
            await compare(arguments, start)
        finally:
            for part in parts(arguments):
                pack(part.folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit code."""
    arguments = parse_arguments(argv)
    warn_if_busy(console)
    try:
        return run_benchmark(run(arguments))
    except (checkpoint.CheckpointError, EndpointError, OSError, ValueError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
