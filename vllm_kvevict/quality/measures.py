"""What a report says of answers that were scored token by token: of `fidelity`, and of `answers`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from vllm_kvevict.quality.decoding import SCOPE, Decoded, interval_of
from vllm_kvevict.quality.decoding_tasks import RECALL
from vllm_kvevict.quality.fidelity import FLOOR, Fidelity, is_full
from vllm_kvevict.quality.results import FULL, Column, Measure, ResultsError, Settings, read, read_settings
from vllm_kvevict.quality.scores import NONE, Mean, Scores, of_task, signed
from vllm_kvevict.quality.tables import budget_name, table

BASELINE = "streaming-llm"
"""It keeps the last tokens, whatever they say."""
PLACES = ((0, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 1 << 30))
"""Places in the answer that are counted together, from 0."""
MEANING = (
    "The full cache answers greedily; its answer is then read behind the compressed cache. Agreement is the share of "
    "the answer's tokens that are the compressed cache's first choice, too. KL is the divergence from the full cache's "
    "distribution in nats per token, over the {top} most likely tokens of both and one group for all others: a lower "
    "bound, since a finer division can only raise it. Means over the tasks, with 95 % bootstrap intervals. The last "
    "column compares with the lowest KL at the same budget, on the same answers: where its interval includes 0, the "
    "two policies may be equally good."
)
EXACT = (
    "With a lookahead the first tokens of each answer are chosen before the eviction. They count in all columns but "
    "the last, which has the KL of the tokens behind them. Of {exact:,} exact tokens the largest KL is {most:.1g}."
)
WRITTEN = (
    "The full cache writes each answer at temperature {temperature:g}; then the answer is read again while it is "
    "evicted every {interval} tokens, and each token behind the first eviction is scored. KL is the divergence from "
    "the full cache's distribution in nats per token, over the {top} most likely tokens of both and one group for all "
    "others: a lower bound. Agreement is the share of tokens at which the most likely one is the same. Means over "
    "answers, with 95 % bootstrap intervals; the share of streaming-llm's KL is paired by answer. An answer that says "
    "16 tokens in a row three times was left out, and another one written."
)
OF_RECALL = (
    "These answers are made, not written: they begin with facts, go on with other text until these were evicted, and "
    "repeat the facts. Only the repeated values count. Recalled is the share of their tokens that are the most likely "
    "ones; where the full cache recalls little, the others say nothing."
)


@dataclass(frozen=True)
class Measures:
    """All measures of a folder.

    Attributes:
        settings, runs: see write_settings.
        measures: of answers with at least one token that counts.
    """

    settings: Settings
    runs: Sequence[Mapping[str, Any]]
    measures: Sequence[Any]

    @cached_property
    def agreement(self) -> Scores[Measure]:
        return Scores(one.measure(one.agrees) for one in self.measures)

    @cached_property
    def divergence(self) -> Scores[Measure]:
        return Scores(one.measure(one.divergences) for one in self.measures)

    @cached_property
    def difference(self) -> Scores[Measure]:
        return Scores(one.measure(one.differences) for one in self.measures)

    @cached_property
    def later(self) -> Scores[Measure]:
        """Divergence behind a lookahead's exact tokens."""
        return Scores(one.measure(one.later) for one in self.measures if one.later)

    @cached_property
    def recalled(self) -> Scores[Measure]:
        """Of answers that were evicted while they were written."""
        return Scores(one.recalled for one in self.measures)

    @property
    def floor(self) -> Mean | None:
        """How well the full cache agrees with itself."""
        return self.agreement.mean(Column(FULL))

    def of(self, column: Column, task: str | None = None) -> list[Any]:
        """Those of a column, or of a task of it."""
        return [one for one in self.measures if one.column == column and task in (None, one.task)]


def gather(folder: Path, kind: type[Fidelity]) -> Measures | None:
    """A folder's measures of a kind, None without any."""
    path = folder / kind.FILE
    found = list(read(path, kind)) if path.exists() else []
    return Measures(*read_settings(folder, kind), found) if found else None


