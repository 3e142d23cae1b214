"""One loop for all commands: a server is asked what is not measured yet, and what comes is stored."""

import argparse
import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from vllm_kvevict.machine import record
from vllm_kvevict.quality.cases import Case, Generated, fingerprint
from vllm_kvevict.quality.endpoint import PARAMETERS, Endpoint, EndpointError, RefusedError
from vllm_kvevict.quality.fitting import TextQuestions, cases
from vllm_kvevict.quality.prompts import TASK as PROMPTS
from vllm_kvevict.quality.results import FULL, TURNS, Cell, Column, Settings, Store, write_settings

Questions = Generated | TextQuestions | list[Case]
MAX_LOGPROBS = "max-logprobs"
"""The flag of a server that limits lists of log-probabilities, as its refusals name it, but for hyphens."""
A = TypeVar("A")
M = TypeVar("M", bound=Cell)
T = TypeVar("T")


class Task(ABC, Generic[A, M]):
    """What a command asks about each case, and how it scores what comes back.

    Args:
        options: of the command; see `vllm_kvevict.quality.options`.
        cases: what is asked.
        columns: what everything is asked with.

    Attributes:
        KIND: of the measures.
        endpoint: the server that is asked.
        measures: where they are stored.
        stores: all files that the command writes, that of the measures first.
    """

    KIND: ClassVar[type[Cell]]

    def __init__(self, options: argparse.Namespace, cases: Questions, columns: Sequence[Column]):
        self.options, self.cases, self.columns = options, cases, columns
        patience = options.concurrency, options.timeout, options.tries, options.backoff
        self.endpoint = Endpoint(options.url, *patience)
        self.measures: Store[M] = self.store(self.KIND.FILE, self.KIND)
        self.stores: list[Store[Any]] = [self.measures]

    def store(self, name: str, kind: type[Any]) -> Store[Any]:
        """A file of the results' folder."""
        return Store(self.options.output / name, kind)

    async def check(self) -> None:
        """Make sure that the server can do what is asked.

        Raises:
            EndpointError: one sentence says what it needs.
            ValueError: what is asked cannot be measured.
        """
        await require_eviction(self.endpoint, self.columns, self.options.min_prompt)

    @abstractmethod
    async def ask(self, case: Case, columns: Sequence[Column]) -> A:
        """What all columns of a case share."""

    @abstractmethod
    async def score(self, case: Case, asked: A, column: Column) -> M | None:
        """Measure a case in one column; None where nothing counts.

        Args:
            asked: of :meth:`ask`.
        """

    def settings(self) -> Settings:
        """What the folder's measures have in common."""
        if not isinstance(self.cases, list):
            texts = self.cases.fingerprints()
        else:
            texts = {PROMPTS: fingerprint(self.cases)} if self.options.prompts else {}
        names = {field.name for field in fields(Settings)}
        said = {name: value for name, value in vars(self.options).items() if name in names}
        return Settings(**said | {"model": self.endpoint.model, "texts": texts})


async def run(task: Task[Any, Any], console: Console) -> int:
    """Measure what is missing, and show how far that is; the number of new measures.

    Raises:
        EndpointError: if the endpoint fails; what was measured before is stored.
        ResultsError: if the folder cannot take the measures.
        ValueError: what is asked cannot be measured.
    """
    options, measures = task.options, task.measures
    async with task.endpoint as endpoint:
        await endpoint.find_model(options.model)
        await task.check()
        with ExitStack() as files:
            for store in task.stores:
                files.enter_context(store)
            begun = any(store.done for store in task.stores)
            write_settings(options.output, task.settings(), await describe(task), task.KIND, begun)
            before = len(measures.done)
            asked = await fitted(task, console)
            with progress(console) as bar:
                line = bar.add_task("measures", total=total(task, asked))
                work = partial(measure, task, lambda: bar.advance(line))
                await each(asked, options.concurrency, work)
            return len(measures.done) - before


async def fitted(task: Task[Any, Any], console: Console) -> Generated | list[Case]:
    """What is asked; questions on real text as cases of the wanted number of tokens."""
    if not isinstance(task.cases, TextQuestions):
        return task.cases
    with progress(console) as bar:
        line = bar.add_task("texts", total=len(task.cases))
        return await cases(task.cases, task.endpoint, task.options.concurrency, lambda: bar.advance(line))


