"""Scores as a table of samples and columns, their means, and what can be said about differences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness.measure import SAMPLES
from benchmarks.quality.results import FULL, Column, Result, Sample

SCOPES = ("prompt", "prefix")
Columns = Column | Sequence[Column]
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


class Bootstrap:
    """Resamples of the samples, within each task; the same ones for every mean, so that differences are paired.

    Args:
        tasks: of each sample.
        resamples: how many.
        seed: of the resampling.
    """

    def __init__(self, tasks: Sequence[str], resamples: int = SAMPLES, seed: int = 0):
        rng = np.random.default_rng(seed)
        names = np.asarray(tasks)
        self._strata: list[tuple[np.ndarray, np.ndarray]] = []
        for name in dict.fromkeys(tasks):
            rows = np.flatnonzero(names == name)
            counts = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), resamples)
            self._strata.append((rows, counts.astype(np.float32)))

    def mean(self, values: np.ndarray) -> Mean | None:
        """Mean of the values that are not nan, one for each sample; None without any."""
        means, resampled, samples = [], [], 0
        for rows, counts in self._strata:
            mine = values[rows]
            there = ~np.isnan(mine)
            if not there.any():
                continue
            means.append(mine[there].mean())
            samples += int(there.sum())
            # In the type of the counts: they are many, and would be copied.
            sums = (counts @ np.where(there, mine, 0.0).astype(np.float32)).astype(np.float64)
            drawn = len(rows) if there.all() else counts @ there.astype(np.float32)
            # A resample can consist of missing values only.
            resampled.append(
                np.divide(sums, drawn, out=np.full(len(sums), np.nan), where=np.asarray(drawn) > 0)
            )
        if not means:
            return None
        low, high = np.nanpercentile(np.mean(resampled, axis=0), [2.5, 97.5])
        return Mean(float(np.mean(means)), float(low), float(high), samples)


class Scores:
    """All scores of one kind of samples.

    Args:
        results: with no key twice.
    """

    def __init__(self, results: Iterable[Result]):
        self.results = list(results)
        self.samples: list[Sample] = list(dict.fromkeys(result.sample for result in self.results))
        rows = {sample: row for row, sample in enumerate(self.samples)}
        self._values: dict[Column, np.ndarray] = {}
        for result in self.results:
            column = self._values.setdefault(result.column, np.full(len(rows), np.nan))
            column[rows[result.sample]] = result.score
        self._means: dict[Any, Mean | None] = {}
        self._bootstrap = Bootstrap([sample[0] for sample in self.samples])

    @property
    def columns(self) -> list[Column]:
        """All that were measured, in the order of their first result."""
        return list(self._values)

    @property
    def fixed(self) -> list[Column]:
        """Those without a budget: the full cache, and servers measured as they are."""
        return [column for column in self.columns if column.budget is None]

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

    def mean(self, columns: Columns, among: Group | None = None) -> Mean | None:
        """Mean score of a column, or of several together: of the samples that all of them have."""
        return self._cached((_tuple(columns), (), among))

    def difference(self, columns: Columns, others: Columns, among: Group | None = None) -> Mean | None:
        """How much higher the first score than the others, on the samples that all of them have."""
        return self._cached((_tuple(columns), _tuple(others), among))

    def _cached(self, key: tuple[tuple[Column, ...], tuple[Column, ...], Group | None]) -> Mean | None:
        """The summary and the text ask for the same."""
        if key not in self._means:
            columns, others, among = key
            values = self._joined(columns) - (self._joined(others) if others else 0.0)
            if among is not None:
                place, wanted = among
                values = np.where([sample[place] == wanted for sample in self.samples], values, np.nan)
            self._means[key] = self._bootstrap.mean(values)
        return self._means[key]

    def _joined(self, columns: tuple[Column, ...]) -> np.ndarray:
        missing = np.full(len(self.samples), np.nan)
        return np.mean([self._values.get(column, missing) for column in columns], axis=0)


def of_task(task: str) -> Group:
    return (0, task)


def of_length(length: int) -> Group:
    return (1, length)


def _tuple(columns: Columns) -> tuple[Column, ...]:
    return (columns,) if isinstance(columns, Column) else tuple(columns)