def check_floor(folder: Path, kind: type[Any]) -> None:
    """Refuse measures whose full cache does not agree with itself; questions with known answers have no such.

    Raises:
        ResultsError: it says what to do.
    """
    found = gather(folder, kind) if issubclass(kind, Fidelity) else None
    if found and found.floor and found.floor.mean < FLOOR:
        raise ResultsError(
            f"the full cache agrees with itself on {found.floor.mean:.3f} of the tokens only, so the other measures "
            "mean little: serve in float32 (--dtype float32) with --enforce-eager, and ask one request at a time "
            "(--concurrency 1)"
        )


def floor_lines(found: Measures) -> list[str]:
    """What the report says of the full cache against itself."""
    floor, own = found.floor, found.divergence.mean(Column(FULL))
    if floor is None or own is None:
        return ["The full cache was not scored against itself.", ""]
    text = f"The full cache against itself, the floor: agreement {floor.mean:.4f}, KL {own.mean:.6f}."
    if floor.mean < FLOOR:
        text = f"**{text} Below {FLOOR}, the measures of the others mean little: serve in float32.**"
    return [text, ""]


def fidelity_section(found: Measures) -> list[str]:
    """Everything about fidelity, as Markdown."""
    answers = len(found.agreement.samples)
    tokens = sum(len(one.agrees) for one in found.measures if is_full(one))
    whole = sum(one.whole for one in found.measures)
    lines = ["## Fidelity: how far answers change", "", MEANING.format(top=found.settings.top), ""]
    about = f"{answers:,} answers of the full cache, {tokens:,} tokens; tasks: {', '.join(found.agreement.tasks)}."
    lines += [about, "", *floor_lines(found)]
    if whole:
        lines += [f"**{whole:,} prompts or prefixes were too short to be evicted and were kept whole.**", ""]
    if exact := [kl for one in found.measures for kl in one.divergences[: one.exact]]:
        lines += [EXACT.format(exact=len(exact), most=max(exact)), ""]
    for scope in found.agreement.scopes:
        lines += _scope_lines(found, scope)
    tasks = found.divergence.tasks
    if len(tasks) < 2:
        return lines

    def divergence(column: Column, task: str) -> str:
        mean = found.divergence.mean(column, of_task(task))
        return f"{mean.mean:.3f}" if mean else NONE

    rows = [[str(one), *(divergence(one, task) for task in tasks)] for one in found.divergence.columns]
    return [*lines, "### KL by task", "", *table(["", *tasks], rows)]


def _scope_lines(found: Measures, scope: str) -> list[str]:
    """One line for each policy and budget, then where agreement is lost."""
    policies = found.agreement.policies(scope)
    columns = [column for column in found.agreement.columns if column.scope == scope]
    columns.sort(key=lambda column: (column.budget or 0, policies.index(column.policy)))

    def row(column: Column, cells: list[object]) -> list[object]:
        return [column.policy, budget_name(column.budget or 0), *cells]

    places = _places(found.measures)
    means = [row(column, _means(found, column, columns)) for column in columns]
    lost = [row(column, _lost(found.of(column))[: 2 + len(places)]) for column in columns]
    heads = ["agreement", "log-probability less the full cache's", "KL", "KL above the lowest"]
    if any(one.exact for one in found.measures):
        heads.append("KL behind the exact tokens")
    lost_heads = ["unchanged answers", "median of the first change"]
    lost_heads += [f"tokens {start + 1} to {stop}" for start, stop in places]
    return [
        f"### Fidelity in scope {scope}",
        "",
        *table(["policy", "budget", *heads], [cells[: 2 + len(heads)] for cells in means]),
        "",
        "Where agreement is lost: the share of answers that agree throughout, the place of the first token that "
        "differs in the others, and agreement by the place in the answer.",
        "",
        *table(["policy", "budget", *lost_heads], lost),
        "",
    ]


