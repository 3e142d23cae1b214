"""The report of a folder of results: a summary in JSON, a Markdown text, and plots."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vllm_kvevict.machine import record
from vllm_kvevict.quality import markdown, plots
from vllm_kvevict.quality.choices import evictions_by_request, kept_shares
from vllm_kvevict.quality.decoding_report import gather_decoding, summarise_decoding
from vllm_kvevict.quality.fidelity_report import Measures, gather_fidelity, summarise_fidelity
from vllm_kvevict.quality.findings import check_claims, full_scores, pick, too_hard
from vllm_kvevict.quality.gathered import Report
from vllm_kvevict.quality.results import RESULTS, Column, Result, ResultsError, Settings, read, read_settings
from vllm_kvevict.quality.scores import Scores, of_length, of_task, plain

SUMMARY = "summary.json"


def write_report(
    folder: Path, output: Path, title: str, budget: float, eviction_log: Path | None, command: Sequence[str]
) -> Path:
    """Write summary, plots and text, with the command that the user typed; the path of the text.

    Raises:
        ResultsError: if the folder has no results.
    """
    report = gather(folder, title, budget, eviction_log)
    summary = record(command, summarise(report))
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    pictures = draw(report, output.with_suffix(""))
    relative = {name: os.path.relpath(path, output.parent) for name, path in pictures.items()}
    output.write_text(markdown.text(report, relative))
    return output


def gather(folder: Path, title: str, budget: float, eviction_log: Path | None) -> Report:
    """Read a folder, and what the server wrote of its evictions if there is such a file."""
    fidelity, decoding = gather_fidelity(folder), gather_decoding(folder)
    settings, runs, results = read_answers(folder, [one for one in (fidelity, decoding) if one])
    full = full_scores(results)
    counting = [result for result in results if result.task not in too_hard(full)]
    placed = [result for result in counting if result.depth is not None]
    spread = [result for result in counting if result.depth is None]
    scores = Scores(spread or placed, settings.questions)
    chosen = scores.nearest(budget)
    evictions = evictions_by_request(eviction_log) if eviction_log else {}
    kept = kept_shares(scores.results, evictions, chosen) if chosen is not None else {}
    if eviction_log and not kept:
        raise ResultsError(f"{eviction_log} does not mention the requests of {folder}")
    needles = Scores(placed) if placed else None
    return Report(title, settings, runs, results, full, scores, needles, chosen, kept, fidelity, decoding)


def read_answers(
    folder: Path, others: Sequence[Measures]
) -> tuple[Settings, list[Mapping[str, Any]], list[Result]]:
    """Settings, runs and results of a folder, which may have other measures only.

    Raises:
        ResultsError: it has neither.
    """
    path = folder / RESULTS
    more = [run for one in others for run in one.runs]
    if others and not path.exists():
        return others[0].settings, more, []
    settings, runs = read_settings(folder, Settings)
    results = list(read(path, Result)) if path.exists() else []
    if not results and not others:
        raise ResultsError(f"{folder} has no results yet")
    return settings, [*runs, *more], results


def draw(report: Report, folder: Path) -> dict[str, Path]:
    """All pictures, by what they show."""
    found = {}
    scores, needles = report.scores, report.needles
    if scores.scopes:
        found["scores"] = plots.score_over_budget(scores, folder / "scores.png")
    if needles is not None:
        budget = needles.nearest(report.budget)
        for scope in needles.scopes or ["prompt"]:
            path = folder / f"needle-{scope}.png"
            found[f"needle {scope}"] = plots.needle_maps(needles, scope, budget, path)
    if report.kept:
        found["kept"] = plots.kept_maps(report.kept, folder / "kept.png")
    if report.fidelity is not None and report.fidelity.divergence.scopes:
        measures = report.fidelity.divergence
        path = plots.score_over_budget(measures, folder / "divergence.png", "KL, nats per token")
        found["divergence"] = path
    return found


def summarise(report: Report) -> dict[str, Any]:
    """The numbers behind the text."""
    scores = report.scores
    summary: dict[str, Any] = {
        "settings": asdict(report.settings),
        "runs": list(report.runs),
        "answers": len(report.results),
        "full": dict(report.full),
        "too_hard": too_hard(report.full),
        "columns": [column_summary(scores, column) for column in scores.columns],
        "claims": [{**asdict(finding), "verdict": finding.verdict} for finding in check_claims(scores)],
        "picks": [asdict(found) for found in pick(scores)],
    }
    if report.needles is not None:
        summary["needles"] = [needle_summary(report.needles, column) for column in report.needles.columns]
    if report.fidelity is not None:
        summary["fidelity"] = summarise_fidelity(report.fidelity)
    if report.decoding is not None:
        summary["decoding"] = summarise_decoding(report.decoding)
    if report.kept:
        summary["kept"] = [
            {**asdict(column), "share": np.round(share, 5).tolist()} for column, share in report.kept.items()
        ]
    return summary


def column_summary(scores: Scores, column: Column) -> dict[str, Any]:
    """One column: its mean, what it lost against the full cache, and its tasks and lengths."""
    return {
        **asdict(column),
        "score": plain(scores.mean(column)),
        "ratio_to_full": plain(scores.ratio(column, scores.full) if scores.full else None),
        "difference_to_full": plain(scores.difference(column, scores.full) if scores.full else None),
        "tasks": {task: plain(scores.mean(column, of_task(task))) for task in scores.tasks},
        "lengths": {str(length): plain(scores.mean(column, of_length(length))) for length in scores.lengths},
    }


def needle_summary(scores: Scores, column: Column) -> dict[str, Any]:
    """One column's mean score at each length and depth."""
    means = plots.needle_means(scores, column)
    return {
        **asdict(column),
        "means": [
            {"length": length, "depth": depth, "score": mean} for (length, depth), mean in means.items()
        ],
    }
