"""Once the first tokens of the answer are stored: they stay, and their queries choose among the prompt's.

    tokens   0 ------------- n ------- p = n+N ----------------->
             |  the prompt   |  answer |
             |  competes     |  stays  after the step that stores token p-1: each layer is scored, chosen, compacted

Until then the request computes what it would without eviction. B is of n, so a row keeps B + N entries on average. The
schedule owns nothing.
"""

import torch

from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.base import Schedule
from vllm_kvevict.schedules.by_ring import EvictionByRing
from vllm_kvevict.schedules.inputs import LayerStep
from vllm_kvevict.schedules.plan import Phase

NAME = "lookahead"


class LookaheadEviction(EvictionByRing):
    """Of one prompt."""

    def after_step(self) -> None:
        """One layer after the other, so that no second copy of all keys is in memory."""
        self.note_held()
        with self.selection.meter.decides():
            windows, waits = self.windows(), self.evictor.is_asynchronous and self.phase.config.heads_compete
            for layer, (scale, softcap) in enumerate(self.evictor.logits):
                window = self._no_queries() if windows is None else windows[layer].transpose(0, 1)
                self.score(LayerStep(layer, window, scale, softcap), slice(None), window)
                if not waits or self.evictor.is_last(layer):
                    self.selection.decide()
        self.report(self.resident.tokens)

    def _no_queries(self) -> torch.Tensor:
        cache = self.evictor.cache
        return torch.empty(0, cache.num_kv_heads, cache.head_dim, device=cache.device)

    def exempt(self) -> list[list[int]]:
        cache = self.evictor.cache
        return [[self.phase.config.least_window] * cache.num_kv_heads] * cache.num_layers


class Lookahead(Schedule):
    """Of policies whose layers do not need each other."""

    eviction = LookaheadEviction


def lookahead_phase(config: EvictionConfig, n: int, ahead: int) -> Phase:
    """The phase of a prompt of n tokens that is evicted ``ahead`` tokens later."""
    later = config.for_lookahead(n, ahead)
    of_prompt = later.window_for(n + ahead) - ahead
    return Phase(later, NAME, (n + ahead,), most_cached=n - of_prompt, leaves_at=n, after_step=True)
