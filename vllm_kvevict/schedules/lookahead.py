"""Once the first tokens of the answer are stored: they stay, and their queries choose among the prompt's.

    tokens   0 ------------- n ------- p = n+N ----------------->
             |  the prompt   |  answer |
             |  competes     |  stays  after the step that stores token p-1: each layer is scored, chosen, compacted

Until then the request computes what it would without eviction. B is of n, so a row keeps B + N entries on average. What
is held, chosen and decided over pipeline stages is as without a lookahead, once there are n + N tokens. The schedules
own nothing.
"""

import torch

from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.base import Schedule
from vllm_kvevict.schedules.by_ring import EvictionByRing
from vllm_kvevict.schedules.inputs import LayerStep
from vllm_kvevict.schedules.plan import Phase
from vllm_kvevict.schedules.repeat import ByRepeat, EvictionByRepeat
from vllm_kvevict.schedules.shared import ByScore, ByWeight, EvictionByScore, EvictionByWeight
from vllm_kvevict.schedules.step_rows import QueryRows
from vllm_kvevict.schedules.whole import WholeEviction


class LookaheadEviction(EvictionByRing):
    """Of one prompt; a subclass also says what follows a layer, as in a step that ends with the prompt."""

    def after_step(self) -> None:
        """One layer after the other, so that no second copy of all keys is in memory."""
        self.note_held()
        self._position = self.resident.tokens
        with self.selection.meter.decides():
            windows, rows = self.windows(), QueryRows(slice(None), slice(0, 0), 0, True, None)
            for layer, (scale, softcap) in enumerate(self.evictor.logits):
                window = self._no_queries() if windows is None else windows[layer].transpose(0, 1)
                self.after_layer(LayerStep(layer, window, scale, softcap), rows, window)
        if not self.selection.scores:
            self.report(self._position)

    def _no_queries(self) -> torch.Tensor:
        cache = self.evictor.cache
        return torch.empty(0, cache.num_kv_heads, cache.head_dim, device=cache.device)

    def _exempt(self) -> list[list[int]]:
        cache = self.evictor.cache
        return [[self.phase.config.least_window] * cache.num_kv_heads] * cache.num_layers


class ApartEviction(LookaheadEviction, WholeEviction):
    """Of layers that do not need each other."""


class WeightedEviction(LookaheadEviction, EvictionByWeight):
    """Of layers that share one budget by weights."""


class ScoredEviction(LookaheadEviction, EvictionByScore):
    """Of layers whose candidates compete."""


class RepeatedEviction(LookaheadEviction, EvictionByRepeat):
    """Of layers whose candidates compete by repeats of the prompt: as soon as it is read, and long before they do."""

    def after_layer(self, step: LayerStep, rows: QueryRows, window: torch.Tensor | None) -> None:
        if rows.extra is None:
            EvictionByScore.after_layer(self, step, rows, window)
        else:
            self.note_repeat(step, rows.extra)


class Apart(Schedule):
    """Layers do not need each other."""

    eviction = ApartEviction


class Weighted(ByWeight):
    """Layers share one budget by weights."""

    eviction = WeightedEviction

    def can_recycle(self, config: EvictionConfig, num_stages: int, is_asynchronous: bool) -> bool:
        return False


class Scored(ByScore):
    """The candidates of all layers compete."""

    eviction = ScoredEviction


class Repeated(ByRepeat):
    """The candidates of all layers compete by repeats of the prompt."""

    eviction = RepeatedEviction


def lookahead_phase(config: EvictionConfig, name: str, n: int, ahead: int, is_repeated: bool) -> Phase:
    """The phase of a prompt of n tokens that is evicted ``ahead`` tokens later.

    Args:
        name: of the schedule.
        is_repeated: whether the prompt is repeated once it is read.
    """
    later = config.for_lookahead(n, ahead)
    of_prompt = later.window_for(n + ahead) - ahead
    positions = (n, n + ahead) if is_repeated else (n + ahead,)
    return Phase(later, name, positions, most_cached=n - of_prompt, leaves_at=n, after_step=True)
