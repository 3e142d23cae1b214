"""What a report says about fidelity."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from vllm_kvevict.quality.fidelity import FIDELITY, FLOOR, Fidelity, FidelitySettings, is_full
from vllm_kvevict.quality.results import FULL, Column, Measure, read, read_settings
from vllm_kvevict.quality.scores import NONE, Mean, Scores, of_task, plain, signed
from vllm_kvevict.quality.tables import budget_name, table

PLACES = ((0, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 1 << 30))
"""Places in the answer that are counted together, from 0."""
MEANING = (
    "The full cache answers greedily; its answer is then read behind the compressed cache. Agreement is the share of "
    "the answer's tokens that are the compressed cache's first choice, too. KL is the divergence from the full cache's "
    "distribution in nats per token, over the {top} most likely tokens of both and one group for all others: a lower "
    "bound, since a finer division can only raise it. Means over the tasks, with 95 % bootstrap intervals. The last "
    "column compares with the lowest KL at the same budget, on the same answers: its policy is no better for certain "
    "where the interval holds 0."
)


@dataclass(frozen=True)
class Measures:
    """All measures of a folder.

    Attributes:
        settings, runs: see write_settings.
        measures: of answers with at least one token that counts.
    """

    settings: FidelitySettings
    runs: Sequence[Mapping[str, Any]]
    measures: Sequence[Fidelity]

    @cached_property
    def agreement(self) -> Scores[Measure]:
        return Scores(one.measure(one.agrees) for one in self.measures)

    @cached_property
    def divergence(self) -> Scores[Measure]:
        return Scores(one.measure(one.divergences) for one in self.measures)

    @cached_property
    def difference(self) -> Scores[Measure]:
        return Scores(one.measure(one.differences) for one in self.measures)

    @property
    def floor(self) -> Mean | None:
        """How well the full cache agrees with itself."""
        return self.agreement.mean(Column(FULL))

    def of(self, column: Column) -> list[Fidelity]:
        return [one for one in self.measures if one.column == column]


def gather_fidelity(folder: Path) -> Measures | None:
    """A folder's measures, None without any."""
    path = folder / FIDELITY
    found = list(read(path, Fidelity)) if path.exists() else []
    if not found:
        return None
    settings, runs = read_settings(folder, FidelitySettings)
    return Measures(settings, runs, found)


def fidelity_section(found: Measures) -> list[str]:
    """Everything about fidelity, as Markdown."""
    answers = len(found.agreement.samples)
    tokens = sum(len(one.agrees) for one in found.measures if is_full(one))
    whole = sum(one.whole for one in found.measures)
    lines = [
        "## Fidelity: how far answers change",
        "",
        MEANING.format(top=found.settings.top),
        "",
        f"{answers:,} answers of the full cache, {tokens:,} tokens; tasks: {', '.join(found.agreement.tasks)}.",
        "",
        *floor_lines(found),
    ]
    if whole:
        lines += [f"**{whole:,} prompts or prefixes were too short to be evicted and were kept whole.**", ""]
    for scope in found.agreement.scopes:
        lines += _scope_lines(found, scope)
    return [*lines, *_task_lines(found)]


def floor_lines(found: Measures) -> list[str]:
    """What the report says of the full cache against itself."""
    floor, own = found.floor, found.divergence.mean(Column(FULL))
    if floor is None or own is None:
        return ["The full cache was not scored against itself.", ""]
    text = f"The full cache against itself, the floor: agreement {floor.mean:.4f}, KL {own.mean:.6f}."
    if floor.mean < FLOOR:
        text = f"**{text} Below {FLOOR}, the measures of the others mean little: serve in float32.**"
    return [text, ""]


def _columns(found: Measures, scope: str) -> list[Column]:
    of_scope = [column for column in found.agreement.columns if column.scope == scope]
    policies = list(dict.fromkeys(column.policy for column in of_scope))
    return sorted(of_scope, key=lambda column: (column.budget or 0, policies.index(column.policy)))


def _scope_lines(found: Measures, scope: str) -> list[str]:
    """One line for each policy and budget, then where agreement is lost."""
    columns = _columns(found, scope)
    rows = [
        [
            column.policy,
            budget_name(column.budget or 0),
            found.agreement.mean(column),
            signed(found.difference.mean(column)),
            found.divergence.mean(column),
            _above_lowest(found.divergence, column, columns),
        ]
        for column in columns
    ]
    header = [
        "policy",
        "budget",
        "agreement",
        "log-probability less the full cache's",
        "KL",
        "KL above the lowest",
    ]
    lost = [[column.policy, budget_name(column.budget or 0), *_lost(found.of(column))] for column in columns]
    places = [f"tokens {start + 1} to {stop}" for start, stop in _places(found.measures)]
    lost_header = ["policy", "budget", "unchanged answers", "median of the first change", *places]
    return [
        f"### Fidelity in scope {scope}",
        "",
        *table(header, rows, left=1),
        "",
        "Where agreement is lost: the share of answers that agree throughout, the place of the first token that "
        "differs in the others, and agreement by the place in the answer.",
        "",
        *table(lost_header, [row[: len(lost_header)] for row in lost], left=1),
        "",
    ]


def _above_lowest(divergence: Scores[Measure], column: Column, columns: Sequence[Column]) -> str:
    """A column's KL less the lowest one at its budget, paired."""
    means = {
        other: mean.mean
        for other in columns
        if other.budget == column.budget and (mean := divergence.mean(other))
    }
    lowest = min(means, key=lambda other: means[other])
    return "lowest" if column == lowest else signed(divergence.difference(column, lowest))


def _places(measures: Iterable[Fidelity]) -> list[tuple[int, int]]:
    """The groups of places that answers reach; the last one ends with the longest."""
    longest = max(one.first + len(one.agrees) for one in measures)
    return [(start, min(stop, longest)) for start, stop in PLACES if start < longest]


def _lost(measures: Sequence[Fidelity]) -> list[object]:
    """Cells about where one column's agreement is lost."""
    first = [place for one in measures if (place := one.first_lost) is not None]
    cells: list[object] = [
        f"{1 - len(first) / len(measures):.2f}",
        f"{median(first) + 1:g}" if first else NONE,
    ]
    for start, stop in PLACES:
        there = [
            agrees
            for one in measures
            for place, agrees in enumerate(one.agrees, one.first)
            if start <= place < stop
        ]
        cells.append(f"{sum(there) / len(there):.3f}" if there else NONE)
    return cells


def _task_lines(found: Measures) -> list[str]:
    """KL of every column by task."""
    tasks = found.divergence.tasks
    if len(tasks) < 2:
        return []
    rows = [
        [str(column), *(_short(found.divergence.mean(column, of_task(task))) for task in tasks)]
        for column in found.divergence.columns
    ]
    return ["### KL by task", "", *table(["", *tasks], rows)]


def _short(mean: Mean | None) -> str:
    return f"{mean.mean:.3f}" if mean else NONE


def summarise_fidelity(found: Measures) -> dict[str, Any]:
    """The numbers behind the text."""
    return {
        "settings": asdict(found.settings),
        "runs": list(found.runs),
        "floor": plain(found.floor),
        "columns": [
            {
                **asdict(column),
                "agreement": plain(found.agreement.mean(column)),
                "difference": plain(found.difference.mean(column)),
                "divergence": plain(found.divergence.mean(column)),
                "unchanged": sum(one.first_lost is None for one in found.of(column)) / len(found.of(column)),
            }
            for column in found.agreement.columns
        ],
    }
