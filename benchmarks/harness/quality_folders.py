"""Folders of a comparison's results: compressed while nothing runs, and one table of them all."""

import fcntl
import lzma
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from vllm_kvevict.quality.fidelity import ANSWERS, FIDELITY, Fidelity, is_full
from vllm_kvevict.quality.findings import full_scores, too_hard
from vllm_kvevict.quality.measures import Measures, gather
from vllm_kvevict.quality.results import RESULTS, Column, Result, ResultsError, read
from vllm_kvevict.quality.scores import Mean, Scores
from vllm_kvevict.quality.tables import budget_name, table

FILES = (RESULTS, ANSWERS, FIDELITY)
TABLE = "table.md"
HEADER = ["policy", "budget", "score, share of the full cache's", "agreement", "KL", "cost of an eviction"]
MEANING = (
    "Score: the mean over the tasks that count, those in which the full cache gets at least 0.8, as a share of the "
    "full cache's on the same samples. Agreement and KL: how often the compressed cache's first choice is the full "
    "cache's token, and how far the distributions are apart (nats per token, a lower bound). Brackets hold paired 95 % "
    "bootstrap intervals. Cost: the median over the prompts of the time that a prompt took longer than with the full "
    "cache, as a share of the latter."
)


@dataclass(frozen=True)
class Part:
    """One length and scope.

    Attributes:
        folder: of its results.
        tokens: of each prompt, at most.
        scope: see Column.
    """

    folder: Path
    tokens: int
    scope: str


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second run out of a folder.

    Raises:
        ResultsError: there is one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsError(f"another run is writing to {folder}") from None
        yield
    finally:
        os.close(handle)


def _packed(path: Path) -> Path:
    return path.with_name(f"{path.name}.xz")


def unpack(folder: Path) -> None:
    """Make a folder's results ready to be continued; what a run that was killed left behind is newer."""
    for path in (folder / name for name in FILES):
        if not path.exists() and _packed(path).exists():
            temporary = path.with_suffix(".tmp")
            with lzma.open(_packed(path)) as source, temporary.open("wb") as target:
                shutil.copyfileobj(source, target)
            temporary.replace(path)


def pack(folder: Path) -> None:
    """Compress a folder's results."""
    for path in (folder / name for name in FILES):
        if path.exists():
            temporary = path.with_suffix(".tmp")
            with path.open("rb") as source, lzma.open(temporary, "wb", preset=9) as target:
                shutil.copyfileobj(source, target)
            temporary.replace(_packed(path))
            path.unlink()


def write_table(output: Path, parts: Sequence[Part]) -> None:
    """Write what all parts that were measured say, as one page; parts of earlier runs keep their section."""
    path = output / TABLE
    sections = _sections(path.read_text()) if path.exists() else {}
    for part in parts:
        if (part.folder / RESULTS).exists():
            title, *rest = part_section(part)
            sections[title] = rest
    lines = [line for title, rest in sections.items() for line in (title, *rest)]
    path.write_text("\n".join([MEANING, "", *lines]))


def _sections(page: str) -> dict[str, list[str]]:
    """The lines of each section behind its title."""
    sections: dict[str, list[str]] = {}
    for line in page.splitlines():
        if line.startswith("## "):
            sections[line] = []
        elif sections:
            sections[list(sections)[-1]].append(line)
    return {title: [*lines, ""] if lines[-1:] != [""] else lines for title, lines in sections.items()}


def part_section(part: Part) -> list[str]:
    """One length and scope: policy by budget."""
    results = list(read(part.folder / RESULTS, Result))
    full, fidelity = full_scores(results), gather(part.folder, Fidelity)
    hard = too_hard(full)
    scores = Scores([result for result in results if result.task not in hard])
    rows = [row(scores, fidelity, column) for column in _ordered(scores)]
    counting = [f"{_short(task)} {score:.2f}" for task, score in full.items() if task not in hard]
    unable = f" The model cannot do: {', '.join(map(_short, hard))}." if hard else ""
    return [
        f"## {part.tokens:,} tokens, scope {part.scope}",
        "",
        f"Tasks that count, and the full cache's score: {', '.join(counting) or 'none'}.{unable}",
        "",
        *table(HEADER, rows, left=1),
        "",
    ]


def row(scores: Scores[Result], fidelity: Measures | None, column: Column) -> list[str]:
    """Cells of one policy and budget; a dash where nothing was measured."""
    share = scores.ratio(column, scores.full) if scores.full else None
    cells: list[str] = [_name(scores, column), budget_name(column.budget or 0), _cell(share)]
    if fidelity is None or not fidelity.of(column):
        return [*cells, "-", "-", "-"]
    extra = cost(fidelity.measures, column)
    found = (fidelity.agreement.mean(column), fidelity.divergence.mean(column))
    return [*cells, *map(_cell, found), "-" if extra is None else f"{extra:+.0%}"]


def _name(scores: Scores[Result], column: Column) -> str:
    """The policy, and which tasks it had if those were not all that count."""
    had = {result.task for result in scores.results if result.column == column}
    if had.issuperset(scores.tasks):
        return column.policy
    return f"{column.policy} ({', '.join(_short(task) for task in scores.tasks if task in had)} only)"


def _short(task: str) -> str:
    return task.removeprefix("text/")


def cost(measures: Sequence[Fidelity], column: Column) -> float | None:
    """How much longer a prompt takes than with the full cache, as a share: the median over prompts that both read.

    Requests that score a prompt find nothing cached, so that each of them reads all of it.
    """
    full = {one.sample: one.seconds for one in measures if is_full(one)}
    shares = [
        one.seconds / full[one.sample] - 1
        for one in measures
        if one.column == column and full.get(one.sample)
    ]
    return median(shares) if shares else None


def _ordered(scores: Scores[Result]) -> list[Column]:
    """Columns that evict, by budget."""
    evicting = [column for column in scores.columns if column.budget is not None]
    return sorted(evicting, key=lambda column: column.budget or 0)


def _cell(mean: Mean | None) -> str:
    return str(mean) if mean else "-"
