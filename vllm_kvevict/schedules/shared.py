"""At the end of the prompt, for layers that share one budget: by their weights, or by all their scores at once."""

from collections.abc import Sequence

from torch import Tensor

from vllm_kvevict.policies import EvictionConfig, most_candidates, provisional_budgets
from vllm_kvevict.schedules.base import RankCapacity, Schedule, ragged_pages
from vllm_kvevict.schedules.evictor import Evictor, LayerStep, QueryRows


class ByWeight(Schedule):
    """Each layer gets a share of the budget by a weight that its scores give it.

    One stage knows all weights after its last layer. Of several, each sends its layers' weights to the scheduler,
    which sends the budgets of all layers back with the next step. A prompt that one step reads may be trimmed as the
    layers go by: shares only shrink as further layers are known (LAVa Alg. 2).
    """

    def can_recycle(self, config: EvictionConfig, num_stages: int, is_asynchronous: bool) -> bool:
        # With a guarantee, rounded head budgets may grow by a token as a layer's budget shrinks.
        return num_stages == 1 and not is_asynchronous and not config.guarantees_heads

    def is_ragged(self, config: EvictionConfig) -> bool:
        return True

    def kept_pages(
        self, config: EvictionConfig, n: int, more: int, rank: RankCapacity, page_size: int, num_layers: int
    ) -> int:
        """As of :meth:`Schedule.kept_pages`. Layers that were not scored yet may be left with nothing.

        What competing heads win grows less than their layer's budget does, so the worst is to share evenly. Where
        only some of the rank's layers are asked for, each layer's share is rounded up.
        """
        if not num_layers:
            return 0
        heads, window = rank.num_kv_heads, config.window_for(n)
        m, b = n - window, config.budget_for(n) - window
        rounding = num_layers if num_layers < rank.num_layers else 0
        budget = min(m, -(-(rank.num_model_layers * b + rounding) // num_layers))
        if config.heads_compete:
            most = num_layers * most_candidates(config, budget, m, heads, rank.num_model_kv_heads)
            return ragged_pages(most, num_layers * heads, window + more, n + more, page_size)
        return heads * ragged_pages(num_layers * budget, num_layers, window + more, n + more, page_size)

    def decides_across_stages(self, num_stages: int) -> bool:
        return num_stages > 1

    def after_layer(self, evictor: Evictor, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        if not rows.evicts:
            return
        resident = rows.resident
        n = evictor.score(step, rows, window)
        last = evictor.is_last(step.layer)
        if last and evictor.has_all_layers:
            evictor.decide(resident)
        elif resident.admission.by_layer:
            evictor.trim(resident, provisional_budgets(resident.plan.config, resident.scores, n))
        elif last:
            evictor.send_weights(resident)


class ByScore(Schedule):
    """The scores of all layers compete at once, so one stage must hold them all."""

    def conflict_with_stages(self, config: EvictionConfig, stages: Sequence[int]) -> str | None:
        if len(stages) == 1:
            return None
        return (
            "cannot be combined with --pipeline-parallel-size: it compares the scores of all layers in one place, so "
            "choose another policy or leave that flag out"
        )

    def is_ragged(self, config: EvictionConfig) -> bool:
        return True

    def kept_pages(
        self, config: EvictionConfig, n: int, more: int, rank: RankCapacity, page_size: int, num_layers: int
    ) -> int:
        """As of :meth:`Schedule.kept_pages`: this rank's rows may win all there is to win."""
        rows, window = num_layers * rank.num_kv_heads, config.window_for(n)
        m, b = n - window, config.budget_for(n) - window
        shared = min(rank.num_model_layers * rank.num_model_kv_heads * b, rows * m)
        return ragged_pages(shared, rows, window + more, n + more, page_size)

    def after_layer(self, evictor: Evictor, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        if not rows.evicts:
            return
        evictor.score(step, rows, window)
        if evictor.is_last(step.layer):
            evictor.decide(rows.resident)
