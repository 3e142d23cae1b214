"""The report's pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from vllm_kvevict.quality.results import Column
from vllm_kvevict.quality.scores import Scores

SCOPE_TITLES = {
    "prompt": "the policy sees the question",
    "prefix": "the policy does not see the question",
    "turns": "each turn on its own, without the question",
}
MARKERS = "osD^vP*X<>"
PANELS = 4
"""Heat maps side by side, at most."""


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)
    return path


def score_over_budget(scores: Scores, path: Path, label: str = "mean score") -> Path:
    """Mean score, or another mean, of each policy over the budget, one panel per scope; whiskers are 95 % intervals."""
    scopes = scores.scopes
    figure, panels = pyplot.subplots(
        1, len(scopes), figsize=(1 + 4.6 * len(scopes), 4), sharey=True, squeeze=False
    )
    policies = list(dict.fromkeys(policy for scope in scopes for policy in scores.policies(scope)))
    for panel, scope in zip(panels[0], scopes, strict=True):
        _reference(panel, scores)
        for number, policy in enumerate(policies):
            _curve(panel, scores, policy, scope, number, len(policies))
        shares = [scores.share(budget, scope) for budget in scores.budgets(scope)]
        panel.set(xscale="log", title=SCOPE_TITLES[scope], xlabel="budget, share of the tokens")
        panel.set_xticks(shares, [f"{share:.2g}" for share in shares])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel(label)
    handles: dict[str, Any] = {}
    for panel in panels[0]:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(0.92, 0.5), fontsize=8)
    return _save(figure, path)


def _reference(panel: Any, scores: Scores) -> None:
    """The columns without a budget as horizontal lines."""
    for number, column in enumerate(scores.fixed):
        mean = scores.mean(column)
        if mean is not None:
            panel.axhline(
                mean.mean, color="black", linestyle=("--", ":", "-.")[number % 3], label=str(column)
            )
            panel.axhspan(mean.low, mean.high, color="black", alpha=0.06, linewidth=0)


def _curve(panel: Any, scores: Scores, policy: str, scope: str, number: int, total: int) -> None:
    points = [
        (scores.share(budget, scope), mean)
        for budget in scores.budgets(scope)
        if (mean := scores.mean(Column(policy, budget, scope)))
    ]
    if not points:
        return
    means = [mean for _, mean in points]
    # A little to the side of each other, so that whiskers can be told apart.
    shift = 1.0 + 0.04 * (number / max(1, total - 1) - 0.5)
    panel.errorbar(
        [share * shift for share, _ in points],
        [mean.mean for mean in means],
        yerr=np.maximum(0, [[m.mean - m.low for m in means], [m.high - m.mean for m in means]]),
        color=pyplot.get_cmap("tab20" if total > 10 else "tab10")(number),
        marker=MARKERS[number % len(MARKERS)],
        markersize=4,
        linewidth=1.2,
        elinewidth=0.7,
        label=policy,
    )


def needle_maps(scores: Scores, scope: str, budget: float | None, path: Path) -> Path:
    """Mean score by depth and length, one panel per policy."""
    wanted = [c for c in scores.columns if c.budget is None or (c.budget, c.scope) == (budget, scope)]
    lengths = scores.lengths
    depths = sorted({sample[2] for sample in scores.samples if sample[2] is not None})
    figure, panels = _grid(len(wanted), 2.6, 2.6)
    image = None
    for panel, column in zip(panels, wanted, strict=True):
        grid = np.full((len(depths), len(lengths)), np.nan)
        sums = needle_means(scores, column)
        for (length, depth), mean in sums.items():
            grid[depths.index(depth), lengths.index(length)] = mean
        image = panel.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="upper")
        panel.set_title(column.policy, fontsize=9)
        panel.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7, rotation=45)
        panel.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
        panel.set(xlabel="words")
    _finish(figure, panels, image, "depth", "mean score")
    return _save(figure, path)


def needle_means(scores: Scores, column: Column) -> dict[tuple[int, float], float]:
    """Mean score by length and depth."""
    found: dict[tuple[int, float], list[float]] = {}
    for result in scores.results:
        if result.column == column and result.length is not None and result.depth is not None:
            found.setdefault((result.length, result.depth), []).append(result.score)
    return {place: sum(values) / len(values) for place, values in found.items()}


def kept_maps(shares: Mapping[Column, np.ndarray], path: Path) -> Path:
    """Share of the tokens that each policy kept in each layer and KV head."""
    figure, panels = _grid(len(shares), 2.6, 2.8)
    most = max(float(share.max()) for share in shares.values())
    image = None
    for panel, (column, share) in zip(panels, shares.items(), strict=True):
        image = panel.imshow(share, vmin=0, vmax=most, cmap="viridis", aspect="auto", origin="lower")
        panel.set_title(f"{column.policy} ({column.scope})", fontsize=9)
        panel.set(xlabel="KV head")
        for axis, size in ((panel.xaxis, share.shape[1]), (panel.yaxis, share.shape[0])):
            axis.set_ticks(range(0, size, max(1, size // 8)))
            axis.set_tick_params(labelsize=7)
    _finish(figure, panels, image, "layer", "share of the tokens kept")
    return _save(figure, path)


def _finish(figure: Figure, panels: Sequence[Any], image: Any, vertical: str, colour: str) -> None:
    """Name the vertical axis once a row, and the colours."""
    for panel in panels[::PANELS]:
        panel.set_ylabel(vertical)
    if image is not None:
        figure.colorbar(image, ax=figure.axes, shrink=0.6, label=colour)


def _grid(count: int, width: float, height: float) -> tuple[Figure, Sequence[Any]]:
    """A figure with this many panels."""
    columns = max(1, min(PANELS, count))
    rows = max(1, -(-count // columns))
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[count:]:
        panel.remove()
    return figure, list(panels.flat[:count])
