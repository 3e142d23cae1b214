"""The report of a folder of results: a Markdown text, and plots."""

import os
from pathlib import Path

from vllm_kvevict.quality import markdown, plots
from vllm_kvevict.quality.findings import QualityReport, read_folder


def write_report(folder: Path, output: Path, title: str, budget: float) -> Path:
    """Write plots and text; the path of the text.

    Raises:
        ResultsError: if the folder has no results.
    """
    report = read_folder(folder, title, budget)
    pictures = draw(report, output.with_suffix(""))
    relative = {name: os.path.relpath(path, output.parent) for name, path in pictures.items()}
    output.write_text(markdown.text(report, relative))
    return output


def draw(report: QualityReport, folder: Path) -> dict[str, Path]:
    """All pictures, by what they show."""
    found = {}
    scores, needles, fidelity = report.scores, report.needles, report.fidelity
    if scores.scopes:
        found["scores"] = plots.score_over_budget(scores, folder / "scores.png")
    if needles is not None:
        budget = needles.nearest(report.budget)
        for scope in needles.scopes or ["prompt"]:
            path = folder / f"needle-{scope}.png"
            found[f"needle {scope}"] = plots.needle_maps(needles, scope, budget, path)
    if fidelity is not None and fidelity.divergence.scopes:
        path = folder / "divergence.png"
        found["divergence"] = plots.score_over_budget(fidelity.divergence, path, "KL, nats per token")
    return found
