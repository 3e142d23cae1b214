"""Ask an endpoint everything that is not answered yet."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from vllm_kvevict.machine import record
from vllm_kvevict.quality.cases import Case, Generated, fingerprints
from vllm_kvevict.quality.endpoint import PARAMETERS, Endpoint, EndpointError, RefusedError, Reply
from vllm_kvevict.quality.fitting import TextQuestions, cases
from vllm_kvevict.quality.results import (
    FULL,
    RESULTS,
    TURNS,
    Column,
    Result,
    Sample,
    Settings,
    Store,
    write_settings,
)

Questions = Generated | TextQuestions | list[Case]


@dataclass(frozen=True)
class Target:
    """The server that is asked, and where the results go.

    Attributes:
        url: of the endpoint.
        model: None for the first one that it lists.
        output: folder.
        columns: what everything is asked with.
        form, seed: see Settings.
        concurrency: requests at once.
        min_prompt: the server's; shorter prompts are marked as whole.
        timeout, tries, backoff: see Endpoint.
        note: on the server, for the report.
        command: what the user typed, for the report.
    """

    url: str
    model: str | None
    output: Path
    columns: Sequence[Column]
    form: str
    seed: int
    concurrency: int
    min_prompt: int
    timeout: float
    tries: int
    backoff: float
    note: str
    command: Sequence[str]

    def endpoint(self) -> Endpoint:
        """Connections to the server."""
        return Endpoint(self.url, self.concurrency, self.timeout, self.tries, self.backoff)


@dataclass(frozen=True)
class Job(Target):
    """One run.

    Attributes:
        cases: what is asked.
        plain: send no fields of ours.
        instruct, slack: see Settings.
    """

    cases: Questions
    plain: bool
    instruct: bool
    slack: int


def columns(policies: Sequence[str], budgets: Sequence[float], scopes: Sequence[str]) -> list[Column]:
    """Every policy with every budget and scope; the full cache once, as it has neither."""
    found = []
    for policy in dict.fromkeys(policies):
        if policy == FULL:
            found.append(Column(FULL))
        else:
            found += [Column(policy, budget, scope) for scope in scopes for budget in budgets]
    return list(dict.fromkeys(found))


def applicable(case: Case, columns: Sequence[Column]) -> list[Column]:
    """The columns that a case can be asked with; without anything before its question only its prompt is evicted."""
    return [column for column in columns if column.scope not in ("prefix", TURNS) or case.has_prefix]


def requests(cases: Iterable[Case], columns: Sequence[Column]) -> Iterator[tuple[Case, Column]]:
    """Everything to ask."""
    return ((case, column) for case in cases for column in applicable(case, columns))


def asked_fields(column: Column) -> dict[str, Any]:
    """What a request says of a column, but for the scope."""
    if column.budget is None:
        return {"kv_eviction": FULL}
    fields = {"kv_eviction": column.asked, "kv_budget": column.budget}
    return fields | ({PARAMETERS: column.parameters} if column.parameters else {})


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


@dataclass
class Driver:
    """Sends requests and stores the answers.

    Attributes:
        endpoint: that answers.
        store: takes the answers.
        min_prompt, plain: see Job.
    """

    endpoint: Endpoint
    store: Store[Result]
    min_prompt: int
    plain: bool
    _prefixes: dict[Sample, "asyncio.Task[int]"] = field(default_factory=dict)

    async def ask(self, case: Case, column: Column) -> None:
        """Ask one thing and store the answer."""
        fields = await self._fields(case, column)
        evict_at = await self._prefix(case) if column.scope == TURNS else fields.get("kv_prefix_len")
        started = time.perf_counter()
        try:
            reply = await self.endpoint.ask(case.prompt(), case.max_tokens, fields)
        except RefusedError as error:
            raise EndpointError(f"{error} (asked: {case}; {column})") from None
        self.store.add(self._result(case, column, reply, evict_at, time.perf_counter() - started))

    async def _fields(self, case: Case, column: Column) -> dict[str, Any]:
        if column.budget is None:
            return {} if self.plain else asked_fields(column)
        fields = asked_fields(column)
        if column.scope == "prefix":
            fields["kv_prefix_len"] = await self._prefix(case)
        return fields

    def _prefix(self, case: Case) -> "asyncio.Task[int]":
        """The case's prefix length; columns of one case that ask at the same time wait for the same answer."""
        if case.sample not in self._prefixes:
            while len(self._prefixes) >= 64:  # long done
                self._prefixes.pop(next(iter(self._prefixes)))
            self._prefixes[case.sample] = asyncio.create_task(prefix_len(self.endpoint, case))
        return self._prefixes[case.sample]

    def _result(self, case: Case, column: Column, reply: Reply, before: int | None, seconds: float) -> Result:
        evict_at = None if column.budget is None else before or reply.prompt_tokens
        return Result(
            *case.sample,
            *column.key,
            score=case.score(reply.text),
            reply=reply.text,
            expected=case.expected,
            prompt_tokens=reply.prompt_tokens,
            output_tokens=reply.output_tokens,
            finish_reason=reply.finish_reason,
            evict_at=evict_at,
            whole=evict_at is not None and evict_at < self.min_prompt,
            request=reply.request,
            seconds=round(seconds, 3),
        )


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


