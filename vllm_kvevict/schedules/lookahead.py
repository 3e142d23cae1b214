"""Once the first tokens of the answer are stored: they stay, and their queries choose among the prompt's.

    tokens   0 ------------- n ------- p = n+N ----------------->
             |  the prompt   |  answer |
             |  competes     |  stays  after the step that stores token p-1: each layer is scored, chosen, compacted

Until then the request computes what it would without eviction. B is of n, so a row keeps B + N entries on average. What
is held, chosen and decided over pipeline stages is as without a lookahead, once there are n + N tokens.

Owns nothing: an eviction's part of the ring is its base class's.
"""

import torch

from vllm_kvevict.policies import EvictionConfig
from vllm_kvevict.schedules.by_ring import EvictionByRing
from vllm_kvevict.schedules.inputs import LayerStep
from vllm_kvevict.schedules.plan import Phase
from vllm_kvevict.schedules.step_rows import QueryRows


class LookaheadEviction(EvictionByRing):
    """Of one prompt. Each schedule has a subclass, which says what follows a layer; where layers compete, it goes on as
    the schedule's eviction of a prompt that was just read."""

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


def lookahead_phase(config: EvictionConfig, schedule: str, n: int, ahead: int, is_repeated: bool) -> Phase:
    """The phase of a prompt of n tokens that is evicted ``ahead`` tokens later.

    Args:
        is_repeated: whether the prompt is repeated once it is read.
    """
    later = config.for_lookahead(n, ahead)
    of_prompt = later.window_for(n + ahead) - ahead
    positions = (n, n + ahead) if is_repeated else (n + ahead,)
    # What is repeated is so in a step that ends with the prompt.
    computed = max(of_prompt, is_repeated)
    return Phase(later, schedule, positions, most_cached=n - computed, leaves_at=n, after_step=True)
