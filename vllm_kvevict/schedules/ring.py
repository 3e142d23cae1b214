"""The last queries before an eviction that follows a step: they choose then, and are kept as steps come by.

    tokens   ... | p-w ... p-1 | p          slot of a token in its request's part: token modulo size
                   |  queries  |
                   +-- kept ---+--> read at position p, oldest first

Owns memory that is taken at start-up, and which request has which part of it. The scheduler admits no more requests
than there are parts, so that one is always free; a request has one from the first query that counts until its phase
ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_kvevict.cache.steps import to_device


class KeptQueries(NamedTuple):
    """Of one request in a step: rows of the batch whose queries are kept, and where."""

    rows: range
    slots: Sequence[int]


@dataclass(frozen=True)
class RingStep:
    """Of all requests in a step.

    Attributes:
        rows: int64 [N], rows of the batch; None where these are its first ones, in order.
        slots: int64 [N], where in a layer of the ring their queries go.
    """

    rows: Tensor | None
    slots: Tensor


class QueryRing:
    """One per rank.

    Args:
        memory: [layers, parts + 1, size, Hq, d]; what is kept of nobody goes to the last part.
        max_requests: of a batch.
    """

    def __init__(self, memory: Tensor, max_requests: int):
        self.memory = memory
        self.slots_of_graphs = torch.zeros(max_requests, dtype=torch.int64, device=memory.device)
        """Where steps that are replayed from a CUDA graph find their slots."""
        self.size = memory.shape[2]
        self._free = list(range(memory.shape[1] - 2, -1, -1))

    @property
    def num_parts(self) -> int:
        """Requests that it has room for."""
        return self.memory.shape[1] - 1

    @property
    def nowhere(self) -> int:
        """Where queries go that nobody needs."""
        return self.num_parts * self.size

    def acquire(self) -> int:
        """Give a request a part. Raises RuntimeError if all are in use."""
        if not self._free:
            raise RuntimeError(f"all {self.num_parts} parts of the ring of queries are in use")
        return self._free.pop()

    def release(self, part: int) -> None:
        """A request ends."""
        self._free.append(part)

    def slot(self, part: int, token: int) -> int:
        """Where in a layer the query of a request's token belongs."""
        return part * self.size + token % self.size

    def step(self, kept: Sequence[KeptQueries]) -> RingStep:
        """What a step keeps, where its layers find it."""
        rows = [row for of_request in kept for row in of_request.rows]
        slots = [slot for of_request in kept for slot in of_request.slots]
        device = self.memory.device
        return RingStep(_indices(rows, device), _indices(slots, device))

    def replayable_step(self, kept: Sequence[KeptQueries], num_requests: int) -> RingStep:
        """The same for a step of so many requests with one token each, at the place where a CUDA graph looks it up."""
        slots = torch.full((num_requests,), self.nowhere, dtype=torch.int64)
        for of_request in kept:
            slots[of_request.rows.start] = of_request.slots[0]
        self.slots_of_graphs[:num_requests].copy_(slots, non_blocking=True)
        return RingStep(None, self.slots_of_graphs[:num_requests])

    def write(self, layer: int, query: Tensor, step: RingStep) -> None:
        """Keep queries of a layer.

        Args:
            query: [tokens, Hq, d] of the step, after RoPE.
        """
        rows = query[: len(step.slots)] if step.rows is None else query.index_select(0, step.rows)
        self.memory[layer].flatten(0, 1).index_copy_(0, step.slots, rows)

    def read(self, part: int, stop: int, count: int) -> Tensor:
        """Queries of the last ``count`` tokens before token ``stop``, [layers, Hq, count, d], oldest first."""
        slots = _indices([token % self.size for token in range(stop - count, stop)], self.memory.device)
        return self.memory[:, part].index_select(1, slots).transpose(1, 2)


def _indices(numbers: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(numbers, dtype=torch.int64).numpy(), device)
