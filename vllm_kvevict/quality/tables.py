"""Pieces of Markdown that the reports are made of."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """A Markdown table; the first ``left`` columns are text, the others are aligned to the right."""
    marks = ["---" if index < left else "---:" for index in range(len(header))]
    lines = [header, marks, *rows]
    return [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]


def picture(about: str, path: str | None) -> list[str]:
    """A picture by its path relative to the text; nothing without a path."""
    return [f"![{about}]({path})"] if path else []


def budget_name(budget: float) -> str:
    return f"{budget:g}" if budget <= 1 else f"{budget:g} tokens"
