"""How far a compressed cache changes what the model says: the full cache's own answer is scored on it, token by token.

No answer key is needed, so any prompt will do. The full cache answers greedily. Prompt and answer are then sent as one
prompt that is evicted where the original prompt (or the document in it) ends, and the server returns the most likely
tokens at each place of the answer.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_kvevict.quality.results import FULL, Cell, Column, Measure, Record, Sample, Sampled, Settings

ANSWERS, FIDELITY, FIDELITY_SETTINGS = "answers.jsonl", "fidelity.jsonl", "fidelity-settings.json"
FLOOR = 0.99
"""The least agreement of the full cache with itself at which the others mean anything."""
SMALLEST = 1e-12
"""Stands in for a probability that rounding made 0."""

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


@dataclass(frozen=True)
class FidelitySettings(Settings):
    """What all measures of a folder have in common.

    Attributes:
        answer_tokens: of the full cache's answer, at most.
        top: tokens in each list of log-probabilities.
    """

    FILE = FIDELITY_SETTINGS
    RECORDS = FIDELITY

    answer_tokens: int = 32
    top: int = 20


@dataclass(frozen=True)
class Answer(Sampled, Record):
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

    @property
    def key(self) -> Sample:
        return self.sample


def digest(tokens: Sequence[int]) -> str:
    """What a prompt is recognised by."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Fidelity(Cell):
    """How one column scores one answer; see Result for what is not listed.

    Attributes:
        first: the place in the answer, from 0, of the first token that counts: 1 where the prompt is evicted at its
            end, since that token was chosen before.
        agrees: for each token, whether it is the column's first choice, too.
        differences: of its log-probability, the column's less the full cache's.
        divergences: see `divergence`.
    """

    first: int
    agrees: tuple[bool, ...]
    differences: tuple[float, ...]
    divergences: tuple[float, ...]
    prompt_tokens: int
    evict_at: int | None
    whole: bool
    seconds: float

    @property
    def first_lost(self) -> int | None:
        """The place in the answer, from 0, of the first token on which the two differ."""
        return self.first + self.agrees.index(False) if False in self.agrees else None

    def measure(self, values: Sequence[float]) -> Measure:
        """The mean of some values over the tokens."""
        return Measure(
            *self.sample, *self.column.key, score=sum(values) / len(values), evict_at=self.evict_at
        )


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
    places = range(first, len(answer.tokens))
    full = [{int(token): value for token, value in row.items()} for row in answer.choices]
    pairs = [(full[i], rows[i], answer.tokens[i]) for i in places]
    return Fidelity(
        *answer.sample,
        *column.key,
        first=first,
        agrees=tuple(found[token] >= max(found.values()) for _, found, token in pairs),
        differences=tuple(round(found[token] - own[token], 6) for own, found, token in pairs),
        divergences=tuple(round(divergence(own, found, token), 7) for own, found, token in pairs),
        prompt_tokens=answer.prompt_tokens,
        evict_at=evict_at,
        whole=whole,
        seconds=round(seconds, 3),
    )


def is_full(cell: Cell) -> bool:
    return cell.policy == FULL
