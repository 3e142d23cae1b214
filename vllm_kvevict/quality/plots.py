"""The report's pictures."""

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
        if mean := scores.mean(column):
            style = ("--", ":", "-.")[number % 3]
            panel.axhline(mean.mean, color="black", linestyle=style, label=str(column))
            panel.axhspan(mean.low, mean.high, color="black", alpha=0.06, linewidth=0)


def _curve(panel: Any, scores: Scores, policy: str, scope: str, number: int, total: int) -> None:
    found = [(budget, scores.mean(Column(policy, budget, scope))) for budget in scores.budgets(scope)]
    points = [(scores.share(budget, scope), mean) for budget, mean in found if mean]
    if not points:
        return
    # A little to the side of each other, so that whiskers can be told apart.
    shift = 1.0 + 0.04 * (number / max(1, total - 1) - 0.5)
    shares, means = [share * shift for share, _ in points], [mean.mean for _, mean in points]
    below, above = [mean.mean - mean.low for _, mean in points], [mean.high - mean.mean for _, mean in points]
    color = pyplot.get_cmap("tab20" if total > 10 else "tab10")(number)
    look = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4, "linewidth": 1.2, "elinewidth": 0.7}
    panel.errorbar(shares, means, yerr=np.maximum(0, [below, above]), color=color, label=policy, **look)


def needle_maps(scores: Scores, scope: str, budget: float | None, path: Path) -> Path:
    """Mean score by depth and length, one panel per policy."""
    wanted = [c for c in scores.columns if c.budget is None or (c.budget, c.scope) == (budget, scope)]
    lengths = scores.lengths
    depths = sorted({sample[2] for sample in scores.samples if sample[2] is not None})
    width = max(1, min(PANELS, len(wanted)))
    height = max(1, -(-len(wanted) // width))
    size = 2.6 * width, 2.6 * height
    figure, panels = pyplot.subplots(height, width, figsize=size, squeeze=False, layout="constrained")
    for panel in panels.flat[len(wanted) :]:
        panel.remove()
    image = None
    for number, (panel, column) in enumerate(zip(panels.flat, wanted, strict=False)):
        grid = np.full((len(depths), len(lengths)), np.nan)
        mine = [result for result in scores.results if result.column == column]
        for row, depth in enumerate(depths):
            for place, length in enumerate(lengths):
                there = [result.score for result in mine if result.sample[1:3] == (length, depth)]
                grid[row, place] = np.mean(there) if there else np.nan
        image = panel.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="upper")
        panel.set_title(column.policy, fontsize=9)
        panel.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7, rotation=45)
        panel.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
        panel.set(xlabel="words", ylabel="" if number % PANELS else "depth")
    if image is not None:
        figure.colorbar(image, ax=figure.axes, shrink=0.6, label="mean score")
    return _save(figure, path)
