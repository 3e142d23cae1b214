"""What a report says about answers that were evicted while they were written."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_kvevict.quality.decoding import DECODING, SCOPE, Decoded, DecodingSettings, interval_of
from vllm_kvevict.quality.decoding_tasks import RECALL
from vllm_kvevict.quality.fidelity_report import Measures, floor_lines
from vllm_kvevict.quality.results import Column, Measure, read, read_settings
from vllm_kvevict.quality.scores import NONE, Mean, Scores, of_task, plain
from vllm_kvevict.quality.tables import table

BASELINE = "streaming-llm"
"""It keeps the last tokens, whatever they say."""
MEANING = (
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
class DecodingMeasures(Measures):
    """All measures of a folder; see Measures."""

    settings: DecodingSettings
    measures: Sequence[Decoded]

    @cached_property
    def recalled(self) -> Scores[Measure]:
        return Scores(one.recalled for one in self.measures)

    def of_task(self, task: str) -> list[Decoded]:
        return [one for one in self.measures if one.task == task]


def gather_decoding(folder: Path) -> DecodingMeasures | None:
    """A folder's measures, None without any."""
    path = folder / DECODING
    found = list(read(path, Decoded)) if path.exists() else []
    if not found:
        return None
    settings, runs = read_settings(folder, DecodingSettings)
    return DecodingMeasures(settings, runs, found)


def decoding_section(found: DecodingMeasures) -> list[str]:
    """Everything about evicted answers, as Markdown."""
    settings = found.settings
    budgets = found.divergence.budgets(SCOPE)
    intervals = " or ".join(dict.fromkeys(str(interval_of(budget, settings.interval)) for budget in budgets))
    meaning = MEANING.format(temperature=settings.temperature, interval=intervals, top=settings.top)
    lines = [
        "## Answers that are evicted while they are written",
        "",
        f"Model `{settings.model}`, seed {settings.seed}. {meaning}",
        "",
        *floor_lines(found),
    ]
    for task in found.divergence.tasks:
        lines += _task_lines(found, task)
    return lines


def _task_lines(found: DecodingMeasures, task: str) -> list[str]:
    """One line for each policy and budget."""
    of_task_ = found.of_task(task)
    lengths = sorted({one.sample: one.answer_tokens for one in of_task_}.values())
    recall = task == RECALL
    header = ["policy", "D", "answers", "tokens", "KL", f"share of {BASELINE}'s KL", "agreement"]
    rows = []
    for column in _columns(found):
        measures = [one for one in of_task_ if one.column == column]
        if measures:
            rows.append([*_cells(found, column, task, measures), *_recalled(found, column, task, recall)])
    return [
        f"### {task[:1].upper()}{task[1:]}",
        "",
        *([OF_RECALL, ""] if recall else []),
        f"{len(lengths)} answers of {lengths[0]:,} to {lengths[-1]:,} tokens.",
        "",
        *table([*header, *(["recalled"] if recall else [])], rows),
        "",
    ]


def _cells(
    found: DecodingMeasures, column: Column, task: str, measures: Sequence[Decoded]
) -> Sequence[object]:
    group = of_task(task)
    return [
        column.policy,
        NONE if column.budget is None else f"{column.budget:g}",
        len(measures),
        f"{sum(len(one.agrees) for one in measures):,}",
        found.divergence.mean(column, group) or NONE,
        _share(found, column, task) or NONE,
        found.agreement.mean(column, group) or NONE,
    ]


def _recalled(found: DecodingMeasures, column: Column, task: str, recall: bool) -> list[object]:
    return [found.recalled.mean(column, of_task(task)) or NONE] if recall else []


def _share(found: DecodingMeasures, column: Column, task: str) -> Mean | None:
    """A column's KL as a share of the baseline's with the same budget."""
    baseline = Column(BASELINE, column.budget, SCOPE)
    if column.budget is None or column == baseline or not found.divergence.mean(baseline, of_task(task)):
        return None
    return found.divergence.ratio(column, baseline, of_task(task))


def _columns(found: DecodingMeasures) -> list[Column]:
    """The full cache, then by budget, the best first."""
    return sorted(
        found.divergence.columns,
        key=lambda column: (
            column.budget or 0,
            mean.mean if (mean := found.divergence.mean(column)) else 0.0,
        ),
    )


def summarise_decoding(found: DecodingMeasures) -> dict[str, Any]:
    """The numbers behind the text."""
    return {
        "settings": asdict(found.settings),
        "runs": list(found.runs),
        "floor": plain(found.floor),
        "columns": [
            {
                **asdict(column),
                "task": task,
                "answers": sum(one.column == column for one in found.of_task(task)),
                "divergence": plain(found.divergence.mean(column, of_task(task))),
                "share_of_baseline": plain(_share(found, column, task)),
                "agreement": plain(found.agreement.mean(column, of_task(task))),
                "difference": plain(found.difference.mean(column, of_task(task))),
                "recalled": plain(found.recalled.mean(column, of_task(task))),
            }
            for task in found.divergence.tasks
            for column in _columns(found)
        ],
    }
