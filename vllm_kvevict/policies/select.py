"""The total order of all policies: score descending, then position ascending, then KV head ascending.

Pooling makes runs of equal scores, so ties are the normal case at the cut. A total order makes every
decision independent of the top-k algorithm, of the device and of how heads are spread over ranks, and
position before head makes a layer of equal scores fall back to equal head budgets.
"""

from collections.abc import Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from vllm_kvevict.kernels.masks import true_places

from .layer import Comm

_FIRST = torch.iinfo(torch.int64).max


def on_gpu(tensor: Tensor) -> bool:
    """Whether the Triton kernels serve this tensor. They are imported only then: a CPU may come without Triton."""
    return tensor.is_cuda


def order_keys(scores: Tensor, first: int = 0, total: int | None = None) -> Tensor:
    """fp32 scores [H, m] -> distinct int64 keys [H, m]; a larger key comes earlier in the total order.

    The upper half holds the score's bits, made monotonic; the lower half counts down in position-major
    order. -0.0 equals 0.0; NaN equals -inf, the lowest score. Row h is head first + h of `total` heads
    (default: the rows are all there are), so ranks that compare heads say where theirs stand.
    """
    rows, m = scores.shape
    if on_gpu(scores):
        from vllm_kvevict.kernels import radix_select

        return radix_select.order_keys(scores, first, total)
    scores = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits = (scores + 0.0).view(torch.int32)  # the sum turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    heads = torch.arange(first, first + rows, device=scores.device)
    rank = torch.arange(m, device=scores.device) * (total or rows) + heads[:, None]
    return (ordered << 32) | (0xFFFFFFFF - rank)


def count_best(
    layers: Sequence[Tensor],
    totals: Sequence[int],
    guaranteed: Sequence[int | Sequence[int]],
    comm: Comm | None,
) -> Tensor:
    """How many of the totals[i] best entries of layers[i] belong to each of its heads: int64 [layers, H].

    layers: keys [H, m] each. guaranteed: every head first owns that many of its own best entries, or each its own
    number; what then remains of totals[i] goes to the best of the others. Under comm the heads of all ranks
    compete, without any score leaving its rank; the counts are those of this rank's heads.
    """
    keys = [_own_first(k, own) for k, own in zip(layers, guaranteed, strict=True)]
    if comm is not None:
        cuts = list(_cuts_over_ranks(torch.stack(keys).flatten(1), totals, comm))
    elif on_gpu(keys[0]):
        cuts = list(_cuts(torch.stack(keys).flatten(1), totals))
    else:
        cuts = [_cut(k.flatten(), total) for k, total in zip(keys, totals, strict=True)]
    return torch.stack([(k >= cut).sum(1) for k, cut in zip(keys, cuts, strict=True)])


def _own_first(keys: Tensor, guaranteed: int | Sequence[int]) -> Tensor:
    """The keys, those that heads own in any case as the largest there are."""
    counts = [guaranteed] * len(keys) if isinstance(guaranteed, int) else guaranteed
    return keys.masked_fill(keys >= _cuts(keys, counts), _FIRST) if any(counts) else keys


def best_of_layers(layers: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """`best_positions` of layers[i] with counts[i], for each i."""
    if not on_gpu(layers[0]):
        return [best_positions(keys, own) for keys, own in zip(layers, counts, strict=True)]
    # To launch a kernel for each layer takes longer than they run.
    rows = iter(best_positions(torch.cat(list(layers)), list(chain.from_iterable(counts))))
    return [list(islice(rows, len(keys))) for keys in layers]


def best_positions(keys: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """For each KV head the positions of its counts[h] best entries, int64, ascending."""
    # The size is known, so no device has to report it back.
    found = true_places(best(keys, counts), sum(counts)) % keys.shape[1]
    return list(torch.split(found, list(counts)))


def best(keys: Tensor, counts: Sequence[int]) -> Tensor:
    """For each KV head which are its counts[h] best entries: bool, shaped like keys [H, m]."""
    return keys >= _cuts(keys, counts)


def _cuts(keys: Tensor, counts: Sequence[int]) -> Tensor:
    """For each row of keys [R, N] its counts[r]-th largest key, [R, 1]."""
    if on_gpu(keys):
        from vllm_kvevict.kernels import radix_select

        return radix_select.cuts(keys, counts)
    if len(set(counts)) == 1:
        return _cut(keys, counts[0])
    return torch.stack([_cut(row, count) for row, count in zip(keys, counts, strict=True)])


def _cut(keys: Tensor, count: int) -> Tensor:
    """The count-th largest key along the last dimension, [..., 1]: `keys >= cut` marks the count best."""
    if count == 0:
        return torch.full_like(keys[..., :1], _FIRST)
    return keys.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def _cuts_over_ranks(keys: Tensor, totals: Sequence[int], comm: Comm) -> Tensor:
    """The totals[i]-th largest of all ranks' keys[i], [layers, 1], by a radix search on histograms.

    Eight collectives of 256 counts per layer, whatever the length (keys int64 [layers, N]).
    """
    if on_gpu(keys):
        from vllm_kvevict.kernels import radix_select

        return radix_select.cuts(keys, totals, comm.sum_counts)
    wanted = torch.tensor(totals, device=keys.device)[:, None]
    missing = wanted.clone()
    cuts = torch.zeros_like(wanted)
    inside = torch.ones_like(keys, dtype=torch.bool)
    for shift in range(56, -8, -8):
        digits = (keys >> shift) & 0xFF
        if shift == 56:
            digits ^= 0x80  # the sign: negative keys come last
        histogram = torch.zeros(len(keys), 256, dtype=torch.int64, device=keys.device)
        histogram = comm.sum_counts(histogram.scatter_add_(1, digits, inside.long()))
        above = histogram.flip(1).cumsum(1).flip(1) - histogram
        digit = (above >= missing).sum(1, keepdim=True)  # the smallest with fewer than that many above it
        digit.clamp_(max=255)
        missing = missing - above.gather(1, digit)
        inside &= digits == digit
        cuts = (cuts << 8) | (digit ^ 0x80 if shift == 56 else digit)
    return torch.where(wanted == 0, _FIRST, cuts)
