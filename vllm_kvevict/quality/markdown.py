"""The report's text; every figure in it is computed."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from vllm_kvevict.quality.cases import TEXT
from vllm_kvevict.quality.decoding_report import decoding_section
from vllm_kvevict.quality.fidelity_report import fidelity_section
from vllm_kvevict.quality.findings import (
    CAN_DO,
    HOLDS,
    NEARLY_NOTHING,
    TIGHT,
    Finding,
    Pick,
    check_claims,
    pick,
    too_hard,
)
from vllm_kvevict.quality.gathered import Report
from vllm_kvevict.quality.plots import SCOPE_TITLES
from vllm_kvevict.quality.results import Column
from vllm_kvevict.quality.scores import NONE, RESAMPLES, Scores, of_length, of_task, signed
from vllm_kvevict.quality.tables import budget_name, picture, table
from vllm_kvevict.quality.tasks import TASKS
from vllm_kvevict.quality.turns_report import turns_section

INTERVALS = (
    "Scores lie between 0 and 1: the share of expected strings in a reply, or the suite's own score, averaged over the "
    "tasks. Brackets hold 95 % bootstrap intervals ({resampled}). Differences and shares compare the same samples. The "
    "intervals are not corrected for the number of comparisons."
)
WITHIN_TASKS = f"{RESAMPLES:,} resamples of the samples within each task"
OF_TEXTS = f"{RESAMPLES:,} resamples of the texts, each with all questions about it"
SYNTHETIC = (
    "The texts are synthetic: random words, and questions that are answered in the words of the text. A model trained "
    "only on such texts, like the needle model, is small. Its scores show how policies differ on such texts, not what "
    "a large model loses on real ones: measure that with your own model and a public suite."
)

REAL = (
    "Tasks on real text ask about Python's language reference and the sources of its standard library. Each answer is "
    "checked by code against the text that was sent."
)
CONTROL = "streaming-llm"
"""It keeps the first and the last tokens, so it must fail where the answer lies between them."""


def text(report: Report, pictures: Mapping[str, str]) -> str:
    """The whole Markdown text.

    Args:
        report: what it is about.
        pictures: where they are, by what they show.
    """
    parts = [
        [f"# {report.title}"],
        fidelity_section(report.fidelity) if report.fidelity else [],
        picture("KL over budget", pictures.get("divergence")),
        decoding_section(report.decoding) if report.decoding else [],
        *(answers_sections(report, pictures) if report.results else ()),
        ["## Commands", "", *run_lines(report.runs)],
    ]
    return "\n\n".join("\n".join(part).rstrip() for part in parts if part) + "\n"


def answers_sections(report: Report, pictures: Mapping[str, str]) -> list[list[str]]:
    """What is said about scores."""
    return [
        [*blind_lines(report.full), *measured(report)],
        hard_section(report.full),
        pick_section(pick(report.scores)),
        fixed_section(report.scores),
        *(scope_section(report.scores, scope) for scope in report.scores.scopes),
        turns_section(report.scores),
        picture("Score over budget", pictures.get("scores")),
        task_section(report),
        length_section(report),
        needle_section(report, pictures),
        claims_section(check_claims(report.scores)),
        kept_section(report, pictures),
    ]


def measured(report: Report) -> list[str]:
    """What was asked, and of which model."""
    results = report.results
    prompts = [result.prompt_tokens for result in results if result.prompt_tokens]
    samples = len({result.sample for result in results})
    settings = report.settings
    lines = [
        "## What was measured",
        "",
        f"- {len(results):,} answers to {samples:,} samples of {len({r.task for r in results})} tasks"
        + (f"; prompts of {min(prompts):,} to {max(prompts):,} tokens" if prompts else ""),
        f"- model `{settings.model}`; seed {settings.seed}; texts {'with' if settings.instruct else 'without'} an "
        "instruction; temperature 0",
        *question_lines(settings.questions),
        *left_out({result.task for result in results}),
    ]
    whole = sum(result.whole for result in results)
    if whole:
        lines.append(f"- **{whole:,} prompts or prefixes were too short to be evicted and were kept whole**")
    cut = sum(result.finish_reason == "length" for result in results)
    if cut:
        lines.append(f"- replies cut at the length limit: {cut:,}")
    empty = sum(not result.reply.strip() for result in results)
    if empty:
        lines.append(f"- empty replies: {empty:,}")
    real = [result for result in results if result.task.startswith(TEXT)]
    if real and not any(result.policy.startswith(CONTROL) for result in real):
        lines.append(f"- {CONTROL} was not measured: it is the control, which must miss what the text hides")
    synthetic = ["", SYNTHETIC] if any(result.task in TASKS for result in results) else []
    synthetic += ["", REAL] if real else []
    intervals = INTERVALS.format(resampled=WITHIN_TASKS if settings.questions == 1 else OF_TEXTS)
    return [*lines, *synthetic, "", intervals]


def blind_lines(full: Mapping[str, float]) -> list[str]:
    """What comes first where the model answers hardly anything."""
    mean = sum(full.values()) / len(full) if full else 1.0
    if mean >= NEARLY_NOTHING:
        return []
    return [
        f"**With the full cache the model scores {mean:.2f}: it cannot answer these questions, so the scores below say "
        "nothing about eviction.** Ask what the model can do (`--family text`), ask a model that can do it, or measure "
        "how far its answers change (`vllm-kvevict quality fidelity`).",
        "",
    ]


def hard_section(full: Mapping[str, float]) -> list[str]:
    """The tasks that do not count."""
    hard = too_hard(full)
    if not hard:
        return []
    rows = [[task, f"{score:.2f}", "the model cannot do this"] for task, score in hard.items()]
    return [
        "## Tasks that do not count",
        "",
        f"A task on real text counts if the full cache scores at least {CAN_DO}. These are in no other table:",
        "",
        *table(["task", "full cache", ""], rows),
    ]


def question_lines(questions: int) -> list[str]:
    """What it means that texts share questions, where they do."""
    if questions == 1:
        return []
    return [f"- {questions} questions about each text, each in its own request"]


def left_out(asked: Collection[str]) -> list[str]:
    """Which of the generated tasks were not asked, if others were."""
    missing = [task for task in TASKS if task not in asked]
    return [f"- not asked: {', '.join(missing)}"] if missing and len(missing) < len(TASKS) else []


def run_lines(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Commands, servers and machines; a run that was continued is listed once."""
    dates: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        server = run["results"]["server"]
        about = f"vLLM {server['vllm']}" if server.get("vllm") else "vLLM version unknown"
        note = f", {server['note']}" if server.get("note") else ""
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        what = (
            f"`{run['command']}`",
            f"  - server at {server['url']}: {about}{note}",
            f"  - client: {run['cpu']}; {versions}",
        )
        dates.setdefault(what, []).append(run["date"])
    lines = []
    for (command, *details), days in dates.items():
        again = f", started {len(days)} times" if len(days) > 1 else ""
        lines += [f"- {days[0]}{again}: {command}", *details]
    return lines


