"""How far evicting an answer changes how it goes on: answers that exist are scored while they are evicted.

An answer is sent behind its prompt with the place where it begins, so the server evicts it at the same positions as if
it wrote it. Only tokens behind the first of these count; before it nothing was lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_kvevict.decode_interval import default_interval
from vllm_kvevict.quality.fidelity import Choices, Fidelity, FidelitySettings, divergence
from vllm_kvevict.quality.results import Column, Measure, Record, Sample, Sampled

WRITTEN, REFERENCES = "written.jsonl", "references.jsonl"
DECODING, DECODING_SETTINGS = "decoding.jsonl", "decoding-settings.json"
SCOPE = "answer"
"""Of the columns with a budget: what of an answer stays."""
PAGE = 32
"""Tokens of a page, to which the server rounds its interval up."""
ROW, TIMES = 16, 3
"""An answer that says so many tokens in a row so often repeats itself, and tells nothing about what it needs."""


@dataclass(frozen=True)
class DecodingSettings(FidelitySettings):
    """What all measures of a folder have in common.

    Attributes:
        answer_tokens: of each answer that the full cache writes.
        interval: of the servers, None for their default.
        temperature: at which answers are written.
    """

    FILE = DECODING_SETTINGS
    RECORDS = DECODING

    answer_tokens: int = 1024
    interval: int | None = None
    temperature: float = 0.8


@dataclass(frozen=True)
class Written(Sampled, Record):
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

    @property
    def key(self) -> Sample:
        return self.sample


@dataclass(frozen=True)
class Reference(Sampled, Record):
    """The most likely tokens at each place of an answer with the full cache, by id as text."""

    choices: list[dict[str, float]]

    @property
    def key(self) -> Sample:
        return self.sample

    @property
    def rows(self) -> list[Choices]:
        """The same by id."""
        return [{int(token): value for token, value in row.items()} for row in self.choices]


@dataclass(frozen=True)
class Decoded(Fidelity):
    """How one policy and budget scores one answer; see Fidelity for what is not listed.

    Attributes:
        agrees: for each token that counts, whether the most likely one is the same as with the full cache.
        evict_at: tokens of prompt and answer at the first eviction.
        hits: whether the most likely one is the answer's own.
        answer_tokens: of the whole answer.
    """

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


def places(answer: Written, column: Column, interval: int | None) -> Sequence[int]:
    """Places that count in a column, which for the full cache are all."""
    first = 0 if column.budget is None else first_changed(column.budget, interval_of(column.budget, interval))
    counted = answer.counted or range(len(answer.tokens))
    return [place for place in counted if place >= first]


def repeats_itself(tokens: Sequence[int], row: int = ROW, times: int = TIMES) -> bool:
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
    full: Sequence[Choices],
    found: Sequence[Choices],
    counted: Sequence[int],
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
        agrees=tuple(_is_best(other, _best(own)) for own, other, _ in rows),
        differences=tuple(round(other[token] - own[token], 6) for own, other, token in rows),
        divergences=tuple(round(divergence(own, other, token), 7) for own, other, token in rows),
        prompt_tokens=answer.prompt_tokens,
        evict_at=evict_at,
        whole=False,
        seconds=round(seconds, 3),
        hits=tuple(_is_best(other, token) for _, other, token in rows),
        answer_tokens=len(answer.tokens),
    )


def _best(choices: Mapping[int, float]) -> int:
    return max(choices, key=lambda token: choices[token])


def _is_best(choices: Mapping[int, float], token: int) -> bool:
    """Whether no token is more likely, by the last digits of float32."""
    return choices.get(token, float("-inf")) >= max(choices.values()) - 1e-6
