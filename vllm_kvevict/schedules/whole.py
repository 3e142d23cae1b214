"""At the end of the prompt, each layer on its own."""

from torch import Tensor

from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.base import Schedule
from vllm_kvevict.schedules.evictor import Evictor, LayerStep, QueryRows


class Whole(Schedule):
    """A layer is compacted in its own forward, so a prompt that one step reads can recycle pages.

    Not where heads compete on a device that runs behind the host: to learn what each head keeps is a wait, which
    then happens once for all layers, after the last one.
    """

    def can_recycle(self, config: EvictionConfig, num_stages: int, is_asynchronous: bool) -> bool:
        return not (is_asynchronous and config.heads_compete)

    def after_layer(self, evictor: Evictor, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        if not rows.evicts:
            return
        evictor.score(step, rows, window)
        early = self.can_recycle(rows.resident.plan.config, 1, evictor.is_asynchronous)
        if early or evictor.is_last(step.layer):
            evictor.decide(rows.resident)
