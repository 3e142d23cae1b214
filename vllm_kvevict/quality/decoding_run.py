"""Let the full cache write answers, and score them while a server evicts them, as far as that is not done yet."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from vllm_kvevict.quality.cases import Case, fingerprint
from vllm_kvevict.quality.decoding import (
    DECODING,
    REFERENCES,
    ROW,
    SCOPE,
    TIMES,
    WRITTEN,
    Decoded,
    DecodingSettings,
    Reference,
    Written,
    first_changed,
    interval_of,
    places,
    repeats_itself,
    score,
)
from vllm_kvevict.quality.decoding_tasks import RECALL, WRITING, Recall, recall, writing
from vllm_kvevict.quality.endpoint import Endpoint, EndpointError, RefusedError
from vllm_kvevict.quality.fidelity import Choices, digest
from vllm_kvevict.quality.fidelity_run import TOKEN, scored
from vllm_kvevict.quality.prompts import TASK as PROMPTS
from vllm_kvevict.quality.results import FULL, Column, Sampled, Store, write_settings
from vllm_kvevict.quality.run import Target, describe, each, progress

TRIES = 64
"""Seeds of an answer before a model is said to repeat itself always: small models do so nine times in ten."""
PIECE = 128
"""Tokens that are asked for at a time, so that an answer which repeats itself ends early."""
WHOLE = {"kv_eviction": FULL, "kv_decode_budget": 0}
"""Fields of a request that evicts nothing."""
ADVICE = (
    "start its server with --kv-eviction full --kv-decode-budget D --kv-eviction-config.decode_policy POLICY"
)


@dataclass(frozen=True)
class DecodingJob(Target):
    """One run; the server's policy is that of all its columns but the full cache's.

    Attributes:
        cases: the user's own prompts, None for ours.
        tasks: that are measured, without own prompts.
        samples: answers of each task.
        answer_tokens, interval, top, temperature: see DecodingSettings.
    """

    cases: list[Case] | None
    tasks: Sequence[str]
    samples: int
    answer_tokens: int
    interval: int | None
    top: int
    temperature: float

    @property
    def asked(self) -> list[tuple[Sampled, dict[str, Any] | Recall]]:
        """Samples, the first of each task first, with a prompt or an answer that exists."""
        if self.cases is not None:
            return [(Sampled(*case.sample), case.prompt()) for case in self.cases]
        words = 3 * self.answer_tokens // 8
        prompts = [chat(text) for text in writing(self.seed, self.samples)]
        makers: dict[str, Callable[[int], dict[str, Any] | Recall]] = {
            WRITING: lambda index: prompts[index],
            RECALL: lambda index: recall(self.seed, index, words),
        }
        return [
            (Sampled(task, self.answer_tokens, None, index), makers[task](index))
            for index in range(self.samples)
            for task in self.tasks
        ]


def chat(text: str) -> dict[str, Any]:
    """One message as the API takes it."""
    return {"messages": [{"role": "user", "content": text}]}


@dataclass
class Attempt:
    """What the full cache has written of an answer, and its most likely tokens at each place, by id as text."""

    tokens: list[int]
    rows: list[dict[str, float]]
    text: str

    def add(self, choice: Mapping[str, Any]) -> None:
        """Add what a server's choice says."""
        lists = choice["logprobs"]
        self.tokens += [int(token.removeprefix(TOKEN)) for token in lists["tokens"]]
        self.rows += [{k.removeprefix(TOKEN): v for k, v in row.items()} for row in lists["top_logprobs"]]
        self.text += choice["text"]


