"""Entries in 8 bits: the compiled kernel against its reference, bit for bit, and both against what they mean."""

import pytest
import torch
from torch import Tensor

from vllm_kvevict.kernels.quantise import (
    Quantised,
    Quantiser,
    dequantise,
    quantise_reference,
    rotate,
    write_entries,
    write_reference,
)

HEAD_DIMS = (32, 64, 96, 128, 256)


def _vectors(head_dim: int, dtype: torch.dtype = torch.float32, tokens: int = 300) -> Tensor:
    """Of all magnitudes, with dims far above the others."""
    random = torch.Generator().manual_seed(head_dim)
    x = torch.randn(tokens, 2, head_dim, generator=random)
    x = x * 10 ** (6 * torch.rand(tokens, 2, 1, generator=random) - 3)
    x[::3, :, 5] *= 50
    return x.to(dtype)


def _equal(one: Quantised, other: Quantised) -> bool:
    same = torch.allclose(one.scales, other.scales, rtol=0, atol=0, equal_nan=True)
    return same and torch.equal(one.numbers, other.numbers)


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_equals_the_reference(level, head_dim, dtype, is_rotated):
    x = _vectors(head_dim, dtype)
    assert _equal(Quantiser(dtype)(x, is_rotated), quantise_reference(x, is_rotated))


def test_products_are_rounded_before_a_half_is_added():
    """Of a million numbers, a few are nearer to a tie than a product that is not rounded differs."""
    x = _vectors(128, tokens=10_000)
    assert _equal(Quantiser(x.dtype)(x, False), quantise_reference(x, False))


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_number_is_within_half_a_step(head_dim, is_rotated):
    x = _vectors(head_dim)
    found = Quantiser(x.dtype)(x, is_rotated)
    exact = rotate(x.double()) if is_rotated else x.double()
    scales = found.scales.double().unsqueeze(-1)
    steps = (found.numbers * scales - exact).abs() / scales
    assert 0.49 < steps.max() < 0.5 + 1e-3
    assert found.numbers.abs().amax(-1).eq(127).all()
    back = dequantise(found.numbers, found.scales, torch.float64, is_rotated)
    assert ((back - x).norm(dim=-1) <= 0.501 * scales[..., 0] * head_dim**0.5).all()


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 80])
def test_a_rotation_keeps_dot_products_and_spreads_what_stands_out(head_dim):
    x, y = torch.randn(2, 50, head_dim, dtype=torch.float64)
    torch.testing.assert_close((rotate(x) * rotate(y)).sum(-1), (x * y).sum(-1))
    torch.testing.assert_close(rotate(rotate(x), inverse=True), x)
    assert not torch.allclose(rotate(rotate(x)), x)
    one = torch.zeros(head_dim)
    one[3] = 1
    block = head_dim & -head_dim
    torch.testing.assert_close(rotate(one)[:block].abs(), torch.full((block,), block**-0.5))


def test_ties_are_rounded_away_from_zero():
    x = torch.tensor([127.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49, -126.5] * 4).view(1, 1, 32)
    assert Quantiser(x.dtype)(x, False).numbers[0, 0, :8].tolist() == [127, 1, -1, 2, 3, -3, 0, -127]


@pytest.mark.parametrize("is_rotated", [False, True])
def test_zeros_and_what_is_no_number(is_rotated):
    x = torch.randn(6, 2, 64)
    x[0], x[1, 0, 7], x[2, 1, 3], x[3, 0, :2], x[4] = 0, torch.nan, -torch.inf, 3e38, 1e-40
    found = Quantiser(x.dtype)(x, is_rotated)
    assert _equal(found, quantise_reference(x, is_rotated))
    assert not found.numbers[0].any() and found.scales[0].eq(torch.tensor(1e-6)).all()
    for place in ((1, 0), (2, 1)):
        assert not found.numbers[place].any() and not found.scales[place].isfinite()
        assert dequantise(found.numbers[place], found.scales[place], x.dtype, is_rotated).isnan().all()
    assert found.scales[1, 1].isfinite() and found.numbers[1, 1].any()


def test_an_entry_does_not_depend_on_its_batch_or_on_threads(lanes):
    x = _vectors(128, tokens=600)
    together = Quantiser(x.dtype)(x, True)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert _equal(Quantiser(x.dtype)(x, True), together)
    finally:
        torch.set_num_threads(threads)
    assert _equal(Quantiser(x.dtype)(x[7:8], True), together[7:8])
    whole = torch.randn(600, 5, 128)
    whole[:, 2:4] = x
    assert _equal(Quantiser(x.dtype)(whole[:, 2:4], True), together)
    assert _equal(Quantiser(x.dtype)(x[7:8].expand(3, -1, -1), True), together[[7, 7, 7]])


def test_what_is_refused():
    quantiser = Quantiser(torch.float32)
    with pytest.raises(ValueError, match="side by side"):
        quantiser(torch.randn(3, 4, 64)[:, ::2], True)
    with pytest.raises(ValueError, match="fp32 or bfloat16"):
        Quantiser(torch.float16)
    with pytest.raises(ValueError, match="bfloat16"):
        quantiser(torch.randn(3, 2, 64).bfloat16(), True)
    with pytest.raises(ValueError, match="multiple"):
        quantiser(torch.randn(3, 2, 18), True)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_size, tokens", [(16, 1), (32, 40), (64, 700)])
def test_entries_land_in_their_places(head_dim, page_size, tokens):
    x = _vectors(head_dim, tokens=tokens)
    key, value = quantise_reference(x, True), quantise_reference(x, False)
    count = 2 * tokens // page_size + 2
    pages = torch.randint(-128, 128, (count, page_size * (2 * head_dim + 8)), dtype=torch.int8)
    slots = torch.randperm(count * page_size)[: 2 * tokens]
    slots[1::7] = -(2**40)
    expected = pages.clone()
    write_reference(expected, page_size, key, value, slots)
    assert not torch.equal(pages, expected)
    write_entries(pages, page_size, key, value, slots)
    assert torch.equal(pages, expected)
