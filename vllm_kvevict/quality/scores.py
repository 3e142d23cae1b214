"""Scores as a table of samples and columns, their means, and what can be said about differences."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from vllm_kvevict.quality.results import FULL, SCOPES, Column, Measure, Result, Sample

RESAMPLES = 10_000
NONE = "-"
"""Stands in tables for what was not measured."""

S = TypeVar("S", Result, Measure)
Group = tuple[int, str | int]
"""Samples that have a value at a place of their name."""


@dataclass(frozen=True)
class Mean:
    """A mean over tasks of their means, its 95 % bootstrap interval, and how many samples it is made of."""

    mean: float
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def signed(self) -> str:
        """As a difference."""
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def signed(difference: Mean | None) -> str:
    """A difference for a table."""
    return difference.signed if difference else NONE


class Bootstrap:
    """Resamples; the same ones for every mean, so that differences and ratios are paired.

    Samples are drawn within each task; where several belong to one text, texts are drawn, with all that is asked
    about them.

    Args:
        tasks: of each sample.
        texts: what each sample belongs to; None where each has a text of its own.
    """

    def __init__(self, tasks: Sequence[str], texts: Sequence[Hashable] | None = None):
        self._rng, self._resamples = np.random.default_rng(0), RESAMPLES
        names = np.asarray(tasks)
        found = [np.flatnonzero(names == name) for name in dict.fromkeys(tasks)]
        if texts is None:
            self._strata = [(rows, self._draw(len(rows))) for rows in found]
        else:
            numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
            text_of = np.asarray([numbers[text] for text in texts])
            drawn = self._draw(len(numbers))
            self._strata = [(rows, drawn[:, text_of[rows]]) for rows in found]

    def _draw(self, count: int) -> np.ndarray:
        """How often each of so many is drawn, [resamples, count]."""
        drawn = self._rng.multinomial(count, np.full(count, 1 / count), self._resamples)
        return drawn.astype(np.float32)

    def mean(self, values: np.ndarray) -> Mean | None:
        """Mean of the values that are not nan, one for each sample; None without any."""
        samples = int((~np.isnan(values)).sum())
        return _interval(*self._means(values), samples) if samples else None

    def ratio(self, values: np.ndarray, others: np.ndarray) -> Mean | None:
        """Mean of some values over that of others, on the samples that have both; None if the latter is 0."""
        both = ~np.isnan(values + others)
        mean, resampled = self._means(np.where(both, values, np.nan))
        base, base_resampled = self._means(np.where(both, others, np.nan))
        if not base > 0:
            return None
        quotients = np.divide(
            resampled, base_resampled, out=np.full(len(resampled), np.nan), where=base_resampled > 0
        )
        return _interval(mean / base, quotients, int(both.sum()))

    def _means(self, values: np.ndarray) -> tuple[float, np.ndarray]:
        """Mean over the tasks of their means, as measured and of every resample; nan without values."""
        means, resampled = [], []
        for rows, counts in self._strata:
            mine = values[rows]
            there = ~np.isnan(mine)
            if not there.any():
                continue
            means.append(mine[there].mean())
            # In the type of the counts: they are many, and would be copied.
            sums = (counts @ np.where(there, mine, 0.0).astype(np.float32)).astype(np.float64)
            drawn = counts @ there.astype(np.float32)
            # A resample can consist of missing values only.
            resampled.append(np.divide(sums, drawn, out=np.full(len(sums), np.nan), where=drawn > 0))
        if not means:
            return float("nan"), np.full(self._resamples, np.nan)
        return float(np.mean(means)), np.mean(resampled, axis=0)


def _interval(mean: float, resampled: np.ndarray, samples: int) -> Mean:
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return Mean(mean, float(low), float(high), samples)


class Scores(Generic[S]):
    """All scores of one kind of samples.

    Args:
        results: with no key twice.
        questions: about each text.
    """

    def __init__(self, results: Iterable[S], questions: int = 1):
        self.results: list[S] = list(results)
        self.samples: list[Sample] = list(dict.fromkeys(result.sample for result in self.results))
        rows = {sample: row for row, sample in enumerate(self.samples)}
        self._values: dict[Column, np.ndarray] = {}
        for result in self.results:
            column = self._values.setdefault(result.column, np.full(len(rows), np.nan))
            column[rows[result.sample]] = result.score
        self._cache: dict[Any, Mean | None] = {}
        texts = None if questions == 1 else [(sample[1], sample[3] // questions) for sample in self.samples]
        self._bootstrap = Bootstrap([sample[0] for sample in self.samples], texts)

    @property
    def columns(self) -> list[Column]:
        """All that were measured, in the order of their first result."""
        return list(self._values)

    @property
    def fixed(self) -> list[Column]:
        """Those without a budget: the full cache, and servers measured as they are."""
        return [column for column in self.columns if column.budget is None]

    @property
    def means(self) -> dict[Column, float]:
        """Mean score of each column."""
        return {column: mean.mean for column in self.columns if (mean := self.mean(column))}

    @property
    def full(self) -> Column | None:
        """The full cache, if it was measured."""
        return Column(FULL) if Column(FULL) in self._values else None

    @property
    def scopes(self) -> list[str]:
        return [scope for scope in SCOPES if any(column.scope == scope for column in self.columns)]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(sample[0] for sample in self.samples))

    @property
    def lengths(self) -> list[int]:
        return sorted({sample[1] for sample in self.samples if sample[1] is not None})

    def policies(self, scope: str) -> list[str]:
        """Those measured with budgets."""
        return list(dict.fromkeys(column.policy for column in self.columns if column.scope == scope))

    def budgets(self, scope: str | None = None) -> list[float]:
        """Those measured in this scope, or in any; ratios first."""
        found = {c.budget for c in self.columns if c.budget is not None and scope in (None, c.scope)}
        return sorted(found)

    def nearest(self, wanted: float | None) -> float | None:
        """The measured budget that is nearest, ratios to ratios and numbers of tokens to their like."""
        if wanted is None:
            return None
        budgets = self.budgets()
        alike = [budget for budget in budgets if (budget <= 1) == (wanted <= 1)]
        return min(alike or budgets, key=lambda budget: abs(budget - wanted), default=None)

    def share(self, budget: float, scope: str) -> float:
        """A budget as a share of the tokens that it refers to."""
        if budget <= 1:
            return budget
        lengths = [r.evict_at for r in self.results if r.evict_at and (r.budget, r.scope) == (budget, scope)]
        return min(1.0, budget / (sum(lengths) / len(lengths))) if lengths else 1.0

    def mean(self, column: Column, among: Group | None = None) -> Mean | None:
        """Mean score of a column."""
        return self._cached("mean", column, None, among)

    def difference(self, column: Column, other: Column, among: Group | None = None) -> Mean | None:
        """How much higher a column scores than another, on the samples that both have."""
        return self._cached("difference", column, other, among)

    def ratio(self, column: Column, other: Column, among: Group | None = None) -> Mean | None:
        """A column's mean over another's, on the samples that both have."""
        return self._cached("ratio", column, other, among)

    def _cached(self, what: str, column: Column, other: Column | None, among: Group | None) -> Mean | None:
        """The text asks for the same in several places."""
        key = what, column, other, among
        if key not in self._cache:
            values = [self._among(one, among) for one in (column, other) if one]
            if what == "ratio":
                self._cache[key] = self._bootstrap.ratio(*values)
            else:
                self._cache[key] = self._bootstrap.mean(values[0] - values[1] if other else values[0])
        return self._cache[key]

    def _among(self, column: Column, among: Group | None) -> np.ndarray:
        """A column's values, nan where it has none or the sample is of another group."""
        values = self._values.get(column, np.full(len(self.samples), np.nan))
        if among is None:
            return values
        place, wanted = among
        return np.where([sample[place] == wanted for sample in self.samples], values, np.nan)


def of_task(task: str) -> Group:
    return (0, task)


def of_length(length: int) -> Group:
    return (1, length)