@dataclass
class DecodingDriver:
    """Sends requests and stores what comes.

    Attributes:
        endpoint: that answers.
        written, references, measures: take what comes.
        job: see DecodingJob.
    """

    endpoint: Endpoint
    written: Store[Written]
    references: Store[Reference]
    measures: Store[Decoded]
    job: DecodingJob

    async def measure(
        self, sample: Sampled, made: dict[str, Any] | Recall, on_done: Callable[[], None]
    ) -> None:
        """Everything about one answer."""
        left = [column for column in self.job.columns if (sample.sample, column) not in self.measures.done]
        for _ in range(len(self.job.columns) - len(left)):
            on_done()
        if not left:
            return
        prompt = await self.endpoint.tokenize(chat(made.asked) if isinstance(made, Recall) else made)
        answer = self.written.done.get(sample.sample)
        if answer is None:
            answer = await self.write(sample, prompt, made)
        elif answer.prompt != digest(prompt):
            raise EndpointError(f"{sample} has other tokens than before: choose another --output")
        full = await self.reference(prompt, answer)
        for column in left:
            await self.score(prompt, answer, full, column)
            on_done()

    async def write(self, sample: Sampled, prompt: list[int], made: dict[str, Any] | Recall) -> Written:
        """The answer of a sample, stored with the full cache's choices if they came with it."""
        if isinstance(made, Recall):
            tokens, counted = await self.tokens_of(made)
            text = "".join(made.pieces)
            found = Written(*sample.sample, digest(prompt), len(prompt), tokens, counted, 0, 0, text)
        else:
            found = await self.ask(sample, prompt)
        self.written.add(found)
        return found

    async def tokens_of(self, made: Recall) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens of a made answer, and the places of the values that it repeats."""
        tokens: list[int] = []
        counted: list[int] = []
        for number, piece in enumerate(made.pieces):
            ids = await self.endpoint.tokenize({"prompt": piece, "add_special_tokens": False})
            if number % 2:
                counted += range(len(tokens), len(tokens) + len(ids))
            tokens += ids
        return tuple(tokens), tuple(counted)

    async def ask(self, sample: Sampled, prompt: list[int]) -> Written:
        """An answer that the full cache writes, and that does not repeat itself.

        Raises:
            EndpointError: all of them do.
        """
        for left_out in range(TRIES):
            seed = (self.job.seed * 1000 + sample.index) * TRIES + left_out
            found = await self.attempt(prompt, seed)
            if found is not None:
                self.references.add(Reference(*sample.sample, found.rows))
                tokens = tuple(found.tokens)
                return Written(
                    *sample.sample, digest(prompt), len(prompt), tokens, (), seed, left_out, found.text
                )
        raise EndpointError(
            f"{self.endpoint.model} says {ROW} tokens {TIMES} times in each of {TRIES} answers to {sample}: give it "
            "fewer --answer-tokens, a higher --temperature or other prompts"
        )

    async def attempt(self, prompt: list[int], seed: int) -> Attempt | None:
        """One answer, each piece with a seed of its own; None as soon as it repeats itself."""
        found = Attempt([], [], "")
        while (left := self.job.answer_tokens - len(found.tokens)) > 0:
            length = min(PIECE, left)
            body = {
                "prompt": [*prompt, *found.tokens],
                "max_tokens": length,
                "min_tokens": length,
                "temperature": self.job.temperature,
                "seed": seed * self.job.answer_tokens + len(found.tokens),
                "logprobs": self.job.top,
                "return_tokens_as_token_ids": True,
                "vllm_xargs": WHOLE,
            }
            found.add(await self.endpoint.complete(body))
            if repeats_itself(found.tokens):
                return None
        return found

    async def reference(self, prompt: list[int], answer: Written) -> list[Choices]:
        """The full cache's choices: those with which it wrote the answer, or else scored it."""
        found = self.references.done.get(answer.sample)
        if found is None:
            rows = await scored(self.endpoint, prompt, answer.tokens, WHOLE, self.job.top)
            texts = [{str(token): value for token, value in row.items()} for row in rows]
            found = Reference(*answer.sample, texts)
            self.references.add(found)
        return found.rows

    async def score(
        self, prompt: list[int], answer: Written, full: Sequence[Choices], column: Column
    ) -> None:
        """Score one answer with one column, and store the measure."""
        fields, evict_at, interval = dict(WHOLE), None, None
        if column.budget is not None:
            interval = interval_of(column.budget, self.job.interval)
            evict_at = len(prompt) + int(column.budget) + interval
            fields |= {"kv_decode_budget": int(column.budget), "kv_answer_from": len(prompt)}
        counted = places(answer, column, self.job.interval)
        if not counted or (answer.counted and len(counted) < len(answer.counted)):
            raise ValueError(
                f"{column} does not evict answers of {len(answer.tokens)} tokens before what counts"
            )
        started = time.perf_counter()
        rows = await scored(self.endpoint, prompt, answer.tokens, fields, self.job.top)
        seconds = time.perf_counter() - started
        self.measures.add(score(answer, column, full, rows, counted, evict_at, seconds))


