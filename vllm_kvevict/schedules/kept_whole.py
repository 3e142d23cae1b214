"""Of a prompt that is evicted part by part, a first part that stays whole.

It is a part like others: a step ends with it, ranks report what they hold, and it is cached with an entry of its own,
which has all of its tokens. So later parts are evicted beside it as beside what was kept of any other part. Nothing is
scored, repeated or moved. Owns nothing.
"""

import torch
from torch import Tensor

from vllm_kvevict.schedules.base import Schedule
from vllm_kvevict.schedules.eviction import Eviction
from vllm_kvevict.schedules.inputs import LayerStep
from vllm_kvevict.schedules.step_rows import QueryRows


class KeptWholeEviction(Eviction):
    """Of one part, of which nothing goes."""

    def after_layer(self, step: LayerStep, rows: QueryRows, window: Tensor | None) -> None:
        """Who watches sees that all of the part stays."""
        observer = self.evictor.observer
        if rows.evicts and observer is not None:
            kept = [torch.arange(self.phase.n)] * self.evictor.cache.num_kv_heads
            observer.on_compaction(self.resident.admission, self.resident.tokens, step.layer, kept, None)


class KeptWhole(Schedule):
    """What is asked of the phase's configuration has the answers of one that keeps everything."""

    eviction = KeptWholeEviction
