"""Plots of the benchmarks: panels of lines with intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Estimate

Points = Sequence[tuple[Any, Estimate | float]]
"""Places, words or numbers, and heights."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        xlabel, ylabel: of the axes.
        lines: by name.
        level: height of a grey line.
    """

    xlabel: str
    ylabel: str
    lines: Mapping[str, Points] = field(default_factory=dict)
    level: float | None = None


def plot(path: Path, panels: Sequence[Panel]) -> Path:
    """Draw panels side by side; the path."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False)
    for panel, of in zip(panels, axes[0], strict=True):
        for name, points in panel.lines.items():
            spans = [one if isinstance(one, Estimate) else Estimate(one, one, one) for _, one in points]
            below, above = [s.median - s.low for s in spans], [s.high - s.median for s in spans]
            places, heights = [place for place, _ in points], [span.median for span in spans]
            of.errorbar(places, heights, [below, above], marker="o", capsize=3, label=name)
        if panel.level is not None:
            of.axhline(panel.level, color="grey", linewidth=0.8)
        of.set(xlabel=panel.xlabel, ylabel=panel.ylabel, ylim=(0, None))
        of.grid(alpha=0.3)
        of.legend()
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
    return path
