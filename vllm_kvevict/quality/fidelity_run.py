"""Let the full cache answer, and score its answers with each column, as far as that is not done yet."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from vllm_kvevict.quality.cases import Case, fingerprint, fingerprints
from vllm_kvevict.quality.endpoint import Endpoint, EndpointError, RefusedError
from vllm_kvevict.quality.fidelity import (
    ANSWERS,
    FIDELITY,
    Answer,
    Choices,
    Fidelity,
    FidelitySettings,
    digest,
    first_counted,
    score,
)
from vllm_kvevict.quality.fitting import TextQuestions
from vllm_kvevict.quality.prompts import TASK as PROMPTS
from vllm_kvevict.quality.results import FULL, TURNS, Column, Store, write_settings
from vllm_kvevict.quality.run import (
    Target,
    applicable,
    asked_fields,
    describe,
    each,
    fitted,
    prefix_len,
    progress,
    require_eviction,
)

NO_LIST = "max-logprobs"
TOKEN = "token_id:"
"""How the API writes a token's id where it would write its text."""


@dataclass(frozen=True)
class FidelityJob(Target):
    """One run; the full cache is the first of its columns.

    Attributes:
        cases: whose answers are scored.
        answer_tokens, top: see FidelitySettings.
        dry_run: only say how long it would take.
    """

    cases: TextQuestions | list[Case]
    answer_tokens: int
    top: int
    dry_run: bool


def require_scorable(columns: Sequence[Column]) -> None:
    """Refuse policies that evict while they read: the answer would be read as part of the prompt's last chunk.

    Raises:
        ValueError: one sentence that names them.
    """
    from vllm_kvevict.schedules.registry import bounded_policies  # late: it needs torch

    wrong = [column.policy for column in columns if column.asked in bounded_policies()]
    if wrong:
        raise ValueError(
            f"{', '.join(dict.fromkeys(wrong))} cannot be scored this way, since it evicts while it reads the prompt: "
            "leave it out of --policies, and measure it with vllm-kvevict quality run"
        )


@dataclass
class FidelityDriver:
    """Sends requests and stores what comes.

    Attributes:
        endpoint: that answers.
        answers, measures: take what comes.
        job: see FidelityJob.
    """

    endpoint: Endpoint
    answers: Store[Answer]
    measures: Store[Fidelity]
    job: FidelityJob

    async def measure(self, case: Case, on_done: Callable[[], None]) -> None:
        """Everything about one prompt, one column after another, so that one prompt's KV is held at a time."""
        columns = applicable(case, self.job.columns)
        left = [column for column in columns if (case.sample, column) not in self.measures.done]
        for _ in range(len(columns) - len(left)):
            on_done()
        if not left:
            return
        try:
            prompt = await self.endpoint.tokenize(case.prompt())
            answer = await self.answer(case, prompt)
            prefix = await prefix_len(self.endpoint, case) if _any_prefix(left) else len(prompt)
            for column in left:
                if len(answer.tokens) > first_counted(column):
                    await self.score(case, prompt, prefix, answer, column)
                on_done()
        except RefusedError as error:
            advice = f" (--top {self.job.top} needs a server with at least as many --{NO_LIST})"
            lists_are_short = NO_LIST in str(error).replace("_", "-")
            raise EndpointError(f"{error} (asked: {case}){advice if lists_are_short else ''}") from None

    async def answer(self, case: Case, prompt: list[int]) -> Answer:
        """What the full cache says; of an earlier run, if there was one."""
        found = self.answers.done.get(case.sample)
        if found is None:
            found = await self.ask(case, prompt)
            self.answers.add(found)
        elif found.prompt != digest(prompt):
            raise EndpointError(f"{case} has other tokens than before: choose another --output")
        return found

    async def ask(self, case: Case, prompt: list[int]) -> Answer:
        """The full cache's greedy answer."""
        body = {
            "prompt": prompt,
            "max_tokens": self.job.answer_tokens,
            "logprobs": self.job.top,
            "return_tokens_as_token_ids": True,
            "vllm_xargs": {"kv_eviction": FULL},
        }
        choice = await self.endpoint.complete(body)
        lists = choice["logprobs"]
        rows = [{k.removeprefix(TOKEN): v for k, v in row.items()} for row in lists["top_logprobs"]]
        tokens = tuple(int(token.removeprefix(TOKEN)) for token in lists["tokens"])
        return Answer(*case.sample, digest(prompt), len(prompt), tokens, rows, choice["text"])

    async def score(self, case: Case, prompt: list[int], prefix: int, answer: Answer, column: Column) -> None:
        """Score one answer with one column, and store the measure."""
        evict_at = None if column.budget is None else prefix if column.scope == "prefix" else len(prompt)
        started = time.perf_counter()
        if column.scope == TURNS:
            rows, evict_at = await self.in_turns(case, prompt, answer, column)
        else:
            rows = await forced(self.endpoint, prompt, answer.tokens, column, evict_at, self.job.top)
        whole = evict_at is not None and evict_at < max(1, self.job.min_prompt)
        self.measures.add(score(answer, column, rows, evict_at, whole, time.perf_counter() - started))

    async def in_turns(
        self, case: Case, prompt: list[int], answer: Answer, column: Column
    ) -> tuple[list[Choices], int]:
        """The most likely tokens where a chat is evicted turn by turn, and where its last turn ends, 0 without any."""
        tokens, fields = await self.endpoint.render(case.prompt(), asked_fields(column))
        if tokens != prompt:
            raise EndpointError(f"{self.endpoint.url} renders {case} and tokenizes it as different tokens")
        rows = await scored(self.endpoint, prompt, answer.tokens, fields, self.job.top, rendered=True)
        return rows, fields.get("kv_turns", [0])[-1]


