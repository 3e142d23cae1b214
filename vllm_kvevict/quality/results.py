"""Answers on disk: one JSON line each, written when it arrives, so that a run can be ended and continued."""

import fcntl
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Generic, Self, TypeVar, get_origin, get_type_hints

from vllm_kvevict.policy_list import parse

RESULTS, SETTINGS = "results.jsonl", "settings.json"
FULL = "full"
AT_ONCE, TURNS = ("prompt", "prefix"), "turns"
SCOPES = (*AT_ONCE, TURNS)
LOOKAHEAD = "lookahead"
"""Stands among a policy's parameters, and is a field of its own of requests."""


class ResultsError(RuntimeError):
    """A folder of results cannot be used; the message says why."""


@dataclass(frozen=True)
class Column:
    """What a sample is asked with.

    Attributes:
        policy: its name, which may go on with ``:`` and parameters, a lookahead among them, and with ``@`` and a note
            on its server; or the label of a server that is measured as it is.
        budget: None where nothing is evicted by us.
        scope: ``prompt``: the policy sees the question; ``prefix``: it does not; ``turns``: nor does it, and each turn
            of a chat is evicted on its own; None where budget is.
    """

    policy: str
    budget: float | None = None
    scope: str | None = None

    @property
    def key(self) -> tuple[str, float | None, str | None]:
        """Its fields, by which records name it."""
        return self.policy, self.budget, self.scope

    @property
    def asked(self) -> str:
        """The policy as requests name it."""
        return parse(self.policy).policy

    @property
    def parameters(self) -> str:
        """Its parameters as requests give them, empty without any."""
        return ",".join(f"{name}={text}" for name, text in parse(self.policy).texts if name != LOOKAHEAD)

    @property
    def lookahead(self) -> Any:
        """Tokens of the answer that come before the eviction, as they were written; None where the server decides."""
        return parse(self.policy).parameters.get(LOOKAHEAD)

    def __str__(self) -> str:
        return self.policy if self.budget is None else f"{self.policy} {self.budget:g} ({self.scope})"


Sample = tuple[str, int | None, float | None, int]
"""Task, length, depth and index."""
Key = tuple[Sample, Column]


@dataclass(frozen=True)
class Sampled:
    """A sample, or what came of it.

    Attributes:
        task: its kind.
        length: asked for, in words, or of real texts in tokens; None if nobody says.
        depth: asked for; None for a random one.
        index: of the sample among those with the same task, length and depth.
    """

    task: str
    length: int | None
    depth: float | None
    index: int

    @property
    def sample(self) -> Sample:
        """What names it."""
        return (self.task, self.length, self.depth, self.index)


@dataclass(frozen=True)
class Record(Sampled):
    """A line of a file; its fields are JSON."""

    @property
    def key(self) -> Any:
        """What no two lines of a file share."""
        return self.sample

    @classmethod
    def parse(cls, line: str) -> Self:
        """Read one line.

        Raises:
            ValueError: if it is not such a line.
        """
        kinds = _kinds(cls)  # type: ignore[arg-type]
        try:
            entry = json.loads(line)
            values = {name: tuple(value) if kinds[name] is tuple else value for name, value in entry.items()}
            record = cls(**values)  # type: ignore[arg-type]
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(str(error)) from None
        for name, kind in kinds.items():
            if not isinstance(value := getattr(record, name), kind):
                raise ValueError(f"{name} is {value!r}")
        return record


@functools.cache
def _kinds(cls: type[Record]) -> dict[str, Any]:
    """Types of a record's fields; of what a list or tuple holds, nothing; JSON may write a number without its point."""
    hints = get_type_hints(cls)
    found = {}
    for name in (field.name for field in fields(cls)):
        kind = hints[name] if isinstance(hints[name], UnionType) else get_origin(hints[name]) or hints[name]
        found[name] = kind | int if kind in (float, float | None) else kind
    return found


@dataclass(frozen=True)
class Cell(Record):
    """What came of one sample in one column, which `policy`, `budget` and `scope` name.

    Attributes:
        FILE, SETTINGS: names of the files that hold such records of a folder, and what they have in common.
    """

    FILE, SETTINGS = "", ""

    policy: str
    budget: float | None
    scope: str | None

    @property
    def column(self) -> Column:
        return Column(self.policy, self.budget, self.scope)

    @property
    def key(self) -> Key:
        return self.sample, self.column