def _means(found: Measures, column: Column, columns: Sequence[Column]) -> list[object]:
    """Agreement, difference and KL of a column, its KL less the lowest one at its budget, paired, and the later KL."""
    divergence = found.divergence
    at_budget = [other for other in columns if other.budget == column.budget]
    lowest = min(at_budget, key=lambda other: divergence.means[other])
    above = "lowest" if column == lowest else signed(divergence.difference(column, lowest))
    difference = signed(found.difference.mean(column))
    later = found.later.mean(column) or NONE
    return [found.agreement.mean(column), difference, divergence.mean(column), above, later]


def _places(measures: Iterable[Fidelity]) -> list[tuple[int, int]]:
    """The groups of places that answers reach; the last one ends with the longest."""
    longest = max(one.first + len(one.agrees) for one in measures)
    return [(start, min(stop, longest)) for start, stop in PLACES if start < longest]


def _lost(measures: Sequence[Fidelity]) -> list[object]:
    """Cells about where one column's agreement is lost."""
    first = [place for one in measures if (place := one.first_lost) is not None]
    unchanged = f"{1 - len(first) / len(measures):.2f}"
    cells: list[object] = [unchanged, f"{median(first) + 1:g}" if first else NONE]
    placed = [(place, agrees) for one in measures for place, agrees in enumerate(one.agrees, one.first)]
    for start, stop in PLACES:
        there = [agrees for place, agrees in placed if start <= place < stop]
        cells.append(f"{sum(there) / len(there):.3f}" if there else NONE)
    return cells


def decoding_section(found: Measures) -> list[str]:
    """Everything about answers that were evicted while they were written, as Markdown."""
    settings, budgets = found.settings, found.divergence.budgets(SCOPE)
    intervals = " or ".join(dict.fromkeys(str(interval_of(budget, settings.interval)) for budget in budgets))
    about = WRITTEN.format(temperature=settings.temperature, interval=intervals, top=settings.top)
    lines = ["## Answers that are evicted while they are written", ""]
    lines += [f"Model `{settings.model}`, seed {settings.seed}. {about}", "", *floor_lines(found)]
    for task in found.divergence.tasks:
        lines += _task_lines(found, task)
    return lines


def _task_lines(found: Measures, task: str) -> list[str]:
    """One line for each policy and budget."""
    lengths = sorted({one.sample: one.answer_tokens for one in found.measures if one.task == task}.values())
    header = ["policy", "D", "answers", "tokens", "KL", f"share of {BASELINE}'s KL", "agreement", "recalled"]
    rows = [
        _cells(found, column, task, measures)
        for column in _ranked(found)
        if (measures := found.of(column, task))
    ]
    shown = len(header) if task == RECALL else len(header) - 1
    return [
        f"### {task[:1].upper()}{task[1:]}",
        "",
        *([OF_RECALL, ""] if task == RECALL else []),
        f"{len(lengths)} answers of {lengths[0]:,} to {lengths[-1]:,} tokens.",
        "",
        *table(header[:shown], [row[:shown] for row in rows]),
        "",
    ]


def _cells(found: Measures, column: Column, task: str, measures: Sequence[Decoded]) -> Sequence[object]:
    group = of_task(task)
    return [
        column.policy,
        NONE if column.budget is None else f"{column.budget:g}",
        len(measures),
        f"{sum(len(one.agrees) for one in measures):,}",
        found.divergence.mean(column, group) or NONE,
        _share(found, column, task) or NONE,
        found.agreement.mean(column, group) or NONE,
        found.recalled.mean(column, group) or NONE,
    ]


def _share(found: Measures, column: Column, task: str) -> Mean | None:
    """A column's KL as a share of the baseline's with the same budget."""
    baseline = Column(BASELINE, column.budget, SCOPE)
    if column.budget is None or column == baseline or not found.divergence.mean(baseline, of_task(task)):
        return None
    return found.divergence.ratio(column, baseline, of_task(task))


def _ranked(found: Measures) -> list[Column]:
    """The full cache, then by budget, the best first."""
    means = found.divergence.means
    return sorted(found.divergence.columns, key=lambda column: (column.budget or 0, means[column]))
