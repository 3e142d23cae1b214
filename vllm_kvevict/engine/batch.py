"""One step's batch as the paged attention op sees it: one sequence per (request, KV head)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvevict.cache import PagedKVCache, Step


@dataclass(frozen=True)
class Rows:
    """Requests that one attention call serves: tables of similar width.

    Attributes:
        requests: indices into the batch, or None for all of it.
        slots: [R] cache slots.
        width: columns of the block table.
        query_start_loc: [R * Hkv + 1] int32, in rows of one KV head's query group.
        gather: [rows] int64, for each row (request, head, token) its place (token, head) in the batch; None when
            they coincide (one token per request, all requests).
    """

    requests: Tensor | None
    slots: Tensor
    width: int
    query_start_loc: Tensor
    gather: Tensor | None


class Batch:
    """Index tensors of a step, made once and used by every layer.

    Args:
        cache: the rank's cache, already extended by the step.
        step: what :meth:`PagedKVCache.extend` returned.
        lengths: query tokens of each request.
        group_size: query heads per KV head.
    """

    def __init__(self, cache: PagedKVCache, step: Step, lengths: Sequence[int], group_size: int):
        self.cache = cache
        self.step = step
        self.num_tokens = sum(lengths)
        self.group_size = group_size
        heads, page_size = cache.num_kv_heads, cache.page_size
        widths = [-(-length // page_size) for length in step.max_lens]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self.calls = [
            self._rows(requests, len(lengths), starts, lengths, max(widths[i] for i in requests), heads)
            for requests in split_by_width(widths)
        ]

    def _rows(
        self,
        requests: Sequence[int],
        batch_size: int,
        starts: Sequence[int],
        lengths: Sequence[int],
        width: int,
        heads: int,
    ) -> Rows:
        device = self.step.slots.device
        everyone = len(requests) == batch_size
        mine = [lengths[i] for i in requests]
        index = None if everyone else torch.tensor(requests, device=device)
        slots = self.step.slots if index is None else self.step.slots[index]
        per_row = torch.tensor(mine, dtype=torch.int32, device=device).repeat_interleave(heads)
        query_start_loc = torch.zeros(len(mine) * heads + 1, dtype=torch.int32, device=device)
        torch.cumsum(per_row, 0, out=query_start_loc[1:])
        if everyone and max(mine) == 1:
            return Rows(index, slots, width, query_start_loc, None)
        head = torch.arange(heads, device=device)[:, None]
        single = [i for i in requests if lengths[i] == 1]
        parts: list[Tensor]
        if len(single) == len(requests):
            parts = [
                (torch.tensor([starts[i] for i in single], device=device)[:, None] * heads + head.T).flatten()
            ]
        else:
            parts = [
                (torch.arange(starts[i], starts[i + 1], device=device)[None] * heads + head).flatten()
                for i in requests
            ]
        return Rows(index, slots, width, query_start_loc, torch.cat(parts))


def split_by_width(widths: Sequence[int]) -> list[list[int]]:
    """Split a batch into at most two calls, so that narrow tables are not padded to the widest.

    Args:
        widths: pages of each request's longest row.

    Returns:
        Indices of the requests of each call, ascending; one call where a second would not halve the padding.
    """
    order = sorted(range(len(widths)), key=lambda i: -widths[i])
    whole = widths[order[0]] * len(widths)
    best, cut = whole, 0
    for wide in range(1, len(widths)):
        cells = widths[order[0]] * wide + widths[order[wide]] * (len(widths) - wide)
        if cells < best:
            best, cut = cells, wide
    if 2 * best > whole:
        return [list(range(len(widths)))]
    return [sorted(order[:cut]), sorted(order[cut:])]
