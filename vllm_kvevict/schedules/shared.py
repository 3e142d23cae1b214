"""At the end of the prompt, for layers that share one budget: by their weights, or by all their scores at once.

Over pipeline stages neither can be decided by a rank alone. Each says what its layers claim, and the scheduler answers:

    by weight    ranks: a weight for each layer    scheduler: budgets of all layers
    by score     ranks: counts of scores           scheduler: which part to count next, at last the score to be reached

The request waits meanwhile; claims go up and answers down with the steps that serve the others.

An arbiter owns what it was told of one eviction, and is asked no more once it has decided.
"""

from collections.abc import Sequence

from torch import Tensor

from vllm_kvevict.policies import (
    EvictionConfig,
    layer_budgets,
    most_candidates,
    provisional_budgets,
    whole_model,
)
from vllm_kvevict.policies.cuts import CutQuery, CutSearch, Tally
from vllm_kvevict.schedules.base import Arbiter, RankCapacity, Schedule, ragged_pages
from vllm_kvevict.schedules.eviction import Eviction
from vllm_kvevict.schedules.inputs import LayerStep
from vllm_kvevict.schedules.lookahead import LookaheadEviction
from vllm_kvevict.schedules.plan import Phase
from vllm_kvevict.schedules.reports import Answered, Claimed, LayerWeights
from vllm_kvevict.schedules.step_rows import QueryRows


class BudgetArbiter(Arbiter):
    """Shares the budget out by the weights of all layers (LAVa Alg. 2, CAKE)."""

    def __init__(self, config: EvictionConfig, n: int):
        self.config, self.n = config, n

    def on_claims(self, claims: Sequence[Claimed]) -> Sequence[int]:
        # Ranks of a stage say the same of its layers.
        stages = {claim.first_layer: claim for claim in claims if isinstance(claim, LayerWeights)}
        weights = [weight for _, stage in sorted(stages.items()) for weight in stage.weights]
        self.is_done = True
        return layer_budgets(self.config, weights, self.n)


class CutArbiter(Arbiter):
    """Finds the lowest score of the whole model that stays, in at most four rounds."""

    def __init__(self, wanted: int):
        self.search = CutSearch(wanted)

    def on_claims(self, claims: Sequence[Claimed]) -> CutQuery | int:
        if self.search.cut is None:
            self.search.on_tallies([claim for claim in claims if isinstance(claim, Tally)])
        self.is_done = self.search.cut is not None
        return self.search.question if self.search.cut is None else self.search.cut


