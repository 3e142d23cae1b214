"""The order of scores and the radix search, against sorting and against what the policies define."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from vllm_kvevict.kernels.radix_select import (
    FIRST,
    SHIFTS,
    cuts,
    descend,
    digit_counts,
    order_keys,
    reference_cuts,
    reference_digit_counts,
    reference_order_keys,
)
from vllm_kvevict.policies.select import order_keys as keys_of_the_policies

SPECIAL = [
    0.0,
    -0.0,
    torch.inf,
    -torch.inf,
    torch.nan,
    -torch.nan,
    1e-45,
    -1e-45,
    1e-40,
    -1e-40,
    3.4e38,
    -3.4e38,
]


def _scores(rows, m, seed=0):
    """With runs of equal scores and with special ones."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, m, generator=random)
    scores[:, : m // 2] = scores[:, : m // 2].mul_(4).round_()
    special = torch.tensor(SPECIAL)[: rows * m]
    scores.flatten()[torch.randperm(rows * m, generator=random)[: len(special)]] = special
    return scores


@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (2, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first, total", [(0, None), (5, 16)])
def test_keys_are_those_of_the_policies(device, shape, dtype, first, total):
    scores = _scores(*shape).to(dtype)
    expected = keys_of_the_policies(scores, first, total)
    assert torch.equal(reference_order_keys(scores, first, total), expected)
    assert torch.equal(order_keys(scores.to(device), first, total).cpu(), expected)


def test_keys_of_every_kind_of_number(device):
    """All signs and exponents, with mantissas from both ends: denormal numbers and every NaN among them."""
    high = torch.arange(2**12)[:, None] << 20
    low = torch.tensor([0, 1, 2, 2**19, 2**20 - 1])
    scores = (high + low).to(torch.int32).view(torch.float32).view(4, -1)
    expected = keys_of_the_policies(scores)
    assert torch.equal(reference_order_keys(scores), expected)
    assert torch.equal(order_keys(scores.to(device)).cpu(), expected)


def test_scores_may_lie_apart(device):
    scores = _scores(4, 300)
    assert torch.equal(
        order_keys(scores.to(device)[1::2, ::3]).cpu(), keys_of_the_policies(scores[1::2, ::3])
    )
    assert order_keys(scores.to(device)[:, :0]).shape == (4, 0)


def _keys(rows, n, seed=0):
    """Distinct keys; the first half differ in few bits, the others in all."""
    random = torch.Generator().manual_seed(seed)
    few = torch.stack([torch.randperm(n // 2, generator=random) - n // 4 for _ in range(rows)])
    far = torch.randint(-(2**63), 2**63 - 1, (rows, n - n // 2), generator=random)
    return torch.cat([few, far], 1)


@pytest.mark.parametrize("rows, n", [(1, 1), (3, 500), (2, 5000)])
def test_digit_counts(device, rows, n):
    keys = _keys(rows, n)
    pivot = keys[:, n // 3, None]
    for shift in SHIFTS:
        prefix = pivot >> shift >> 8  # of a negative key with sign bits, which do not count
        expected = reference_digit_counts(keys, prefix, shift)
        assert expected.sum() > 0
        for given in (prefix, prefix & ((1 << (56 - shift)) - 1)):
            assert torch.equal(digit_counts(keys.to(device), given.to(device), shift).cpu(), expected)


@pytest.mark.parametrize("rows, n", [(1, 1), (4, 300), (3, 9000)])
def test_cuts(device, rows, n):
    keys = _keys(rows, n)
    for counts in ([n] * rows, [(7 * r + n // 2) % (n + 1) for r in range(rows)], [0, 1, n, n // 3][:rows]):
        expected = reference_cuts(keys, counts)
        assert torch.equal((keys >= expected).sum(1), torch.tensor(counts))
        assert torch.equal(cuts(keys.to(device), counts).cpu(), expected)


def test_equal_keys_count_one_by_one(device):
    """The policies put the entries that a head owns anyway before all others."""
    keys = _keys(2, 400).clamp(-(2**62), 2**62)
    keys[:, ::3] = FIRST
    for counts in ([3, 133], [134, 135], [300, 400]):
        assert torch.equal(cuts(keys.to(device), counts).cpu(), reference_cuts(keys, counts))


def test_histograms_of_several_ranks_add_up(device):
    """As under tensor parallelism: each rank counts its own keys, and all descend by the sum."""
    keys = _keys(3, 600).to(device)
    wanted = torch.tensor([[1], [250], [600]], device=device)
    missing, prefix = wanted.clone(), torch.zeros_like(wanted)
    for shift in SHIFTS:
        counts = sum(digit_counts(part, prefix, shift) for part in keys.split([200, 100, 300], 1))
        descend(counts, prefix, missing, shift)
    assert torch.equal(prefix, reference_cuts(keys, wanted[:, 0]))


@pytest.mark.parametrize("alike", [40, 3000])
def test_a_rank_on_its_own_finds_the_same(device, alike):
    """Whether few keys of a row are left after the first digits, or more than there is room for aside."""
    keys = _keys(3, 9000)
    keys[:, :40] = torch.arange(40) + 2**40
    keys[1, :alike] = torch.arange(alike) + 2**40
    above = (keys >= 2**41).sum(1)
    for counts in (above + 1, above + 20, above + 40):
        expected = reference_cuts(keys, counts)
        assert torch.equal(cuts(keys.to(device), counts).cpu(), expected)
        assert torch.equal(cuts(keys.to(device), counts, torch.clone).cpu(), expected)


def launches() -> Iterator[Callable[[], object]]:
    """Representative calls, to be compiled for GPUs."""
    for dtype in (torch.float32, torch.bfloat16):
        yield partial(order_keys, _scores(2, 100).to(dtype))
    yield partial(cuts, _keys(2, 100), [3, 4])
    yield partial(cuts, _keys(2, 100), [3, 4], torch.clone)
