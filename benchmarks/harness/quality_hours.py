"""How long a comparison of policies will take."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_kvevict.quality import texts
from vllm_kvevict.quality.endpoint import Endpoint
from vllm_kvevict.quality.fidelity import FIDELITY, Fidelity, forced
from vllm_kvevict.quality.options import FIDELITY_TASKS
from vllm_kvevict.quality.questions import OPEN_TASKS
from vllm_kvevict.quality.results import FULL, RESULTS, Cell, Column, Result, read
from vllm_kvevict.quality.run import columns
from vllm_kvevict.schedules.registry import bounded_policies, repeating_policies

ANSWER, TOP = 16, 20


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


def fidelity_tasks(tasks: Sequence[str]) -> list[str]:
    """Whose answers are scored: those without a right answer, and some of those with one."""
    return [task for task in FIDELITY_TASKS if task in OPEN_TASKS or task in tasks]


def scored(policies: Sequence[str]) -> list[str]:
    """Those whose answers can be scored: not those that evict while they read."""
    return [policy for policy in policies if Column(policy).asked not in bounded_policies()]


async def print_hours(
    arguments: argparse.Namespace, url: str, parts: Sequence[Part], console: Console
) -> None:
    """Time one prompt of each length, and say how long what is missing takes at most."""
    found = Table(title="at most, one request after another")
    for name in ("tokens", "scope", "requests", "seconds of a prompt", "hours"):
        found.add_column(name, justify="right")
    seconds = {tokens: await read_seconds(url, tokens) for tokens in {part.tokens for part in parts}}
    total = 0.0
    for part in parts:
        readings, requests = missing(arguments, part)
        hours = readings * seconds[part.tokens] / 3600
        total += hours
        cells = f"{part.tokens:,}", part.scope, f"{requests:,}", f"{seconds[part.tokens]:.1f}", f"{hours:.1f}"
        found.add_row(*cells)
    console.print(found)
    console.print(f"{total:.1f} hours in all, without what is done already", highlight=False)


async def read_seconds(url: str, tokens: int) -> float:
    """How long the server takes for one prompt of so many tokens that is scored with the full cache."""
    async with Endpoint(url, timeout=3600) as endpoint:
        await endpoint.find_model(None)
        sentences = texts.sentences()
        prose = " ".join(sentences * (1 + tokens // sum(len(one.split()) for one in sentences)))
        prompt = (await endpoint.tokenize({"prompt": prose[: 8 * tokens]}))[:tokens]
        started = time.perf_counter()
        await forced(endpoint, prompt, prompt[:ANSWER], Column(FULL), None, TOP)
        return time.perf_counter() - started


def missing(arguments: argparse.Namespace, part: Part) -> tuple[int, int]:
    """How often prompts are still to be read, and by how many requests."""
    asked = columns(arguments.policies, arguments.budgets, [part.scope])
    scores = columns(scored(arguments.policies), arguments.budgets, [part.scope])
    tasks = len(fidelity_tasks(arguments.tasks))
    answers, measures = done(part.folder / RESULTS, Result), done(part.folder / FIDELITY, Fidelity)
    left = [(column, len(arguments.tasks) * arguments.samples - answers.get(column, 0)) for column in asked]
    left += [(column, tasks * arguments.fidelity_samples - measures.get(column, 0)) for column in scores]
    counts = [(column, max(0, count)) for column, count in left]
    twice = repeating_policies()
    readings = sum(count * (2 if column.asked in twice else 1) for column, count in counts)
    return readings, sum(count for _, count in counts)


def done(path: Path, kind: type[Cell]) -> dict[Column, int]:
    """How many samples of each column a file holds."""
    counts: dict[Column, int] = {}
    for record in read(path, kind) if path.exists() else ():
        counts[record.column] = counts.get(record.column, 0) + 1
    return counts
