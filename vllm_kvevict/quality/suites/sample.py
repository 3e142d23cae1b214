"""What the suites share: a sample, the reading of their files, and the filling of their prompts."""

import importlib
import itertools
import json
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
Metric = Callable[[str, tuple[Any, ...]], float]


class SuiteError(Exception):
    """A suite cannot be read: the message says what is missing or malformed, and where."""


@dataclass(frozen=True)
class SuiteSample:
    """One prompt of a suite, and how a reply to it is scored.

    Attributes:
        suite: the suite's name.
        task: the task's name in the suite.
        index: place in the task's file, from 0.
        context: the beginning of the prompt, up to where the question begins: what can be compressed without knowing
            the question. Empty if the question comes first.
        question: the rest; `context` and `question` together are the suite's prompt, character by character.
        max_tokens: the most tokens to generate.
        answers: what is right, in the form that the task's metric takes.
        metric: from a reply and the answers to a score.
        chat: whether the prompt goes through the model's chat template; otherwise it is completed as it is.
        answer_prefix: the end of `question` that begins the reply: with a chat template it belongs to the assistant.
    """

    suite: str
    task: str
    index: int
    context: str
    question: str
    max_tokens: int
    answers: tuple[Any, ...]
    metric: Metric = field(repr=False)
    chat: bool = True
    answer_prefix: str = ""

    def score(self, reply: str) -> float:
        """Score of a reply, 0 to 1."""
        return float(self.metric(reply, self.answers))


def first_existing(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.exists()), None)


def choose(tasks: Sequence[str] | None, known: Sequence[str], suite: str) -> list[str]:
    """The tasks that were asked for, or all.

    Raises:
        SuiteError: one that the suite does not have.
    """
    unknown = [task for task in tasks or () if task not in known]
    if unknown:
        raise SuiteError(f"{suite} has no task {unknown[0]!r}; it has: {', '.join(known)}")
    return list(known if tasks is None else tasks)


def data_files(
    tasks: Sequence[str] | None, known: Sequence[str], folders: Sequence[Path], suite: str
) -> dict[str, Path]:
    """The file of each task that was asked for, or of each that is there, in the first folder that has one.

    Raises:
        SuiteError: no file of a task that was asked for, or none at all.
    """
    names = choose(tasks, known, suite)
    found = {
        task: path
        for task in names
        if (path := first_existing(folder / f"{task}.jsonl" for folder in folders))
    }
    missing = [task for task in names if task not in found]
    if missing and (tasks is not None or not found):
        looked = " or ".join(str(folder) for folder in folders)
        raise SuiteError(f"{suite}: no file {missing[0]}.jsonl in {looked}")
    return found


def records(path: Path, fields: Sequence[str], limit: int | None) -> Iterator[tuple[str, Record]]:
    """The records of a JSONL file, each with the words for where it stands.

    Raises:
        SuiteError: a line that is not a JSON object with these fields.
    """
    with path.open(encoding="utf-8") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for number, line in itertools.islice(lines, limit):
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise SuiteError(f"{where}: not JSON ({error})") from None
            if not isinstance(record, dict):
                raise SuiteError(f"{where}: not a JSON object")
            require(record, fields, where)
            yield where, record


def require(record: Record, fields: Iterable[str], where: str) -> None:
    """Raises SuiteError unless the record has all fields."""
    missing = [name for name in fields if name not in record]
    if missing:
        raise SuiteError(f"{where}: field {missing[0]!r} is missing")


def hub(repository: str, *args: Any, limit: int | None, **options: Any) -> Iterator[tuple[str, Record]]:
    """The records of a data set on the hub, each with the words for where it stands.

    Args:
        repository: its name there.
        args, options: for ``datasets.load_dataset``.
        limit: the most records.

    Raises:
        SuiteError: the package is not installed, or could not load the data set.
    """
    datasets = hub_package()
    try:
        loaded = datasets.load_dataset(repository, *args, **options)
    except Exception as error:
        raise SuiteError(
            f"datasets could not load {repository} ({error}); download the suite and give its folder"
        ) from error
    for number, record in enumerate(itertools.islice(loaded, limit)):
        yield f"{repository}, record {number}", record


def hub_package() -> Any:
    """The package ``datasets``.

    Raises:
        SuiteError: it is not installed.
    """
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise SuiteError(
            "a suite without a folder is read through the package 'datasets', which is not installed: "
            "install it, or give the folder of the suite's checkout or download"
        ) from None


def fill(template: str, fields: Record, where: str) -> tuple[str, str]:
    """Fill a prompt template: what comes up to the end of its context, then the rest.

    Together they are ``template.format(**fields)``. The first part is empty if the template has no field ``context``,
    or another field before it: that part would depend on the question.

    Raises:
        SuiteError: the template uses a field that there is not.
    """
    parts: list[str] = []
    before: int | None = None
    others = False
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise SuiteError(f"{where}: the prompt template is malformed ({error}): {template!r}") from None
    for literal, name, spec, conversion in pieces:
        parts.append(literal)
        if name is None:
            continue
        if name not in fields or spec or conversion:
            raise SuiteError(f"{where}: the prompt template uses {name!r}, which this task does not have")
        parts.append(str(fields[name]))
        if name != "context":
            others = True
        elif not others and before is None:
            before = len(parts)
    cut = before or 0
    return "".join(parts[:cut]), "".join(parts[cut:])