def fixed_section(scores: Scores) -> list[str]:
    """The full cache, and servers measured as they are."""
    if not scores.fixed:
        return []
    rows = [
        [column, scores.mean(column), signed(scores.difference(column, scores.full)) if scores.full else NONE]
        for column in scores.fixed
    ]
    heading = "Without eviction" if list(scores.fixed) == [scores.full] else "Full cache and plain servers"
    return [f"## {heading}", "", *table(["", "score", "difference to the full cache"], rows)]


def scope_section(scores: Scores, scope: str) -> list[str]:
    """Policies by budgets: scores, then the differences to the full cache."""
    budgets, full = scores.budgets(scope), scores.full

    def by_budget(cell: Callable[[Column], object]) -> list[str]:
        columns = {policy: [Column(policy, b, scope) for b in budgets] for policy in scores.policies(scope)}
        rows = [[policy, *map(cell, mine)] for policy, mine in columns.items()]
        return table(["policy", *map(budget_name, budgets)], rows)

    lines = [f"## Scope {scope}: {SCOPE_TITLES[scope]}", "", *by_budget(lambda one: scores.mean(one) or NONE)]
    if full is None:
        return [*lines, "", "The full cache was not measured, so there are no differences to it."]
    lines += ["", "Difference to the full cache on the same samples:", ""]
    lines += by_budget(lambda one: signed(scores.difference(one, full)))
    lines += ["", "Share of the full cache's score on the same samples:", ""]
    return [*lines, *by_budget(lambda one: scores.ratio(one, full) or NONE)]


def task_section(report: Report) -> list[str]:
    """Tasks by policies, at one budget."""
    scores = report.scores
    columns = at_budget(scores, report.budget)
    rows = [
        [name, *(scores.mean(column, of_task(task)) or NONE for task in scores.tasks)]
        for name, column in columns
    ]
    return [f"## By task{at_text(report.budget)}", "", *table(["policy (scope)", *scores.tasks], rows)]


