"""When eviction pays: output tokens/s over stock vLLM's, by prompt, answer and memory, as a page and as a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.cells import Cell
from benchmarks.harness.options import placement_name
from benchmarks.harness.scenarios import PER_CPU, SPEED
from vllm_kvevict.quality.tables import picture, table

PAGE = "WHEN-IT-PAYS.md"

ABOUT = (
    "Written by `python -m benchmarks.report` from `python -m benchmarks.throughput --sweep load`. The tables have "
    f"{SPEED}: where a figure is above 1, eviction pays. All requests come at once. Memory is counted in requests "
    "whose prompt and answer it holds without eviction; with as many as there are requests, everything fits. A figure "
    "without an interval is of one run of each side. In parentheses: the same per CPU second."
)

Grid = dict[tuple[int, int], Cell]
"""Loads by tokens of each prompt and of each answer."""


def page(records: dict[str, dict[str, Any]], swept: dict[str, list[Cell]]) -> str:
    """The page of all sweeps over loads.

    Args:
        records: by the names of their files, which are in the folder of the page.
        swept: of these records the sweeps over loads, with a cell for each load.
    """
    lines = ["# When eviction pays", "", ABOUT]
    for name, found in swept.items():
        first, record = found[0].scenario, records[name]
        lines += ["", f"## {first['policy']}, {first['dtype']}", ""]
        lines += [f"On {record['cpu']} ({record.get('level', 'level not recorded')}); [record]({name}.json)."]
        lines += [_threads_in_words(record["results"]["threads"])]
        lines += [in_words(found), "", *picture("speed over stock's", f"{name}.png")]
        for title, grid in grids(found).items():
            lines += ["", f"### {title}", "", *grid_table(grid)]
    return "\n".join(lines) + "\n"


def _threads_in_words(threads: int | None) -> str:
    """How many threads the sides had."""
    if threads is None:
        return (
            "Threads are [where vLLM places them](../../docs/BENCHMARKS.md#threads), as many on both sides."
        )
    return f"Both sides have {placement_name(threads)}."


def in_words(found: Sequence[Cell]) -> str:
    """How many loads were measured, and where most and least is gained."""
    by_speed = sorted(found, key=_speed)
    slowest, fastest = _in_words(by_speed[0]), _in_words(by_speed[-1])
    return f"{len(found)} loads were measured: from {slowest}, to {fastest}."


def _speed(cell: Cell) -> float:
    return cell.ratios[SPEED].median


def _in_words(cell: Cell) -> str:
    of = cell.scenario
    lengths = f"{of['input_len']} in and {of['output_len']} out"
    return f"{_speed(cell):.2f}x at {lengths}, {cell.side}, memory for {of['pool']}"


def grids(found: Sequence[Cell]) -> dict[str, Grid]:
    """The cells by side and memory, which their titles say, least memory first, then by prompt and answer."""
    result: dict[str, Grid] = {}
    for cell in sorted(found, key=lambda cell: (cell.side, cell.scenario["pool"])):
        of = cell.scenario
        title = f"{cell.side}, memory for {of['pool']} of {of['requests']} requests"
        result.setdefault(title, {})[of["input_len"], of["output_len"]] = cell
    return result


def grid_table(grid: Grid) -> list[str]:
    """A row for each length of prompts, a column for each length of answers; a dash where nothing was measured."""
    prompts, answers = _lengths(grid)
    rows = [
        (f"{prompt} in", *(_shown(grid.get((prompt, answer))) for answer in answers)) for prompt in prompts
    ]
    return table(("", *(f"{answer} out" for answer in answers)), rows)


def _shown(cell: Cell | None) -> str:
    """A load's speed over stock's, with an interval if there were several rounds, and the same per CPU second."""
    if cell is None:
        return "-"
    speed = str(cell.ratios[SPEED]) if len(cell.rounds) > 1 else f"{_speed(cell):.2f}"
    return f"{speed} ({cell.ratios[PER_CPU].median:.2f})"


def plot(found: Sequence[Cell], path: Path) -> Path:
    """The tables as maps: what is faster in green, what is slower in red; returns the path."""
    from matplotlib import colors, pyplot

    maps = grids(found)
    figure, axes = pyplot.subplots(1, len(maps), figsize=(5.5 * len(maps), 4), squeeze=False)
    scale = colors.TwoSlopeNorm(1.0, vmin=0.5, vmax=2.0)
    for panel, (title, grid) in zip(axes[0], maps.items(), strict=True):
        prompts, answers = _lengths(grid)
        speeds = [[_speed(grid[p, a]) if (p, a) in grid else float("nan") for a in answers] for p in prompts]
        panel.imshow(speeds, cmap="RdYlGn", norm=scale, aspect="auto", origin="lower")
        panel.set_xticks(range(len(answers)), answers)
        panel.set_yticks(range(len(prompts)), prompts)
        panel.set(xlabel="tokens of each answer", ylabel="tokens of each prompt", title=title)
        for (prompt, answer), cell in grid.items():
            panel.text(
                answers.index(answer), prompts.index(prompt), f"{_speed(cell):.2f}x", ha="center", va="center"
            )
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
    return path


def _lengths(grid: Grid) -> tuple[list[int], list[int]]:
    """Of prompts, and of answers, shortest first."""
    return sorted({prompt for prompt, _ in grid}), sorted({answer for _, answer in grid})
