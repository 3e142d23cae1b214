"""How far evicting an answer changes how it goes on: answers that exist are scored while they are evicted.

An answer is sent behind its prompt with the place where it begins, so the server evicts it at the same positions as if
it wrote it. Only tokens behind the first of these count; before it nothing was lost.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_kvevict.decode_interval import default_interval
from vllm_kvevict.quality import fidelity
from vllm_kvevict.quality.cases import Case
from vllm_kvevict.quality.endpoint import EndpointError, RefusedError
from vllm_kvevict.quality.fidelity import Choices, Fidelity, Tokens, digest, scored
from vllm_kvevict.quality.results import FULL, Column, Measure, Record
from vllm_kvevict.quality.run import Task

WRITTEN, REFERENCES, DECODING = "written.jsonl", "references.jsonl", "decoding.jsonl"
SCOPE = "answer"
"""Of the columns with a budget: what of an answer stays."""
PAGE = 32
"""Tokens of a page, to which the server rounds its interval up."""
ROW, TIMES = 16, 3
"""An answer that says so many tokens in a row so often repeats itself, and tells nothing about what it needs."""
TRIES = 64
"""Seeds of an answer before a model is said to repeat itself always: small models do so nine times in ten."""
PIECE = 128
"""Tokens that are asked for at a time, so that an answer which repeats itself ends early."""
WHOLE = {"kv_eviction": FULL, "kv_decode_budget": 0}
"""Fields of a request that evicts nothing."""
ADVICE = (
    "start its server with --kv-eviction full --kv-decode-budget D --kv-eviction-config.decode_policy POLICY"
)
Rows = Sequence[Choices]
Lists = list[dict[str, float]]
"""The same as it is stored, by id as text."""


@dataclass(frozen=True)
class Written(Record):
    """An answer that is scored.

    Attributes:
        prompt: digest of its tokens.
        prompt_tokens: their number.
        tokens: of the answer.
        counted: places in the answer, from 0, of the tokens that count; none: all behind the first eviction.
        seed: that it was written with.
        left_out: answers before it, with other seeds, that repeated themselves.
        text: of the answer.
    """

    prompt: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    counted: tuple[int, ...]
    seed: int
    left_out: int
    text: str


@dataclass(frozen=True)
class Reference(Record):
    """The most likely tokens at each place of an answer with the full cache, by id as text."""

    choices: Lists


@dataclass(frozen=True)
class Decoded(Fidelity):
    """How one policy and budget scores one answer; see Fidelity for what is not listed.

    Attributes:
        agrees: for each token that counts, whether the most likely one is the same as with the full cache.
        evict_at: tokens of prompt and answer at the first eviction.
        hits: whether the most likely one is the answer's own.
        answer_tokens: of the whole answer.
    """

    FILE = DECODING
    SETTINGS = "decoding-settings.json"

    hits: tuple[bool, ...]
    answer_tokens: int

    @property
    def recalled(self) -> Measure:
        """The share of hits."""
        return self.measure(self.hits)


def interval_of(budget: float, asked: int | None = None) -> int:
    """Tokens from one eviction to the next, as a server has them by default."""
    return asked or default_interval(int(budget), PAGE)


def first_changed(budget: float, interval: int) -> int:
    """The place in an answer, from 0, of the first token that is chosen after an eviction.

    The step that stores the last token before a position sees everything, and chooses the next one.
    """
    return int(budget) + interval + 1


def places(answer: Written, column: Column, interval: int | None) -> Tokens:
    """Places that count in a column, which for the full cache are all."""
    first = 0 if column.budget is None else first_changed(column.budget, interval_of(column.budget, interval))
    counted = answer.counted or range(len(answer.tokens))
    return [place for place in counted if place >= first]


def repeats_itself(tokens: Tokens, row: int = ROW, times: int = TIMES) -> bool:
    """Whether some tokens in a row come several times, overlapping or not."""
    seen: dict[tuple[int, ...], int] = {}
    for start in range(len(tokens) - row + 1):
        said = tuple(tokens[start : start + row])
        seen[said] = seen.get(said, 0) + 1
        if seen[said] >= times:
            return True
    return False


def score(
    answer: Written,
    column: Column,
    full: Rows,
    found: Rows,
    counted: Tokens,
    evict_at: int | None,
    seconds: float,
) -> Decoded:
    """Compare a column's choices with the full cache's.

    Args:
        full, found: of the full cache and the column, for all tokens of the answer.
        counted: places that count, at least one.
    """
    rows = [(full[place], found[place], answer.tokens[place]) for place in counted]
    return Decoded(
        *answer.sample,
        *column.key,
        first=counted[0],
        agrees=tuple(_is_best(other, max(own, key=lambda one: own[one])) for own, other, _ in rows),
        **fidelity.distances(rows),
        prompt_tokens=answer.prompt_tokens,
        evict_at=evict_at,
        whole=False,
        seconds=round(seconds, 3),
        hits=tuple(_is_best(other, token) for _, other, token in rows),
        answer_tokens=len(answer.tokens),
    )


def _is_best(choices: Mapping[int, float], token: int) -> bool:
    """Whether no token is more likely, by the last digits of float32."""
    return choices.get(token, float("-inf")) >= max(choices.values()) - 1e-6


@dataclass(frozen=True)
class AskedAnswer:
    """What the columns of an answer share: the tokens of its prompt, itself, and what the full cache would say."""

    prompt: list[int]
    answer: Written
    full: Rows


class DecodingTask(Task[AskedAnswer, Decoded]):
    """What `answers` does; the server's policy is that of all its columns but the full cache's."""

    KIND = Decoded

    def __init__(self, options: argparse.Namespace, cases: list[Case]):
        evicting = [Column(options.policy, budget, SCOPE) for budget in dict.fromkeys(options.budgets)]
        super().__init__(options, cases, [Column(FULL), *evicting])
        self.written = self.store(WRITTEN, Written)
        self.references = self.store(REFERENCES, Reference)
        self.stores += self.written, self.references

    async def check(self) -> None:
        """See Task: the server must evict answers, and they must be long enough for that."""
        for budget in self.options.budgets:
            first = first_changed(budget, interval_of(budget, self.options.interval))
            if first >= self.options.answer_tokens:
                raise ValueError(
                    f"--budgets {budget:g} evicts answers after {first - 1} tokens first: --answer-tokens must be "
                    f"above {first}, not {self.options.answer_tokens}"
                )
        await self.endpoint.require_eviction()
        fields = WHOLE | {"kv_decode_budget": int(self.options.budgets[0])}
        try:
            await self.endpoint.ask({"prompt": "what ?"}, 1, fields)
        except RefusedError as error:
            raise EndpointError(f"{error}: {ADVICE}") from None

    async def ask(self, case: Case, columns: Sequence[Column]) -> AskedAnswer:
        """See Task; the answer is of an earlier run, if there was one."""
        prompt = await self.endpoint.tokenize(case.prompt())
        answer = self.written.done.get(case.sample)
        if answer is None:
            answer, lists = await (self.made if case.answer else self.write)(case, prompt)
            # The answer first: a run that is killed in between asks for the lists again, and stores none twice.
            self.written.add(answer)
            if lists:
                self.references.add(Reference(*case.sample, lists))
        fidelity.check_prompt(answer, prompt, case)
        full = self.references.done.get(case.sample)
        if full is None:
            rows = await scored(self.endpoint, prompt, answer.tokens, WHOLE, self.options.top)
            full = Reference(
                *case.sample, [{str(token): value for token, value in row.items()} for row in rows]
            )
            self.references.add(full)
        return AskedAnswer(prompt, answer, fidelity.by_id(full.choices))

    async def made(self, case: Case, prompt: Tokens) -> tuple[Written, Lists]:
        """An answer that the case brings, in which the values that it repeats count; without the cache's choices."""
        tokens: list[int] = []
        counted: list[int] = []
        for number, piece in enumerate(case.answer):
            ids = await self.endpoint.tokenize({"prompt": piece, "add_special_tokens": False})
            if number % 2:
                counted += range(len(tokens), len(tokens) + len(ids))
            tokens += ids
        named, text = (*case.sample, digest(prompt), len(prompt)), "".join(case.answer)
        return Written(*named, tuple(tokens), tuple(counted), seed=0, left_out=0, text=text), []

    async def write(self, case: Case, prompt: Tokens) -> tuple[Written, Lists]:
        """An answer that the full cache writes, and that does not repeat itself, with the cache's choices.

        Raises:
            EndpointError: all of them do.
        """
        for left_out in range(TRIES):
            seed = (self.options.seed * 1000 + case.index) * TRIES + left_out
            if found := await self.attempt(prompt, seed):
                tokens, rows, text = found
                named = *case.sample, digest(prompt), len(prompt)
                return Written(*named, tuple(tokens), (), seed=seed, left_out=left_out, text=text), rows
        raise EndpointError(
            f"{self.endpoint.model} says {ROW} tokens {TIMES} times in each of {TRIES} answers to {case}: give it "
            "fewer --answer-tokens, a higher --temperature or other prompts"
        )

    async def attempt(self, prompt: Tokens, seed: int) -> tuple[list[int], Lists, str] | None:
        """One answer as `listed`, each piece with a seed of its own; None as soon as it repeats itself."""
        tokens: list[int] = []
        rows: Lists = []
        text, length = "", self.options.answer_tokens
        while len(tokens) < length:
            piece = min(PIECE, length - len(tokens))
            how = {"max_tokens": piece, "min_tokens": piece, "temperature": self.options.temperature}
            how["seed"] = seed * length + len(tokens)
            said = await fidelity.listed(self.endpoint, [*prompt, *tokens], self.options.top, WHOLE, **how)
            tokens += said[0]
            rows += said[1]
            text += said[2]
            if repeats_itself(tokens):
                return None
        return tokens, rows, text

    async def score(self, case: Case, asked: AskedAnswer, column: Column) -> Decoded:
        """See Task."""
        prompt, answer, interval = asked.prompt, asked.answer, self.options.interval
        fields, evict_at = dict(WHOLE), None
        if column.budget is not None:
            evict_at = len(prompt) + int(column.budget) + interval_of(column.budget, interval)
            fields |= {"kv_decode_budget": int(column.budget), "kv_answer_from": len(prompt)}
        counted = places(answer, column, interval)
        if not counted or (answer.counted and len(counted) < len(answer.counted)):
            raise ValueError(
                f"{column} evicts nothing before what counts in {case}, which has {len(answer.tokens)} tokens: lower "
                "--budgets, or raise --answer-tokens"
            )
        started = time.perf_counter()
        rows = await scored(self.endpoint, prompt, answer.tokens, fields, self.options.top)
        return score(answer, column, asked.full, rows, counted, evict_at, time.perf_counter() - started)