def total(task: Task[Any, Any], asked: Generated | list[Case]) -> int:
    """How many measures the folder should have at the end."""
    if isinstance(asked, Generated):  # each takes a while to make, and none is all question
        return len(asked) * len(task.columns)
    return sum(len(applicable(case, task.columns)) for case in asked)


async def measure(task: Task[Any, Any], on_done: Callable[[], None], case: Case) -> None:
    """Everything about one case, one column after another, so that the KV of one prompt is held at a time.

    Args:
        on_done: is called for each column, also for those that were measured before.
    """
    left = []
    for column in applicable(case, task.columns):
        if (case.sample, column) in task.measures.done:
            on_done()
        else:
            left.append(column)
    if not left:
        return
    with naming(case, task.options):
        asked = await task.ask(case, left)
    for column in left:
        with naming(f"{case}; {column}", task.options):
            found = await task.score(case, asked, column)
        if found is not None:
            task.measures.add(found)
        on_done()


@contextmanager
def naming(what: object, options: argparse.Namespace) -> Iterator[None]:
    """Say of a request that is refused what it was about."""
    try:
        yield
    except RefusedError as error:
        advice = ""
        if MAX_LOGPROBS in str(error).replace("_", "-"):
            advice = f" (--top {options.top} needs a server with --{MAX_LOGPROBS} of at least that)"
        raise EndpointError(f"{error} (asked: {what}){advice}") from None


def columns(policies: Sequence[str], budgets: Sequence[float], scopes: Sequence[str]) -> list[Column]:
    """Every policy with every budget and scope; the full cache once, as it has neither."""
    found = []
    for policy in policies:
        evicting = [Column(policy, budget, scope) for scope in scopes for budget in budgets]
        found += [Column(FULL)] if policy == FULL else evicting
    return list(dict.fromkeys(found))


def applicable(case: Case, columns: Sequence[Column]) -> list[Column]:
    """The columns that a case can be asked with; without anything before its question only its prompt is evicted."""
    return [column for column in columns if column.scope not in ("prefix", TURNS) or case.has_prefix]


def asked_fields(column: Column) -> dict[str, Any]:
    """What a request says of a column, but for the scope."""
    if column.budget is None:
        return {"kv_eviction": FULL}
    more = {PARAMETERS: column.parameters or None, "kv_lookahead": column.lookahead}
    given = {name: value for name, value in more.items() if value is not None}
    return {"kv_eviction": column.asked, "kv_budget": column.budget, **given}


async def require_eviction(endpoint: Endpoint, columns: Sequence[Column], min_prompt: int) -> None:
    """Make sure that the server evicts as the columns ask.

    Args:
        min_prompt: the server's, in tokens.

    Raises:
        EndpointError: one sentence says what it needs.
    """
    evicting = [column for column in columns if column.budget is not None]
    if not evicting:
        return
    await endpoint.require_eviction()
    if given := [column.policy for column in evicting if column.parameters]:
        await endpoint.require_parameters(list(dict.fromkeys(given)))
    if in_turns := [column for column in evicting if column.scope == TURNS]:
        await endpoint.require_turns(asked_fields(in_turns[0]), min_prompt)


async def prefix_len(endpoint: Endpoint, case: Case) -> int:
    """How many tokens of a case's chat come before its question, whatever the question is.

    Raises:
        EndpointError: if the question leaves no trace in the tokens.
    """
    ids = await endpoint.tokenize(case.prompt())
    other = await endpoint.tokenize(case.prompt(case.probe()))
    common = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), None)
    if common is None:
        raise EndpointError(
            f"{endpoint.root}/tokenize does not show where the question of {case} begins: two different questions give "
            "the same tokens"
        )
    return common


async def describe(task: Task[Any, Any]) -> dict[str, Any]:
    """The run, for the report: command, machine, versions."""
    options = task.options
    server = {"url": options.url, "vllm": await task.endpoint.version(), "note": options.note}
    return record(options.typed, {"server": server, "concurrency": options.concurrency})


async def each(things: Iterable[T], concurrency: int, work: Callable[[T], Awaitable[None]]) -> None:
    """Let so many workers take one thing after another; the first error ends them all."""
    queue = iter(things)

    async def worker() -> None:
        for thing in queue:
            await work(thing)

    workers = [asyncio.create_task(worker()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for one in workers:
            one.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def progress(console: Console) -> Progress:
    """A line with a bar, and how long it will take."""
    return Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
