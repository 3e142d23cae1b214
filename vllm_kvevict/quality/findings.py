"""What the scores say: about the papers' claims, and about which policy to pick."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_kvevict.quality.cases import TEXT
from vllm_kvevict.quality.results import AT_ONCE, FULL, Column, Result
from vllm_kvevict.quality.scores import Mean, Scores

HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "undecided with this many samples"
TIGHT = 0.2
"""The largest share of the prompt that counts as a tight budget."""


CAN_DO = 0.8
"""What the full cache must get in a task on real text, else the task says nothing about eviction."""
NEARLY_NOTHING = 0.1
"""A mean score of the full cache below which no difference can be seen."""


def full_scores(results: Iterable[Result]) -> dict[str, float]:
    """The full cache's mean score by task; without the tasks for which it was not measured."""
    by_task: dict[str, list[float]] = {}
    for result in results:
        if result.policy == FULL:
            by_task.setdefault(result.task, []).append(result.score)
    return {task: sum(scores) / len(scores) for task, scores in by_task.items()}


def too_hard(full: Mapping[str, float]) -> dict[str, float]:
    """The tasks on real text that the model cannot do with the full cache, with their scores.

    Public suites are left out: their scores do not say how much of an answer is right.
    """
    return {task: score for task, score in full.items() if task.startswith(TEXT) and score < CAN_DO}


@dataclass(frozen=True)
class Claim:
    """One policy is said to score better than another at tight budgets."""

    source: str
    text: str
    better: str
    worse: str


CLAIMS = (
    Claim("Ada-KV", "budgets per head beat the same budget for all heads", "ada-snapkv", "snapkv"),
    Claim("Ada-KV", "budgets per head beat the same budget for all heads", "ada-pyramid", "pyramidkv"),
    Claim("PyramidKV", "fewer tokens in higher layers beat the same number in all", "pyramidkv", "snapkv"),
    Claim("LAVa", "layer budgets by entropy beat fixed ones", "lava", "lava-uniform"),
    Claim("CAKE", "layer budgets by dispersion beat fixed ones", "cake", "snapkv"),
)
BLIND = "policies that do not see the question score worse than those that do"


@dataclass(frozen=True)
class Finding:
    """What became of a claim.

    Attributes:
        source: who claims it.
        text: what is claimed.
        compared: names of the two sides.
        scope: None when the two sides are the scopes.
        budgets: that were compared.
        difference: better less worse, over all these budgets; None if the claim was not measured.
        by_budget: the same for each.
    """

    source: str
    text: str
    compared: str
    scope: str | None
    budgets: tuple[float, ...]
    difference: Mean | None
    by_budget: tuple[Mean | None, ...]

    @property
    def verdict(self) -> str:
        """From the paired interval."""
        return "not measured" if self.difference is None else verdict(self.difference)


def verdict(difference: Mean) -> str:
    """Whether a difference that is claimed to be positive is, as far as its interval tells."""
    if difference.low > 0:
        return HOLDS
    return FAILS if difference.high < 0 else UNKNOWN


def check_claims(scores: Scores) -> list[Finding]:
    """Every claim in every scope, then whether the question matters to each policy."""
    found = []
    for claim in CLAIMS:
        for scope in scores.scopes:
            budgets = [
                b for b in _shared(scores, claim, scope) if b != 1 and scores.share(b, scope) <= TIGHT + 1e-9
            ]
            better, worse = ([Column(p, b, scope) for b in budgets] for p in (claim.better, claim.worse))
            found.append(
                _finding(scores, claim.source, claim.text, claim.better, claim.worse, scope, better, worse)
            )
    if set(AT_ONCE) <= set(scores.scopes):
        for policy in scores.policies("prompt"):
            seeing, blind = (
                [Column(policy, b, scope) for b in _evicting(scores, policy)] for scope in AT_ONCE
            )
            found.append(
                _finding(scores, "SnapKV, Ada-KV", BLIND, f"{policy}, prompt", "prefix", None, seeing, blind)
            )
    return found


def _finding(
    scores: Scores,
    source: str,
    text: str,
    first: str,
    second: str,
    scope: str | None,
    better: Sequence[Column],
    worse: Sequence[Column],
) -> Finding:
    pairs = list(zip(better, worse, strict=True))
    return Finding(
        source=source,
        text=text,
        compared=f"{first} - {second}",
        scope=scope,
        budgets=tuple(one.budget for one in better if one.budget is not None),
        difference=scores.difference(better, worse) if pairs else None,
        by_budget=tuple(scores.difference(one, other) for one, other in pairs),
    )


def _shared(scores: Scores, claim: Claim, scope: str) -> list[float]:
    """Budgets at which both sides were measured."""
    there = set(scores.columns)
    return [
        budget
        for budget in scores.budgets(scope)
        if {Column(claim.better, budget, scope), Column(claim.worse, budget, scope)} <= there
    ]


def _evicting(scores: Scores, policy: str) -> list[float]:
    """Budgets that evict something, at which a policy was measured in both scopes."""
    there = set(scores.columns)
    return [
        budget
        for budget in scores.budgets()
        if all(
            Column(policy, budget, scope) in there and scores.share(budget, scope) < 1 for scope in AT_ONCE
        )
    ]


@dataclass(frozen=True)
class Pick:
    """The best policy in one place.

    Attributes:
        scope, budget: the place.
        best: with the highest mean.
        score: its mean.
        equals: cannot be told from the best.
        lossless: cannot be told from the full cache, or score above it; None if that was not measured.
    """

    scope: str
    budget: float
    best: str
    score: Mean
    equals: tuple[str, ...]
    lossless: tuple[str, ...] | None


def pick(scores: Scores) -> list[Pick]:
    """The best for each scope and budget that evicts something."""
    places = [
        (scope, b) for scope in scores.scopes for b in scores.budgets(scope) if scores.share(b, scope) < 1
    ]
    return [found for scope, budget in places if (found := _pick(scores, scope, budget))]


def _pick(scores: Scores, scope: str, budget: float) -> Pick | None:
    means = {
        policy: mean
        for policy in scores.policies(scope)
        if (mean := scores.mean(Column(policy, budget, scope)))
    }
    if not means:
        return None
    ranked = sorted(means, key=lambda policy: -means[policy].mean)
    best = ranked[0]
    return Pick(
        scope=scope,
        budget=budget,
        best=best,
        score=means[best],
        equals=tuple(
            policy
            for policy in ranked[1:]
            if not _above(scores, Column(best, budget, scope), Column(policy, budget, scope))
        ),
        lossless=None
        if scores.full is None
        else tuple(p for p in ranked if not _above(scores, scores.full, Column(p, budget, scope))),
    )


def _above(scores: Scores, one: Column, other: Column) -> bool:
    """Whether one column certainly scores higher."""
    difference = scores.difference(one, other)
    return difference is not None and difference.low > 0
