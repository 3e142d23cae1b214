"""Entries in 8 bits: the compiled kernel against its reference, bit for bit, and both against what they mean."""

import pytest
import torch
from torch import Tensor

from vllm_kvevict.kernels import quantise
from vllm_kvevict.kernels.quantise import Quantised, Quantiser, dequantise, quantise_reference, rotate

HEAD_DIMS = (32, 64, 96, 128, 256)


def _vectors(head_dim: int, dtype: torch.dtype = torch.float32, tokens: int = 300) -> Tensor:
    """Of all magnitudes, with some dims far above the others."""
    random = torch.Generator().manual_seed(head_dim)
    x = torch.randn(tokens, 2, head_dim, generator=random) ** 3
    return (x * 10 ** (6 * torch.rand(tokens, 2, 1, generator=random) - 3)).to(dtype)


def _equal(one: Quantised, other: Quantised) -> bool:
    same = torch.allclose(one.scales, other.scales, rtol=0, atol=0, equal_nan=True)
    return same and torch.equal(one.numbers, other.numbers)


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_equals_the_reference(level, head_dim, dtype, is_rotated):
    x = _vectors(head_dim, dtype)
    assert _equal(Quantiser(dtype)(x, is_rotated), quantise_reference(x, is_rotated))


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_number_is_within_half_a_step(head_dim, is_rotated):
    x = _vectors(head_dim)
    found = Quantiser(x.dtype)(x, is_rotated)
    exact = rotate(x.double()) if is_rotated else x.double()
    scales = found.scales.double().unsqueeze(-1)
    assert 0.49 < ((found.numbers * scales - exact) / scales).abs().max() < 0.5 + 1e-3
    assert found.numbers.abs().amax(-1).eq(127).all()
    back = dequantise(found.numbers, found.scales, torch.float64, is_rotated)
    assert ((back - x).norm(dim=-1) <= 0.501 * scales[..., 0] * head_dim**0.5).all()


@pytest.mark.parametrize("is_rotated", [False, True])
def test_zeros_and_what_is_no_number(is_rotated):
    x = torch.randn(6, 2, 64)
    x[0], x[1, 0, 7], x[2, 1, 3], x[3, 0, :2], x[4] = 0, torch.nan, -torch.inf, 3e38, 1e-40
    found = Quantiser(x.dtype)(x, is_rotated)
    assert _equal(found, quantise_reference(x, is_rotated))
    assert not found.numbers[0].any() and found.scales[0].eq(torch.tensor(1e-6)).all()
    back = dequantise(found.numbers, found.scales, x.dtype, is_rotated)
    assert back[1, 0].isnan().all() and back[2, 1].isnan().all() and back[1:3].isfinite().any(-1).sum() == 2


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
    apart = torch.cat([x, x], 1)[:, :2]
    assert _equal(Quantiser(x.dtype)(apart, True), together)
    assert _equal(Quantiser(x.dtype)(x[7:8].expand(3, -1, -1), True), together[[7, 7, 7]])


def test_what_is_refused():
    quantiser = Quantiser(torch.float32)
    with pytest.raises(ValueError, match="side by side"):
        quantiser(torch.randn(3, 4, 64)[:, ::2], True)
    with pytest.raises(ValueError, match="fp32 or bfloat16"):
        Quantiser(torch.float16)
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
    quantise.write_reference(expected, page_size, key, value, slots)
    assert not torch.equal(pages, expected)
    quantise.write_entries(pages, page_size, key, value, slots)
    assert torch.equal(pages, expected)
