"""At the end of the prompt, each layer on its own. Owns nothing."""

from torch import Tensor

from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.base import Schedule
from vllm_kvevict.schedules.eviction import Eviction
from vllm_kvevict.schedules.inputs import LayerStep
from vllm_kvevict.schedules.lookahead import LookaheadEviction
from vllm_kvevict.schedules.step_rows import QueryRows


def _decides_in_each_layer(config: EvictionConfig, is_asynchronous: bool) -> bool:
    """Not where heads compete on a device that runs behind the host: to learn what each head keeps is a wait, which
    then happens once for all layers, after the last one."""
    return not (is_asynchronous and config.heads_compete)


class WholeEviction(Eviction):
    """Of one prompt."""

    def after_layer(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        if not rows.evicts:
            return
        self.score(step, rows.rows, window)
        early = _decides_in_each_layer(self.phase.config, self.evictor.is_asynchronous)
        if early or self.evictor.is_last(step.layer):
            self.selection.decide()


class WholeAfterLookahead(LookaheadEviction):
    """Of one prompt whose answer has begun."""

    def after_layer(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        self.score(step, rows.rows, window)
        # Where the host is ahead of the device, all layers are decided and moved at once.
        if not self.evictor.is_asynchronous or self.evictor.is_last(step.layer):
            self.selection.decide()


class Whole(Schedule):
    """A layer is compacted in its own forward, so a prompt that one step reads can recycle pages."""

    eviction, after_lookahead = WholeEviction, WholeAfterLookahead

    def can_recycle(self, config: EvictionConfig, num_stages: int, is_asynchronous: bool) -> bool:
        return _decides_in_each_layer(config, is_asynchronous)
