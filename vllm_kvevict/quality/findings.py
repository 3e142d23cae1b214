"""What a folder of results says: which tasks the model can do, and which policy to pick."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvevict.quality.cases import TEXT
from vllm_kvevict.quality.decoding import Decoded
from vllm_kvevict.quality.fidelity import Fidelity, is_full
from vllm_kvevict.quality.measures import Measures, gather
from vllm_kvevict.quality.results import RESULTS, Column, Result, ResultsError, Settings, read, read_settings
from vllm_kvevict.quality.scores import Mean, Scores

CAN_DO = 0.8
"""What the full cache must get in a task on real text, else the task says nothing about eviction."""
NEARLY_NOTHING = 0.1
"""A mean score of the full cache below which no difference can be seen."""


def full_scores(results: Iterable[Result]) -> dict[str, float]:
    """The full cache's mean score by task; without the tasks for which it was not measured."""
    by_task: dict[str, list[float]] = {}
    for result in results:
        if is_full(result):
            by_task.setdefault(result.task, []).append(result.score)
    return {task: sum(scores) / len(scores) for task, scores in by_task.items()}


def too_hard(full: Mapping[str, float]) -> dict[str, float]:
    """The tasks on real text that the model cannot do with the full cache, with their scores."""
    return {task: score for task, score in full.items() if task.startswith(TEXT) and score < CAN_DO}


@dataclass(frozen=True)
class Pick:
    """The best policy in one place.

    Attributes:
        scope, budget: the place.
        best: with the highest mean.
        score: its mean.
        equals: cannot be told from the best.
        lossless: cannot be told from the full cache, or score above it; None if that was not measured.
    """

    scope: str
    budget: float
    best: str
    score: Mean
    equals: tuple[str, ...]
    lossless: tuple[str, ...] | None


def pick(scores: Scores) -> list[Pick]:
    """The best for each scope and budget that evicts something."""
    places = [(scope, budget) for scope in scores.scopes for budget in scores.budgets(scope)]
    evicting = [place for place in places if scores.share(place[1], place[0]) < 1]
    return [found for scope, budget in evicting if (found := _pick(scores, scope, budget))]


def _pick(scores: Scores, scope: str, budget: float) -> Pick | None:
    columns = {policy: Column(policy, budget, scope) for policy in scores.policies(scope)}
    means = {policy: mean for policy, column in columns.items() if (mean := scores.mean(column))}
    if not means:
        return None
    ranked = sorted(means, key=lambda policy: -means[policy].mean)
    best, full = ranked[0], scores.full
    equals = [policy for policy in ranked[1:] if not _above(scores, columns[best], columns[policy])]
    lossless = [policy for policy in ranked if full and not _above(scores, full, columns[policy])]
    return Pick(scope, budget, best, means[best], tuple(equals), tuple(lossless) if full else None)


def _above(scores: Scores, one: Column, other: Column) -> bool:
    """Whether one column certainly scores higher."""
    difference = scores.difference(one, other)
    return difference is not None and difference.low > 0


@dataclass(frozen=True)
class QualityReport:
    """What the text says.

    Attributes:
        title: of the text.
        settings, runs: see write_settings.
        results: all.
        full: the full cache's mean scores by task.
        scores: of samples with a random depth, or of all if there are no others, of tasks that the model can do.
        needles: of samples with a given depth, None if there are none.
        budget: of the tables by task and of the maps, None if there are no budgets.
        fidelity, decoding: None if that was not measured.
    """

    title: str
    settings: Settings
    runs: Sequence[Mapping[str, Any]]
    results: Sequence[Result]
    full: Mapping[str, float]
    scores: Scores
    needles: Scores | None
    budget: float | None
    fidelity: Measures | None
    decoding: Measures | None


def read_folder(folder: Path, title: str, budget: float) -> QualityReport:
    """Read all that a folder holds.

    Raises:
        ResultsError: it holds nothing.
    """
    fidelity, decoding = gather(folder, Fidelity), gather(folder, Decoded)
    others = [one for one in (fidelity, decoding) if one]
    runs = [run for one in others for run in one.runs]
    path = folder / RESULTS
    results = list(read(path, Result)) if path.exists() else []
    if others and not results:
        settings = others[0].settings
    else:
        settings, more = read_settings(folder)
        runs = [*more, *runs]
    if not results and not others:
        raise ResultsError(f"{folder} has no results yet")
    full = full_scores(results)
    counting = [result for result in results if result.task not in too_hard(full)]
    placed = [result for result in counting if result.depth is not None]
    spread = [result for result in counting if result.depth is None]
    scores = Scores(spread or placed, settings.questions)
    needles = Scores(placed) if placed else None
    chosen = scores.nearest(budget)
    return QualityReport(title, settings, runs, results, full, scores, needles, chosen, fidelity, decoding)