async def run(job: Job, console: Console) -> int:
    """Ask what is missing; the number of answers that came.

    Raises:
        EndpointError: if the endpoint fails; what was answered before is stored.
        ResultsError: if the folder cannot take the results.
    """
    async with job.endpoint() as endpoint:
        await endpoint.find_model(job.model)
        if not job.plain:
            await require_eviction(endpoint, job.columns, job.min_prompt)
        with Store(job.output / RESULTS, Result) as store:
            write_settings(job.output, settings(job, endpoint.model), await describe(job, endpoint))
            driver = Driver(endpoint, store, job.min_prompt, job.plain)
            if isinstance(job.cases, TextQuestions):
                job = replace(job, cases=await fitted(job.cases, endpoint, job.concurrency, console))
            return await answer_all(driver, job, console)


async def fitted(asked: TextQuestions, endpoint: Endpoint, concurrency: int, console: Console) -> list[Case]:
    """Questions on real text as cases of the wanted number of tokens."""
    with progress(console) as bar:
        task = bar.add_task("texts", total=len(asked))
        return await cases(asked, endpoint, concurrency, lambda: bar.advance(task))


def settings(job: Job, model: str) -> Settings:
    """What the folder's results have in common."""
    questions = job.cases.questions if isinstance(job.cases, Generated) else 1
    asked = list(job.cases.digests()) if isinstance(job.cases, TextQuestions) else job.cases
    texts = fingerprints(asked, job.seed)
    return Settings(model, job.seed, job.instruct, job.slack, texts, questions, job.form)


async def describe(job: Target, endpoint: Endpoint) -> dict[str, Any]:
    """The run, for the report: command, machine, versions."""
    server = {"url": job.url, "vllm": await endpoint.version(), "note": job.note}
    return record(job.command, {"server": server, "concurrency": job.concurrency})


async def answer_all(driver: Driver, job: Job, console: Console) -> int:
    """Let `concurrency` workers ask what is missing, and show how far they are."""
    before = len(driver.store.done)
    with progress(console) as bar:
        task = bar.add_task("answers", total=count(job))
        queue = missing(job, driver.store, lambda: bar.advance(task))

        async def ask(request: tuple[Case, Column]) -> None:
            await driver.ask(*request)
            bar.advance(task)

        await each(queue, job.concurrency, ask)
    return len(driver.store.done) - before


T = TypeVar("T")


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
    marks = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*marks, TimeElapsedColumn(), TimeRemainingColumn(), console=console)


def count(job: Job) -> int:
    """How many answers the run should have at its end."""
    if not isinstance(job.cases, list):  # each takes a while to make, and none is all question
        return len(job.cases) * len(job.columns)
    return sum(1 for _ in requests(job.cases, job.columns))


def missing(job: Job, store: Store[Result], on_done: Callable[[], None]) -> Iterator[tuple[Case, Column]]:
    """What is not answered yet; `on_done` is called for everything that is."""
    assert not isinstance(job.cases, TextQuestions)
    for case, column in requests(job.cases, job.columns):
        if (case.sample, column) in store.done:
            on_done()
        else:
            yield case, column