@dataclass(frozen=True)
class Result(Cell):
    """One answer.

    Attributes:
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

    FILE = RESULTS
    SETTINGS = SETTINGS

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


@dataclass(frozen=True)
class Measure(Cell):
    """One number about an answer; see Result."""

    score: float
    evict_at: int | None


R = TypeVar("R", bound=Record)


def read(path: Path, kind: type[R]) -> Iterator[R]:
    """All records of a file; a last line that was not finished is left out.

    Raises:
        ResultsError: if another line cannot be read, or a key occurs twice.
    """
    seen: set[Any] = set()
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = kind.parse(line.decode())
        except ValueError as error:
            what = kind.__name__.lower()
            raise ResultsError(f"{path}, line {number} is not a {what}: {error}") from None
        if record.key in seen:
            raise ResultsError(f"{path}, line {number} repeats an earlier one")
        seen.add(record.key)
        yield record


class Store(Generic[R]):
    """A file of records, open for appending by one run; a context manager.

    Args:
        path: of the file; its folder is made if it is missing.
        kind: of the records.
    """

    def __init__(self, path: Path, kind: type[R]):
        self.path, self._kind = path, kind

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = self.path.read_bytes()
            os.truncate(self.path, content.rfind(b"\n") + 1)  # a line that was not finished
            self.done: dict[Any, R] = {record.key: record for record in read(self.path, self._kind)}
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise ResultsError(f"another run is writing to {self.path}") from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, record: R) -> None:
        """Append one record; it is in the hands of the system when this returns."""
        self._file.write(json.dumps(asdict(record)).encode() + b"\n")  # type: ignore[call-overload]
        self._file.flush()
        self.done[record.key] = record


@dataclass(frozen=True)
class Settings:
    """What all records of a file have in common; what a command does not have is None.

    Attributes:
        model: as requests name it.
        seed: of the generated samples.
        instruct: whether the texts came with an instruction.
        slack: tokens of a reply on top of what its words need.
        texts: digests of the generated tasks, by task.
        questions: about each generated text.
        form: of questions on real text.
        answer_tokens: of the full cache's answers, at most.
        top: tokens in each list of log-probabilities.
        interval: the server's, from one eviction of an answer to the next; None for its default.
        temperature: at which answers are written.
    """

    model: str
    seed: int
    instruct: bool
    slack: int
    texts: dict[str, str]
    questions: int = 1
    form: str = "chat"
    answer_tokens: int | None = None
    top: int | None = None
    interval: int | None = None
    temperature: float | None = None

    def merge(self, before: Self, folder: Path) -> Self:
        """These settings with the tasks of an earlier run.

        Raises:
            ResultsError: if the two cannot share a folder.
        """
        mine, theirs = asdict(self), asdict(before)
        differ = [
            f"{name}: {theirs[name]!r}, now {value!r}"
            for name, value in mine.items()
            if name != "texts" and value != theirs[name]
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
        return replace(self, texts={**before.texts, **self.texts})


def write_settings(
    folder: Path, settings: Settings, run: dict[str, Any], kind: type[Cell] = Result, begun: bool = False
) -> None:
    """Note the settings, and the run that is about to begin, beside those before it.

    Args:
        kind: of the records that the run writes.
        begun: whether earlier runs stored anything; otherwise they are forgotten, with their settings.

    Raises:
        ResultsError: if earlier runs had other settings.
    """
    path = folder / kind.SETTINGS
    runs: list[dict[str, Any]] = []
    if begun:
        before, runs = read_settings(folder, kind)
        settings = settings.merge(before, folder)
    content = {**asdict(settings), "runs": [*runs, run]}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def read_settings(folder: Path, kind: type[Cell] = Result) -> tuple[Settings, list[dict[str, Any]]]:
    """A folder's settings and its runs.

    Raises:
        ResultsError: if it has none.
    """
    path = folder / kind.SETTINGS
    try:
        content = json.loads(path.read_text())
        runs = content.pop("runs")
        return Settings(**content), runs
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None
