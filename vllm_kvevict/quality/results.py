"""Answers on disk: one JSON line each, written when it arrives, so that a run can be ended and continued."""

import fcntl
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

RESULTS, SETTINGS = "results.jsonl", "settings.json"
FULL = "full"


class ResultsError(RuntimeError):
    """A folder of results cannot be used; the message says why."""


@dataclass(frozen=True)
class Column:
    """What a sample is asked with.

    Attributes:
        policy: its name, which may go on with ``@`` and a note on its server's parameters; or the label of a server
            that is measured as it is.
        budget: None where nothing is evicted by us.
        scope: ``prompt``: the policy sees the question; ``prefix``: it does not; None where budget is.
    """

    policy: str
    budget: float | None = None
    scope: str | None = None

    @property
    def asked(self) -> str:
        """The policy as requests name it."""
        return self.policy.partition("@")[0]

    def __str__(self) -> str:
        return self.policy if self.budget is None else f"{self.policy} {self.budget:g} ({self.scope})"


Sample = tuple[str, int | None, float | None, int]
"""Task, length, depth and index."""
Key = tuple[Sample, Column]


@dataclass(frozen=True)
class Result:
    """One answer.

    Attributes:
        task, length, depth, index: name the sample.
        policy, budget, scope: name the column.
        score: 0 to 1.
        reply, expected: what came and what should have.
        prompt_tokens: as the server counts them.
        output_tokens: of the reply.
        finish_reason: ``length`` if the reply was cut.
        evict_at: tokens that the budget refers to: the prompt's, or those before the question; None if nothing was to
            be evicted.
        whole: they are too few for the server to evict any.
        request: the server's name for it, which its eviction log repeats.
        seconds: until the answer was there.
    """

    task: str
    length: int | None
    depth: float | None
    index: int
    policy: str
    budget: float | None
    scope: str | None
    score: float
    reply: str
    expected: tuple[str, ...]
    prompt_tokens: int | None
    output_tokens: int | None
    finish_reason: str | None
    evict_at: int | None
    whole: bool
    request: str | None
    seconds: float

    @property
    def sample(self) -> Sample:
        return (self.task, self.length, self.depth, self.index)

    @property
    def column(self) -> Column:
        return Column(self.policy, self.budget, self.scope)

    @classmethod
    def parse(cls, line: str) -> "Result":
        """Read one line.

        Raises:
            ValueError: if it is not the line of a result.
        """
        try:
            entry = json.loads(line)
            result = cls(**{**entry, "expected": tuple(entry["expected"])})
        except (TypeError, KeyError) as error:
            raise ValueError(str(error)) from None
        for name, kind in _kinds().items():
            if not isinstance(value := getattr(result, name), kind):
                raise ValueError(f"{name} is {value!r}")
        return result


@functools.cache
def _kinds() -> dict[str, Any]:
    """Types of a result's fields; JSON may write a number without its point."""
    hints = get_type_hints(Result) | {"expected": tuple}
    return {name: kind | int if kind in (float, float | None) else kind for name, kind in hints.items()}


def read(path: Path) -> Iterator[Result]:
    """All results of a file; a last line that was not finished is left out.

    Raises:
        ResultsError: if another line cannot be read, or a key occurs twice.
    """
    seen: set[Key] = set()
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            result = Result.parse(line.decode())
        except ValueError as error:
            raise ResultsError(f"{path}, line {number} is not a result: {error}") from None
        if (key := (result.sample, result.column)) in seen:
            raise ResultsError(f"{path}, line {number} repeats an earlier one")
        seen.add(key)
        yield result


class Store:
    """The results file of one run, open for appending; a context manager.

    Args:
        folder: made if it is missing.
    """

    def __init__(self, folder: Path):
        self.path = folder / RESULTS

    def __enter__(self) -> "Store":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        try:
            self._lock()
            self._drop_torn_line()
            self.done: set[Key] = {(result.sample, result.column) for result in read(self.path)}
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, result: Result) -> None:
        """Append one result; it is in the hands of the system when this returns."""
        self._file.write(json.dumps(asdict(result)).encode() + b"\n")
        self._file.flush()
        self.done.add((result.sample, result.column))

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsError(f"another run is writing to {self.path}") from None

    def _drop_torn_line(self) -> None:
        content = self.path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.truncate(self.path, end)


@dataclass(frozen=True)
class Settings:
    """What all results of a folder have in common.

    Attributes:
        model: as requests name it.
        seed: of the generated samples.
        instruct: whether the texts came with an instruction.
        slack: tokens of a reply on top of what its words need.
        texts: digests of the generated tasks, by task.
        questions: about each generated text.
    """

    model: str
    seed: int
    instruct: bool
    slack: int
    texts: dict[str, str]
    questions: int = 1

    def merge(self, before: "Settings", folder: Path) -> "Settings":
        """These settings with the tasks of an earlier run.

        Raises:
            ResultsError: if the two cannot share a folder.
        """
        names = [field.name for field in fields(self) if field.name != "texts"]
        mine, theirs = asdict(self), asdict(before)
        differ = [
            f"{name}: {theirs[name]!r}, now {mine[name]!r}" for name in names if mine[name] != theirs[name]
        ]
        differ += [
            f"the texts of task {task}, which have changed since"
            for task, digest in self.texts.items()
            if before.texts.get(task, digest) != digest
        ]
        if differ:
            raise ResultsError(
                f"{folder} was measured with other settings ({'; '.join(differ)}): choose another --output"
            )
        return Settings(**{**mine, "texts": {**before.texts, **self.texts}})


def write_settings(folder: Path, settings: Settings, run: dict[str, Any]) -> None:
    """Note the settings, and the run that is about to begin, beside those before it.

    Raises:
        ResultsError: if earlier runs had other settings.
    """
    path = folder / SETTINGS
    runs: list[dict[str, Any]] = []
    if path.exists():
        before, runs = read_settings(folder)
        settings = settings.merge(before, folder)
    elif (folder / RESULTS).exists() and (folder / RESULTS).stat().st_size:
        raise ResultsError(f"{folder} has results, but no {SETTINGS} that says how they were measured")
    content = {**asdict(settings), "runs": [*runs, run]}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def read_settings(folder: Path) -> tuple[Settings, list[dict[str, Any]]]:
    """A folder's settings and its runs.

    Raises:
        ResultsError: if it has none.
    """
    path = folder / SETTINGS
    try:
        content = json.loads(path.read_text())
        runs = content.pop("runs")
        return Settings(**content), runs
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None