async def require_decoding(endpoint: Endpoint, budgets: Sequence[float]) -> None:
    """Make sure that the server evicts answers.

    Raises:
        EndpointError: one sentence says what it needs.
    """
    await endpoint.require_eviction()
    try:
        fields = {**WHOLE, "kv_decode_budget": int(budgets[0])}
        await endpoint.ask({"prompt": "what ?"}, 1, fields)
    except RefusedError as error:
        raise EndpointError(f"{error}: {ADVICE}") from None


def check_lengths(job: DecodingJob) -> None:
    """Refuse answers that end before they are evicted.

    Raises:
        ValueError: it names the budget.
    """
    for column in job.columns:
        if column.budget is None:
            continue
        first = first_changed(column.budget, interval_of(column.budget, job.interval))
        if first >= job.answer_tokens:
            raise ValueError(
                f"--budgets {column.budget:g} evicts answers after {first - 1} tokens first: --answer-tokens must be "
                f"above {first}, not {job.answer_tokens}"
            )


async def run_decoding(job: DecodingJob, console: Console) -> int:
    """Measure what is missing; the number of new measures.

    Raises:
        EndpointError: if the endpoint fails; what was measured before is stored.
        ResultsError: if the folder cannot take the measures.
        ValueError: answers are too short to be evicted.
    """
    check_lengths(job)
    async with job.endpoint() as endpoint:
        await endpoint.find_model(job.model)
        await require_decoding(endpoint, [column.budget for column in job.columns if column.budget])
        with (
            Store(job.output / WRITTEN, Written) as written,
            Store(job.output / REFERENCES, Reference) as references,
            Store(job.output / DECODING, Decoded) as measures,
        ):
            write_settings(job.output, settings(job, endpoint.model), await describe(job, endpoint))
            before = len(measures.done)
            driver = DecodingDriver(endpoint, written, references, measures, job)
            asked = job.asked
            with progress(console) as bar:
                task = bar.add_task("measures", total=len(asked) * len(job.columns))
                work = _each_of(driver, lambda: bar.advance(task))
                await each(asked, job.concurrency, work)
            return len(measures.done) - before


def _each_of(
    driver: DecodingDriver, on_done: Callable[[], None]
) -> Callable[[tuple[Sampled, dict[str, Any] | Recall]], Awaitable[None]]:
    return lambda one: driver.measure(*one, on_done)


def settings(job: DecodingJob, model: str) -> DecodingSettings:
    """What the folder's measures have in common."""
    texts = {} if job.cases is None else {PROMPTS: fingerprint(job.cases)}
    return DecodingSettings(
        model,
        job.seed,
        False,
        0,
        texts,
        answer_tokens=job.answer_tokens,
        interval=job.interval,
        top=job.top,
        temperature=job.temperature,
    )


def columns(policy: str, budgets: Sequence[float]) -> list[Column]:
    """The full cache as its own control, and the server's policy with each budget."""
    return [Column(FULL), *(Column(policy, budget, SCOPE) for budget in dict.fromkeys(budgets))]
