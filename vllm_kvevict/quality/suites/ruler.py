"""RULER (Hsieh et al. 2024): the files that its own scripts write, one folder per length.

Its ``prepare.py`` writes ``<task>/<split>.jsonl`` with the whole prompt, a model's chat template included if one was
chosen. Newer versions keep the beginning of the reply apart, as ``answer_prefix``; here it is part of the question.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vllm_kvevict.quality.suites import metrics
from vllm_kvevict.quality.suites.sample import Metric, Record, SuiteError, SuiteSample, choose, records


@dataclass(frozen=True)
class Family:
    """A kind of task.

    Attributes:
        names: what its tasks are called.
        max_tokens: the most tokens to generate.
        question: where the question begins; the last such place counts, as examples may have one of their own.
        metric: from a reply and the expected strings to a score.
    """

    names: re.Pattern[str]
    max_tokens: int
    question: re.Pattern[str]
    metric: Metric = metrics.string_match_all


QUESTION = re.compile(r"\s(?=Question: )")
FAMILIES = (
    Family(re.compile("niah(_.+)?"), 128, re.compile(r"\s(?=What (is|are all) the special magic )")),
    Family(re.compile("vt|variable_tracking"), 30, QUESTION),
    Family(re.compile("cwe|common_words_extraction"), 120, QUESTION),
    Family(re.compile("fwe|freq_words_extraction"), 50, QUESTION),
    Family(re.compile("qa(_.+)?"), 32, QUESTION, metrics.string_match_part),
)
SPLIT = "validation"
"""The name of the data files, without their ending, as its scripts have it by default."""
CONTROL = re.compile(r"[\x00-\x1f]")


def load(folder: Path | None, tasks: Sequence[str] | None, limit: int | None) -> list[SuiteSample]:
    """The samples; see `vllm_kvevict.quality.suites.load`."""
    if folder is None:
        raise SuiteError(
            "RULER is not on the hub: run its scripts/data/prepare.py and give the folder it wrote"
        )
    files = task_files(folder)
    if not files:
        raise SuiteError(
            f"RULER: no <task>/{SPLIT}.jsonl and no <task>.jsonl in {folder} or {folder / 'data'}"
        )
    return [
        sample
        for task in choose(tasks, tuple(files), f"RULER in {folder}")
        for sample in make(task, records(files[task], ("input", "outputs"), limit), files[task])
    ]


def task_files(folder: Path) -> dict[str, Path]:
    """The file of each task: named after it, or as the split in a folder named after it."""
    found: dict[str, Path] = {}
    for place in (folder, folder / "data"):
        nested = [(path.parent.name, path) for path in sorted(place.glob(f"*/{SPLIT}.jsonl"))]
        flat = [(path.stem, path) for path in sorted(place.glob("*.jsonl"))]
        named = [(place.resolve().name if name == SPLIT else name, path) for name, path in flat]
        for name, path in [*nested, *named]:
            found.setdefault(name, path)
    return found


def family(task: str, path: Path) -> Family:
    """The family that a task belongs to by its name.

    Raises:
        SuiteError: none.
    """
    for candidate in FAMILIES:
        if candidate.names.fullmatch(task):
            return candidate
    known = ", ".join(candidate.names.pattern for candidate in FAMILIES)
    raise SuiteError(f"{path}: {task!r} is no task of RULER; their names are: {known}")


def make(task: str, source: Iterator[tuple[str, Record]], path: Path) -> Iterator[SuiteSample]:
    """The samples of one task."""
    kind = family(task, path)
    for index, (where, record) in enumerate(source):
        outputs = record["outputs"]
        if not isinstance(outputs, list) or not outputs or not all(isinstance(text, str) for text in outputs):
            raise SuiteError(f"{where}: field 'outputs' is not a list of texts")
        text, prefix = str(record["input"]), str(record.get("answer_prefix") or "")
        places = [match.end() for match in kind.question.finditer(text)]
        cut = places[-1] if places else 0
        yield SuiteSample(
            "ruler",
            task,
            index,
            text[:cut],
            text[cut:] + prefix,
            kind.max_tokens,
            tuple(outputs),
            partial(cleaned, metric=kind.metric),
            # Room was left for a chat template: the prompt is written without one.
            chat=record.get("length_w_model_temp", 0) > record.get("length", 0),
            answer_prefix=prefix,
        )


def cleaned(reply: str, answers: tuple[str, ...], metric: Metric) -> float:
    """The score of a reply without control characters."""
    return metric(CONTROL.sub("\n", reply.strip()).strip(), answers)