async def forced(
    endpoint: Endpoint,
    prompt: Sequence[int],
    answer: Sequence[int],
    column: Column,
    evict_at: int | None,
    top: int,
) -> list[Choices]:
    """The most likely tokens at each place of an answer, when it is read behind a cache that was evicted before.

    Args:
        evict_at: tokens of the prompt that are evicted; None for the full cache.
        top: tokens of each list, to which the answer's own one is added.
    """
    fields = {"kv_eviction": FULL} if evict_at is None else asked_fields(column) | {"kv_prefix_len": evict_at}
    return await scored(endpoint, prompt, answer, fields, top)


async def scored(
    endpoint: Endpoint,
    prompt: Sequence[int],
    answer: Sequence[int],
    fields: Mapping[str, Any],
    top: int,
    *,
    rendered: bool = False,
) -> list[Choices]:
    """The most likely tokens at each place of an answer, when a request with these fields reads it.

    Args:
        rendered: whether the fields are those of a rendered chat, of which completions do not take all.

    Raises:
        EndpointError: the server does not tell.
    """
    tokens, asked = [*prompt, *answer], {"max_tokens": 1, "prompt_logprobs": top}
    if rendered:
        found = await endpoint.generate(tokens, fields, **asked)
    else:
        found = await endpoint.complete({"prompt": tokens, **asked, "vllm_xargs": dict(fields)})
    rows = found.get("prompt_logprobs")
    if not isinstance(rows, list) or len(rows) != len(prompt) + len(answer):
        raise EndpointError(
            f"{endpoint.url} does not answer with prompt_logprobs, which only vLLM's servers do"
        )
    return [{int(token): entry["logprob"] for token, entry in row.items()} for row in rows[len(prompt) :]]


def _any_prefix(columns: Sequence[Column]) -> bool:
    return any(column.scope == "prefix" for column in columns)


async def run_fidelity(job: FidelityJob, console: Console) -> int:
    """Measure what is missing; the number of new measures, or of those that a dry run would take.

    Raises:
        EndpointError: if the endpoint fails; what was measured before is stored.
        ResultsError: if the folder cannot take the measures.
        ValueError: a policy cannot be scored, or no prompt can.
    """
    require_scorable(job.columns)
    async with job.endpoint() as endpoint:
        await endpoint.find_model(job.model)
        await require_eviction(endpoint, job.columns, job.min_prompt)
        cases = job.cases
        if isinstance(cases, TextQuestions):
            cases = await fitted(cases, endpoint, job.concurrency, console)
        total = sum(len(applicable(case, job.columns)) for case in cases)
        scopes = {column.scope for column in job.columns}
        if scopes & {"prefix", TURNS} and not any(case.has_prefix for case in cases):
            raise ValueError(
                "no prompt has anything before its question, which --scopes prefix and turns need"
            )
        if job.dry_run:
            return await estimate(job, endpoint, cases, total, console)
        with (
            Store(job.output / ANSWERS, Answer) as answers,
            Store(job.output / FIDELITY, Fidelity) as measures,
        ):
            write_settings(job.output, settings(job, endpoint.model), await describe(job, endpoint))
            before = len(measures.done)
            driver = FidelityDriver(endpoint, answers, measures, job)
            with progress(console) as bar:
                task = bar.add_task("measures", total=total)
                await each(
                    cases, job.concurrency, lambda case: driver.measure(case, lambda: bar.advance(task))
                )
            return len(measures.done) - before


def settings(job: FidelityJob, model: str) -> FidelitySettings:
    """What the folder's measures have in common."""
    if isinstance(job.cases, TextQuestions):
        texts = fingerprints(list(job.cases.digests()), job.seed)
    else:
        texts = {PROMPTS: fingerprint(job.cases)}
    return FidelitySettings(
        model, job.seed, False, 0, texts, form=job.form, answer_tokens=job.answer_tokens, top=job.top
    )


async def estimate(
    job: FidelityJob, endpoint: Endpoint, cases: Sequence[Case], total: int, console: Console
) -> int:
    """Time one prompt, the longest, with the full cache, and say how long all of them would take at most."""
    lengths = [len(await endpoint.tokenize(case.prompt())) for case in cases]
    longest = cases[lengths.index(max(lengths))]
    prompt = await endpoint.tokenize(longest.prompt())
    started = time.perf_counter()
    await forced(endpoint, prompt, prompt[-job.answer_tokens :], Column(FULL), None, job.top)
    seconds = time.perf_counter() - started
    requests = total + len(cases)
    hours = seconds * requests * sum(lengths) / len(lengths) / max(lengths) / 3600
    duration = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
    console.print(
        f"{len(cases):,} prompts of {min(lengths):,} to {max(lengths):,} tokens, {len(job.columns):,} columns: "
        f"{requests:,} requests, each of which reads its prompt again. The longest took {seconds:.1f} s, so that all "
        f"take about {duration} one after another (kvzip reads each prompt twice).",
        highlight=False,
        soft_wrap=True,
    )
    return requests


def floor_error(agreement: float) -> str:
    """What to do about a full cache that does not agree with itself."""
    return (
        f"the full cache agrees with itself on {agreement:.3f} of the tokens only, so the other measures mean little: "
        "serve in float32 (--dtype float32) with --enforce-eager, and ask one request at a time (--concurrency 1)"
    )
