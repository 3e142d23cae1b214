"""The report's text; every figure in it is computed."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm_kvevict.quality import chats
from vllm_kvevict.quality.cases import TEXT
from vllm_kvevict.quality.findings import CAN_DO, NEARLY_NOTHING, Pick, QualityReport, pick, too_hard
from vllm_kvevict.quality.measures import decoding_section, fidelity_section
from vllm_kvevict.quality.plots import SCOPE_TITLES
from vllm_kvevict.quality.results import TURNS, Column, Result
from vllm_kvevict.quality.scores import NONE, RESAMPLES, Group, Scores, of_length, of_task, signed
from vllm_kvevict.quality.tables import budget_name, picture, table
from vllm_kvevict.quality.tasks import TASKS

INTERVALS = (
    "Scores lie between 0 and 1: the share of expected strings in a reply, averaged over the tasks. Brackets hold 95 % "
    "bootstrap intervals ({resampled}). Differences and shares compare the same samples. The intervals are not "
    "corrected for the number of comparisons."
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
OF_TURNS, ONE_PART = f"{TEXT}turns-", "prefix"
CONTROL = "streaming-llm"
"""It keeps the first and the last tokens, so it must fail where the answer lies between them."""


def text(report: QualityReport, pictures: Mapping[str, str]) -> str:
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


def answers_sections(report: QualityReport, pictures: Mapping[str, str]) -> list[list[str]]:
    """What is said about scores."""
    scores, budget = report.scores, report.budget
    unit = "tokens" if all(task.startswith(TEXT) for task in scores.tasks) else "words"
    by_task = {task: of_task(task) for task in scores.tasks}
    by_length = {f"{length:,} {unit}": of_length(length) for length in scores.lengths}
    return [
        [*blind_lines(report.full), *measured(report)],
        hard_section(report.full),
        pick_section(pick(scores)),
        fixed_section(scores),
        *(scope_section(scores, scope) for scope in scores.scopes),
        turns_section(scores),
        picture("Score over budget", pictures.get("scores")),
        grouped_section("By task", by_task, scores, budget),
        grouped_section("By length", by_length, scores, budget) if len(by_length) > 1 else [],
        needle_section(report, pictures),
    ]


def measured(report: QualityReport) -> list[str]:
    """What was asked, and of which model."""
    results, settings = report.results, report.settings
    prompts = [result.prompt_tokens for result in results if result.prompt_tokens]
    samples, tasks = len({result.sample for result in results}), {result.task for result in results}
    instructed = "with" if settings.instruct else "without"
    lines = [
        "## What was measured",
        "",
        f"- {len(results):,} answers to {samples:,} samples of {len(tasks)} tasks"
        + (f"; prompts of {min(prompts):,} to {max(prompts):,} tokens" if prompts else ""),
        f"- model `{settings.model}`; seed {settings.seed}; texts {instructed} an instruction; temperature 0",
    ]
    if settings.questions > 1:
        lines.append(f"- {settings.questions} questions about each text, each in its own request")
    missing = [task for task in TASKS if task not in tasks]
    if 0 < len(missing) < len(TASKS):
        lines.append(f"- not asked: {', '.join(missing)}")
    if whole := sum(result.whole for result in results):
        lines.append(f"- **{whole:,} prompts or prefixes were too short to be evicted and were kept whole**")
    if cut := sum(result.finish_reason == "length" for result in results):
        lines.append(f"- replies cut at the length limit: {cut:,}")
    if empty := sum(not result.reply.strip() for result in results):
        lines.append(f"- empty replies: {empty:,}")
    real = any(task.startswith(TEXT) for task in tasks)
    if real and not any(r.policy.startswith(CONTROL) for r in results if r.task.startswith(TEXT)):
        lines.append(f"- {CONTROL} was not measured: it is the control, which must miss what the text hides")
    intervals = INTERVALS.format(resampled=WITHIN_TASKS if settings.questions == 1 else OF_TEXTS)
    lines += ["", SYNTHETIC] if tasks & TASKS.keys() else []
    return [*lines, *(["", REAL] if real else []), "", intervals]


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
    about = (
        f"A task on real text counts if the full cache scores at least {CAN_DO}. These are in no other table:"
    )
    return ["## Tasks that do not count", "", about, "", *table(["task", "full cache", ""], rows)]


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

    def difference(column: Column) -> str:
        return signed(scores.difference(column, scores.full)) if scores.full else NONE

    rows = [[column, scores.mean(column), difference(column)] for column in scores.fixed]
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


def grouped_section(
    title: str, groups: Mapping[str, Group], scores: Scores, budget: float | None
) -> list[str]:
    """Policies at one budget by groups of samples; those without a budget come first."""
    columns = {str(column): column for column in scores.fixed}
    for scope in scores.scopes:
        evicting = [Column(policy, budget, scope) for policy in scores.policies(scope)]
        columns |= {f"{one.policy} ({scope})": one for one in evicting if one in scores.columns}
    rows = [
        [name, *(scores.mean(column, group) or NONE for group in groups.values())]
        for name, column in columns.items()
    ]
    return [f"## {title}{at_text(budget)}", "", *table(["policy (scope)", *groups], rows)]


def at_text(budget: float | None) -> str:
    return "" if budget is None else f" at budget {budget_name(budget)}"


def needle_section(report: QualityReport, pictures: Mapping[str, str]) -> list[str]:
    """The heat maps."""
    if report.needles is None:
        return []
    at = at_text(report.needles.nearest(report.budget))
    about = f"Tasks: {', '.join(report.needles.tasks)}{at}. Depth 0 is the beginning of the text."
    lines = ["## Needles by depth and length", "", about]
    for name, path in pictures.items():
        if name.startswith("needle"):
            lines += ["", *picture(f"Score by depth and length, scope {name.split()[-1]}", path)]
    return lines


def pick_section(picks: list[Pick]) -> list[str]:
    """The best policies, and which cannot be told from them."""
    if not picks:
        return []
    rows = []
    for found in picks:
        lossless = NONE if found.lossless is None else ", ".join(found.lossless) or "none"
        best = f"**{found.best}**", found.score, ", ".join(found.equals) or "none"
        rows.append([f"{found.scope}, {budget_name(found.budget)}", *best, lossless])
    header = ["scope, budget", "best", "score", "not clearly worse", "not clearly below the full cache"]
    counts = Counter(name for found in picks for name in (found.best, *found.equals))
    often = [f"{name} ({count} of {len(picks)})" for name, count in counts.most_common(5)]
    most = f"Most often the best or not clearly worse: {', '.join(often)}."
    return ["## Which policy to pick", "", *table(header, rows, left=5), "", most]


def turns_section(scores: Scores[Result]) -> list[str]:
    """Both tables; nothing where no chat was compressed turn by turn, or none of them tells a fact in a turn."""
    columns = [column for column in scores.columns if column.scope == TURNS]
    tables = [*_by_turn(scores, columns), *_beside_one_part(scores, columns)] if columns else []
    return ["## Turn by turn", "", *tables] if tables else []


def _by_turn(scores: Scores[Result], columns: Sequence[Column]) -> list[str]:
    """Scores by the turn that tells and the turn that asks."""
    told = _split(scores, chats.told_in, range(1, 1 + chats.TOLD))
    asked = _split(scores, chats.asked_in, range(1 + chats.TOLD, 1 + chats.TURNS))
    if not told:
        return []
    shown = [*scores.fixed, *columns]
    rows = [[str(c), *(one.mean(c) or NONE for one in (*told.values(), *asked.values()))] for c in shown]
    heads = [*(f"told in {turn}" for turn in told), *(f"asked in {turn}" for turn in asked)]
    return [
        "By the turn in which a fact is told, and that in which it is asked for:",
        "",
        *table(["", *heads], rows),
        "",
    ]


def _split(
    scores: Scores[Result], turn_in: Callable[[str, int], int], turns: Sequence[int]
) -> dict[int, Scores[Result]]:
    """Results by a turn of their chat."""
    results = [result for result in scores.results if result.task.startswith(OF_TURNS)]

    def of(turn: int) -> list[Result]:
        return [r for r in results if turn_in(r.task.removeprefix(OF_TURNS), r.index) == turn]

    return {turn: Scores(found) for turn in turns if (found := of(turn))}


def _beside_one_part(scores: Scores[Result], columns: Sequence[Column]) -> list[str]:
    """The same policies and budgets where all that comes before the question is compressed as one part."""
    pairs = [(column, Column(column.policy, column.budget, ONE_PART)) for column in columns]
    both = [(one, other) for one, other in pairs if other in scores.columns]
    rows = [[str(one), signed(scores.difference(one, other))] for one, other in both]
    if not rows:
        return []
    about = "How much higher than with one part: all that comes before the question, compressed at once (scope prefix):"
    return [about, "", *table(["", "difference on the same samples"], rows), ""]
