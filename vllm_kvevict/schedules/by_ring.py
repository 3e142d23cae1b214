"""Evictions that follow a step, by queries that were kept as they came (``schedules/ring.py``).

An eviction owns its part of the ring. What is chosen, and from what, is a subclass's.
"""

from typing import Any

from torch import Tensor

from vllm_kvevict.schedules.eviction import Eviction
from vllm_kvevict.schedules.ring import KeptQueries
from vllm_kvevict.schedules.step_rows import ExtraRows, QueryRows


class EvictionByRing(Eviction):
    """Of one request, in a phase whose evictions follow the step."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._ring_part: int | None = None

    def rows(self, rows: slice, extra: ExtraRows | None) -> QueryRows | None:
        """Nothing follows a layer."""
        return None

    def kept_queries(self, rows: slice) -> KeptQueries | None:
        """Those of a step's tokens, of a request as it was before the step, that the next eviction chooses by."""
        if not self.phase.keeps_queries:
            return None
        before, after = self.resident.tokens, self.resident.tokens + rows.stop - rows.start
        first = max(before, self.phase.next_complete(before) - self.phase.window)
        if first >= after:
            return None
        ring = self.evictor.ring
        assert ring is not None
        if self._ring_part is None:
            self._ring_part = ring.acquire()
        slots = [ring.slot(self._ring_part, token) for token in range(first, after)]
        return KeptQueries(range(rows.stop - len(slots), rows.stop), slots)

    def end(self) -> None:
        if self._ring_part is not None:
            assert self.evictor.ring is not None
            self.evictor.ring.release(self._ring_part)
            self._ring_part = None

    @property
    def is_due(self) -> bool:
        return self.resident.tokens in self.phase.evictions

    def windows(self) -> Tensor | None:
        """Queries of the window in all layers, [layers, Hq, w, d], where the policy reads them."""
        if self._ring_part is None:
            return None
        assert self.evictor.ring is not None
        return self.evictor.ring.read(self._ring_part, self.resident.tokens, self.phase.window)
