"""The total order of all policies: score descending, then position ascending, then KV head ascending.

Pooling makes runs of equal scores, so ties are the normal case at the cut. A total order makes every
decision independent of the top-k algorithm, of the device and of how heads are spread over ranks, and
position before head makes a layer of equal scores fall back to equal head budgets.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST = torch.iinfo(torch.int64).max


def order_keys(scores: Tensor) -> Tensor:
    """fp32 scores [Hkv, m] -> distinct int64 keys [Hkv, m]; a larger key comes earlier in the total order.

    The upper half holds the score's bits, made monotonic; the lower half counts down in position-major
    order. -0.0 equals 0.0; NaN equals -inf, the lowest score. Row h is KV head h in the order, so ranks
    that compare heads must pass all of them.
    """
    heads, m = scores.shape
    scores = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits = (scores + 0.0).view(torch.int32)  # the sum turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    rank = torch.arange(m, device=scores.device) * heads + torch.arange(heads, device=scores.device)[:, None]
    return (ordered << 32) | (0xFFFFFFFF - rank)


def count_best(keys: Tensor, total: int, guaranteed: int = 0) -> Tensor:
    """How many of the `total` best entries of a layer belong to each KV head: int64 [Hkv].

    guaranteed: every head first owns that many of its own best entries; the remaining
    total - Hkv*guaranteed go to the best of the others.
    """
    if guaranteed:
        keys = keys.masked_fill(keys >= _cut(keys, guaranteed), _FIRST)
    return (keys >= _cut(keys.flatten(), total)).sum(1)


def best_positions(keys: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """For each KV head the positions of its counts[h] best entries, int64, ascending."""
    if len(set(counts)) == 1:
        cuts = _cut(keys, counts[0])
    else:
        cuts = torch.stack([_cut(row, count) for row, count in zip(keys, counts, strict=True)])
    # The size is known, so no device has to report it back.
    found = torch.nonzero_static(keys >= cuts, size=sum(counts))
    return list(torch.split(found[:, 1], list(counts)))


def _cut(keys: Tensor, count: int) -> Tensor:
    """The count-th largest key along the last dimension, [..., 1]: `keys >= cut` marks the count best."""
    if count == 0:
        return torch.full_like(keys[..., :1], _FIRST)
    return keys.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
