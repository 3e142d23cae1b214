"""How far a compressed cache changes what the model says: the full cache's own answer is scored on it, token by token.

No answer key is needed, so any prompt will do. The full cache answers greedily. Prompt and answer are then sent as one
prompt that is evicted where the original prompt (or the document in it) ends, and the server returns the most likely
tokens at each place of the answer.
"""

import argparse
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kvevict.quality.cases import Case
from vllm_kvevict.quality.endpoint import Endpoint, EndpointError
from vllm_kvevict.quality.results import FULL, TURNS, Cell, Column, Measure, Record
from vllm_kvevict.quality.run import Questions, Task, asked_fields, prefix_len

ANSWERS, FIDELITY = "answers.jsonl", "fidelity.jsonl"
FLOOR = 0.99
"""The least agreement of the full cache with itself at which the others mean anything."""
SMALLEST = 1e-12
"""Stands in for a probability that rounding made 0."""
TOKEN = "token_id:"
"""How the API writes a token's id where it would write its text."""

Tokens = Sequence[int]
Choices = Mapping[int, float]
"""Log-probabilities of the most likely tokens, by id; natural logarithms."""


def divergence(full: Choices, found: Choices, token: int) -> float:
    """A lower bound of the Kullback-Leibler divergence of `found` from `full`, in nats, at one place.

    Both lists hold the most likely tokens and `token`. The tokens in both count singly, all others as one. By the
    log-sum inequality the sum over groups is never above the sum over all tokens.

    Args:
        full: of the full cache.
        found: of the compressed one.
        token: of the full cache's answer.
    """
    common = {token} | (full.keys() & found.keys())
    masses = [(math.exp(full[one]), math.exp(found[one])) for one in common]
    rest = tuple(max(SMALLEST, 1.0 - sum(side)) for side in zip(*masses, strict=True))
    total = sum(p * (full[one] - found[one]) for one, (p, _) in zip(common, masses, strict=True))
    return max(0.0, total + rest[0] * math.log(rest[0] / rest[1]))


def digest(tokens: Tokens) -> str:
    """What a prompt is recognised by."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Answer(Record):
    """What the full cache says.

    Attributes:
        prompt: digest of its tokens.
        prompt_tokens: their number.
        tokens: of the answer, with the end-of-sequence token if it ended.
        choices: the most likely tokens at each place, by id as text.
        text: of the answer.
    """

    prompt: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    choices: list[dict[str, float]]
    text: str


@dataclass(frozen=True)
class Fidelity(Cell):
    """How one column scores one answer; see Result for what is not listed.

    Attributes:
        first: the place in the answer, from 0, of the first token that counts: 1 where the prompt is evicted at its
            end, since that token was chosen before.
        agrees: for each token, whether it is the column's first choice, too.
        differences: of its log-probability, the column's less the full cache's.
        divergences: see `divergence`.
        exact: the first of these tokens, of a lookahead, that were chosen before the eviction.
    """

    FILE = FIDELITY
    SETTINGS = "fidelity-settings.json"

    first: int
    agrees: tuple[bool, ...]
    differences: tuple[float, ...]
    divergences: tuple[float, ...]
    prompt_tokens: int
    evict_at: int | None
    whole: bool
    seconds: float
    exact: int = field(default=0, kw_only=True)

    @property
    def first_lost(self) -> int | None:
        """The place in the answer, from 0, of the first token on which the two differ."""
        return self.first + self.agrees.index(False) if False in self.agrees else None

    @property
    def later(self) -> tuple[float, ...]:
        """Divergences of the tokens behind the exact ones."""
        return self.divergences[self.exact :]

    def measure(self, values: Sequence[float]) -> Measure:
        """The mean of some values over the tokens."""
        mean = sum(values) / len(values)
        return Measure(*self.sample, *self.column.key, score=mean, evict_at=self.evict_at)


def first_counted(column: Column) -> int:
    """The place in the answer, from 0, of the first token that is scored on the compressed cache."""
    return 1 if column.scope in (None, "prompt") else 0


def score(
    answer: Answer, column: Column, rows: Sequence[Choices], evict_at: int | None, whole: bool, seconds: float
) -> Fidelity:
    """Compare a column's choices at each place of an answer with the full cache's.

    Args:
        rows: of the column, for all tokens of the answer.
    """
    first = first_counted(column)
    pairs = list(zip(by_id(answer.choices), rows, answer.tokens, strict=True))[first:]
    return Fidelity(
        *answer.sample,
        *column.key,
        first=first,
        agrees=tuple(found[token] >= max(found.values()) for _, found, token in pairs),
        **distances(pairs),
        prompt_tokens=answer.prompt_tokens,
        evict_at=evict_at,
        whole=whole,
        seconds=round(seconds, 3),
        exact=min(column.lookahead or 0, len(pairs)),
    )


def by_id(choices: Sequence[Mapping[str, float]]) -> list[Choices]:
    """Lists of the most likely tokens as they are stored, which is by id as text."""
    return [{int(token): value for token, value in row.items()} for row in choices]


def distances(pairs: Sequence[tuple[Choices, Choices, int]]) -> dict[str, Any]:
    """Differences and divergences of Fidelity.

    Args:
        pairs: for each token that counts the full cache's choices, the column's, and the token.
    """
    return {
        "differences": tuple(round(found[token] - own[token], 6) for own, found, token in pairs),
        "divergences": tuple(round(divergence(own, found, token), 7) for own, found, token in pairs),
    }


def is_full(cell: Cell) -> bool:
    return cell.policy == FULL


def check_prompt(answer: Any, prompt: Tokens, case: Case) -> None:
    """Make sure that an answer of an earlier run is one to this prompt.

    Raises:
        EndpointError: it is not.
    """
    if answer.prompt != digest(prompt):
        raise EndpointError(f"{case} has a prompt of other tokens than before: choose another --output")


async def listed(
    endpoint: Endpoint, prompt: Tokens, top: int, fields: Mapping[str, Any], **params: Any
) -> tuple[tuple[int, ...], list[dict[str, float]], str]:
    """An answer: its tokens, the most likely ones at each place by id as text, and its text.

    Args:
        fields: of ours.
        params: of sampling.

    Raises:
        EndpointError: the server does not tell.
    """
    asked = {"prompt": prompt, "logprobs": top, "return_tokens_as_token_ids": True, "vllm_xargs": fields}
    choice = await endpoint.complete({**asked, **params})
    if not (lists := choice.get("logprobs")):
        raise EndpointError(f"{endpoint.url} answers without logprobs, which are scored: ask it directly")
    rows = [{k.removeprefix(TOKEN): v for k, v in row.items()} for row in lists["top_logprobs"]]
    return tuple(int(token.removeprefix(TOKEN)) for token in lists["tokens"]), rows, choice["text"]


async def scored(
    endpoint: Endpoint,
    prompt: Tokens,
    answer: Tokens,
    fields: Mapping[str, Any],
    top: int,
    rendered: bool = False,
) -> list[Choices]:
    """The most likely tokens at each place of an answer, when a request with these fields reads it.

    Args:
        fields: of ours.
        top: tokens of each list, to which the answer's own one is added.
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