class EvictionByWeight(Eviction):
    """Of one prompt, whose layers share the budget by weights.

    One stage knows all weights after its last layer. A prompt that one step reads may be trimmed as the layers go by:
    shares only shrink as further layers are known (LAVa Alg. 2).
    """

    def after_layer(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        if not rows.evicts:
            return
        self.score(step, rows.rows, window)
        last = self.evictor.is_last(step.layer)
        if last and self.evictor.has_all_layers:
            self.selection.decide()
        elif self.resident.admission.by_layer:
            self.selection.trim(provisional_budgets(self.phase.config, self.selection.scores, self.phase.n))
        elif last:
            self.selection.send_weights()

    def on_answer(self, answer: Answered) -> None:
        assert isinstance(answer, Sequence)
        self.selection.decide_by_budgets(answer)


class WeightAfterLookahead(LookaheadEviction, EvictionByWeight):
    """Of one prompt whose answer has begun."""


class ByWeight(Schedule):
    """Each layer gets a share of the budget by a weight that its scores give it."""

    eviction, after_lookahead = EvictionByWeight, WeightAfterLookahead

    def can_recycle(self, config: EvictionConfig, num_stages: int, is_asynchronous: bool) -> bool:
        # With a guarantee, rounded head budgets may grow by a token as a layer's budget shrinks.
        return num_stages == 1 and not is_asynchronous and not config.guarantees_heads

    def is_ragged(self, config: EvictionConfig) -> bool:
        return True

    def kept_pages(
        self, phase: Phase, more: int, rank: RankCapacity, page_size: int, num_layers: int, shared: int = 0
    ) -> int:
        """As of :meth:`Schedule.kept_pages`. Layers that were not scored yet may be left with nothing.

        What competing heads win grows less than their layer's budget does, so the worst is to share evenly. Where
        only some of the rank's layers are asked for, each layer's share is rounded up.
        """
        if not num_layers:
            return 0
        config, n, heads = phase.config, phase.n, rank.num_kv_heads
        window = config.window_for(n)
        m, b = n - window, config.budget_for(n) - window
        rounding = num_layers if num_layers < rank.num_layers else 0
        budget = min(m, -(-(rank.num_model_layers * b + rounding) // num_layers))
        if config.heads_compete:
            most = num_layers * (most_candidates(config, budget, m, heads, rank.num_model_kv_heads) + shared)
            return ragged_pages(
                most, num_layers * heads, window + more, n + more + num_layers * shared, page_size
            )
        if shared:
            most = num_layers * (heads * budget + shared)
            return ragged_pages(
                most, num_layers * heads, window + more, n + more + num_layers * shared, page_size
            )
        return heads * ragged_pages(num_layers * budget, num_layers, window + more, n + more, page_size)

    def kept_entries(self, phase: Phase, rank: RankCapacity) -> tuple[int, int]:
        """As of :meth:`Schedule.kept_entries`: the worst is that this rank's layers win all, and share it evenly."""
        config, n, heads = phase.config, phase.n, rank.num_kv_heads
        window = config.window_for(n)
        budget = min(
            n - window, -(-rank.num_model_layers * (config.budget_for(n) - window) // rank.num_layers)
        )
        if config.heads_compete:
            return window, most_candidates(config, budget, n - window, heads, rank.num_model_kv_heads)
        return window, heads * budget

    def decides_across_stages(self, num_stages: int) -> bool:
        return num_stages > 1

    def arbiter(self, phase: Phase, rank: RankCapacity) -> Arbiter:
        return BudgetArbiter(phase.config, phase.n)


class EvictionByScore(Eviction):
    """Of one prompt, whose layers' candidates compete."""

    def after_layer(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        if not rows.evicts:
            return
        self.score(step, rows.rows, window)
        if self.evictor.is_last(step.layer):
            self.decide_together()

    def decide_together(self) -> None:
        """Decide for all layers of the model, with the other stages if there are any."""
        if self.evictor.has_all_layers:
            self.selection.decide()
        else:
            self.selection.send_tally(CutQuery())

    def on_answer(self, answer: Answered) -> None:
        if isinstance(answer, CutQuery):
            self.selection.send_tally(answer)
        else:
            assert isinstance(answer, int)
            self.selection.decide_by_cut(answer)


class ScoreAfterLookahead(LookaheadEviction, EvictionByScore):
    """Of one prompt whose answer has begun."""


class ByScore(Schedule):
    """The candidates of all layers compete at once."""

    eviction: type[Eviction] = EvictionByScore
    after_lookahead: type[Eviction] = ScoreAfterLookahead

    def is_ragged(self, config: EvictionConfig) -> bool:
        return True

    def kept_pages(
        self, phase: Phase, more: int, rank: RankCapacity, page_size: int, num_layers: int, shared: int = 0
    ) -> int:
        """As of :meth:`Schedule.kept_pages`: this rank's rows may win all there is to win."""
        config, n, rows = phase.config, phase.n, num_layers * rank.num_kv_heads
        window = config.window_for(n)
        m, b = n - window, config.budget_for(n) - window
        won = min(rank.num_model_layers * rank.num_model_kv_heads * b, rows * m) + num_layers * shared
        return ragged_pages(won, rows, window + more, n + more + num_layers * shared, page_size)

    def kept_entries(self, phase: Phase, rank: RankCapacity) -> tuple[int, int]:
        """As of :meth:`Schedule.kept_entries`: this rank's rows may win all there is to win."""
        config, n = phase.config, phase.n
        window = config.window_for(n)
        best = rank.num_model_layers * rank.num_model_kv_heads * (config.budget_for(n) - window)
        return window, -(-min(best, rank.rows * (n - window)) // rank.num_layers)

    def decides_across_stages(self, num_stages: int) -> bool:
        return num_stages > 1

    def arbiter(self, phase: Phase, rank: RankCapacity) -> Arbiter:
        wanted = whole_model.wanted(phase.config, phase.n, rank.num_model_layers, rank.num_model_kv_heads)
        return CutArbiter(wanted)