def length_section(report: Report) -> list[str]:
    """Lengths by policies, at one budget, if there are several."""
    scores = report.scores
    if len(scores.lengths) < 2:
        return []
    rows = [
        [name, *(scores.mean(column, of_length(length)) or NONE for length in scores.lengths)]
        for name, column in at_budget(scores, report.budget)
    ]
    unit = "tokens" if all(task.startswith(TEXT) for task in scores.tasks) else "words"
    header = ["policy (scope)", *(f"{length:,} {unit}" for length in scores.lengths)]
    return [f"## By length{at_text(report.budget)}", "", *table(header, rows)]


def at_text(budget: float | None) -> str:
    return "" if budget is None else f" at budget {budget_name(budget)}"


def at_budget(scores: Scores, budget: float | None) -> list[tuple[str, Column]]:
    """Names and columns: those without a budget, then those with this one."""
    fixed = [(str(column), column) for column in scores.fixed]
    return fixed + [
        (f"{column.policy} ({column.scope})", column)
        for scope in scores.scopes
        for column in (Column(policy, budget, scope) for policy in scores.policies(scope))
        if column in scores.columns
    ]


def needle_section(report: Report, pictures: Mapping[str, str]) -> list[str]:
    """The heat maps."""
    if report.needles is None:
        return []
    lines = [
        "## Needles by depth and length",
        "",
        f"Tasks: {', '.join(report.needles.tasks)}{at_text(report.needles.nearest(report.budget))}. Depth 0 is the "
        "beginning of the text.",
    ]
    for name, path in pictures.items():
        if name.startswith("needle"):
            lines += ["", *picture(f"Score by depth and length, scope {name.split()[-1]}", path)]
    return lines


def claims_section(findings: Sequence[Finding]) -> list[str]:
    """What became of the papers' claims."""
    if not findings:
        return []
    rows = [
        [
            f"{finding.source}: {finding.text}",
            finding.compared,
            finding.scope or "both",
            ", ".join(map(budget_name, finding.budgets)) or NONE,
            signed(finding.difference),
            finding.verdict if finding.verdict != HOLDS else f"**{finding.verdict}**",
        ]
        for finding in findings
    ]
    return [
        "## Claims of the papers",
        "",
        f"Policies are compared by their mean over budgets of at most {TIGHT:.0%} of the tokens, scopes by their mean "
        "over all budgets that evict. A claim holds if the whole interval of the difference is above 0, and does not "
        "hold if the whole interval is below 0.",
        "",
        *table(["claim", "difference", "scope", "budgets", "paired difference", "verdict"], rows, left=6),
    ]


def pick_section(picks: Sequence[Pick]) -> list[str]:
    """The best policies, and which cannot be told from them."""
    if not picks:
        return []
    rows = [
        [
            f"{found.scope}, {budget_name(found.budget)}",
            f"**{found.best}**",
            found.score,
            ", ".join(found.equals) or "none",
            NONE if found.lossless is None else ", ".join(found.lossless) or "none",
        ]
        for found in picks
    ]
    header = [
        "scope, budget",
        "best",
        "score",
        "not clearly worse",
        "not clearly below the full cache",
    ]
    often = [f"{name} ({count} of {len(picks)})" for name, count in wins(picks)]
    return [
        "## Which policy to pick",
        "",
        *table(header, rows, left=5),
        "",
        f"Most often the best or not clearly worse: {', '.join(often[:5])}.",
    ]


def wins(picks: Sequence[Pick]) -> list[tuple[str, int]]:
    """How often each policy is the best or cannot be told from it, most often first."""
    counts: dict[str, int] = {}
    for found in picks:
        for name in (found.best, *found.equals):
            counts[name] = counts.get(name, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])


def kept_section(report: Report, pictures: Mapping[str, str]) -> list[str]:
    """What policies kept in each layer and head."""
    if not report.kept or report.budget is None:
        return []
    rows = [
        [
            f"{column.policy} ({column.scope})",
            f"{share.mean():.3f}",
            " ".join(f"{layer:.3f}" for layer in share.mean(axis=1)),
            f"{share.min():.3f} to {share.max():.3f}",
        ]
        for column, share in report.kept.items()
    ]
    header = ["policy (scope)", "kept", "by layer, lowest first", "by head, least to most"]
    return [
        f"## What they kept{at_text(report.budget)}",
        "",
        "Shares of the tokens, averaged over the requests in the server's log.",
        "",
        *table(header, rows),
        "",
        *picture("Share of the tokens kept by layer and KV head", pictures.get("kept")),
    ]