@dataclass(frozen=True)
class Asked:
    """What the columns of a prompt share.

    Attributes:
        prompt: its tokens.
        prefix: how many of them come before the question, where a column asks for that.
        answer: of the full cache.
    """

    prompt: list[int]
    prefix: int
    answer: Answer


class Scoring(Task[Asked, Fidelity]):
    """What `fidelity` does; the full cache is the first of its columns."""

    KIND = Fidelity

    def __init__(self, options: argparse.Namespace, cases: Questions, columns: Sequence[Column]):
        super().__init__(options, cases, columns)
        self.answers = self.store(ANSWERS, Answer)
        self.stores.append(self.answers)

    async def check(self) -> None:
        """See Task; the answer would be read as part of the last chunk of a prompt that is evicted chunk by chunk."""
        from vllm_kvevict.schedules.registry import bounded_policies  # late: it needs torch

        if wrong := [column.policy for column in self.columns if column.asked in bounded_policies()]:
            raise ValueError(
                f"{', '.join(dict.fromkeys(wrong))} cannot be scored this way, since it evicts while it reads the "
                "prompt: leave it out of --policies, and measure it with vllm-kvevict quality run"
            )
        blind = {column.scope for column in self.columns} & {"prefix", TURNS}
        if blind and isinstance(self.cases, list) and not any(case.has_prefix for case in self.cases):
            raise ValueError(
                "no prompt has anything before its question, which --scopes prefix and turns need"
            )
        await super().check()

    async def ask(self, case: Case, columns: Sequence[Column]) -> Asked:
        """See Task; the answer is of an earlier run, if there was one."""
        prompt = await self.endpoint.tokenize(case.prompt())
        answer = self.answers.done.get(case.sample)
        if answer is None:
            fields, tokens = {"kv_eviction": FULL}, self.options.answer_tokens
            said = await listed(self.endpoint, prompt, self.options.top, fields, max_tokens=tokens)
            answer = Answer(*case.sample, digest(prompt), len(prompt), *said)
            self.answers.add(answer)
        check_prompt(answer, prompt, case)
        needed = any(column.scope == "prefix" for column in columns)
        prefix = await prefix_len(self.endpoint, case) if needed else len(prompt)
        return Asked(prompt, prefix, answer)

    async def score(self, case: Case, asked: Asked, column: Column) -> Fidelity | None:
        """See Task."""
        prompt, answer = asked.prompt, asked.answer
        if len(answer.tokens) <= first_counted(column):
            return None
        at = asked.prefix if column.scope == "prefix" else len(prompt)
        evict_at = None if column.budget is None else at
        started = time.perf_counter()
        if column.scope == TURNS:
            rows, evict_at = await self.in_turns(case, prompt, answer, column)
        else:
            fields = asked_fields(column)
            if evict_at is not None:
                # A prefix would be evicted without a lookahead.
                fields["kv_answer_from" if column.lookahead else "kv_prefix_len"] = evict_at
            rows = await scored(self.endpoint, prompt, answer.tokens, fields, self.options.top)
        whole = evict_at is not None and evict_at < max(1, self.options.min_prompt)
        return score(answer, column, rows, evict_at, whole, time.perf_counter() - started)

    async def in_turns(
        self, case: Case, prompt: list[int], answer: Answer, column: Column
    ) -> tuple[list[Choices], int]:
        """The most likely tokens where a chat is evicted turn by turn, and where its last turn ends, 0 without any."""
        tokens, fields = await self.endpoint.render(case.prompt(), asked_fields(column))
        if tokens != prompt:
            raise EndpointError(f"{self.endpoint.url} renders {case} and tokenizes it as different tokens")
        rows = await scored(self.endpoint, prompt, answer.tokens, fields, self.options.top, rendered=True)
        return rows, fields.get("kv_turns", [0])[-1]
