"""Entries land in their places, bit for bit, and nothing else changes."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from vllm_kvevict.kernels import quantise
from vllm_kvevict.kernels.quantise import Quantised, quantise_reference
from vllm_kvevict.kernels.rotate_and_round import quantise as quantise_here
from vllm_kvevict.kernels.rotate_and_round import rotate
from vllm_kvevict.kernels.write_entries import reference, write_entries

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


def _case(dtype, page_size, head_dim, heads, tokens, device="cpu", seed=0):
    """Storage, keys, values and slots: keys and values are parts of one projection, slots are in no order.

    All bits are random, so that there is NaN of every kind, -0.0 and denormal numbers.
    """
    random = torch.Generator().manual_seed(seed)

    def bits(rows, columns):
        size = (rows, columns * dtype.itemsize)
        return torch.randint(256, size, dtype=torch.uint8, generator=random).view(dtype)

    count = -(-tokens * heads // page_size) + 2
    storage = bits(count, page_size * (2 * head_dim + 8 * (dtype == torch.int8)))
    projection = bits(tokens, (2 + 2) * heads * head_dim)
    _, keys, values = projection.view(tokens, -1, head_dim).split([2 * heads, heads, heads], 1)
    slots = torch.randperm(count * page_size, generator=random)[: tokens * heads]
    storage, keys, values, slots = (x.to(device) for x in (storage, keys, values, slots))
    if dtype == torch.int8:
        scales = torch.randn(2, tokens, heads, generator=random).to(device)
        keys, values = map(Quantised, (keys, values), scales)
    return storage, keys, values, slots


def _bits(tensor):
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size, head_dim", [(16, 64), (32, 80), (64, 128), (32, 96), (16, 256)])
@pytest.mark.parametrize("heads, tokens", [(1, 1), (2, 5), (3, 40)])
def test_equals_the_reference(device, dtype, page_size, head_dim, heads, tokens):
    storage, keys, values, slots = _case(dtype, page_size, head_dim, heads, tokens, device)
    slots[::3] = -1
    slots[1::7] = -(2**40)
    expected = storage.clone()
    reference(expected, page_size, keys, values, slots)
    write_entries(storage, page_size, keys, values, slots)
    assert torch.equal(_bits(storage), _bits(expected))


def test_nothing_to_store(device):
    storage, keys, values, slots = _case(torch.float32, 16, 64, 2, 3, device)
    before = _bits(storage).clone()
    write_entries(storage, 16, keys[:0], values[:0], slots[:0])
    write_entries(storage, 16, keys, values, slots.fill_(-1))
    assert torch.equal(_bits(storage), before)


@pytest.mark.parametrize("write", [write_entries, reference])
def test_what_is_refused(device, write):
    storage, keys, values, slots = _case(torch.float32, 16, 64, 2, 3, device)
    with pytest.raises(ValueError, match="dtype"):
        write(storage, 16, keys.half(), values.half(), slots)
    with pytest.raises(ValueError, match="adjacent"):
        write(storage, 16, keys, values.repeat_interleave(2, 2)[..., ::2], slots)
    if write is write_entries:
        with pytest.raises(ValueError, match="not like them"):
            write(storage, 16, keys, quantise_reference(values, False), slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim, heads, tokens", [(64, 3, 40), (80, 1, 3), (256, 2, 5)])
@pytest.mark.parametrize("is_rotated", [True, False])
def test_quantising_equals_the_reference(device, dtype, head_dim, heads, tokens, is_rotated):
    """Vectors that lie apart, among them zeros, numbers half-way between two steps, inf and NaN."""
    x = torch.randn(tokens, 3 * heads, head_dim, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x = x[:, heads : 2 * heads]
    x[0], x[1], x[1, 0, 0], x[2, 0, 1], x[2, -1, 5] = 0, 0.5, 127, torch.nan, torch.inf
    found, expected = quantise_here(x, is_rotated), quantise_reference(x, is_rotated)
    torch.testing.assert_close(found.scales, expected.scales, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(found.numbers, expected.numbers)
    assert not torch.equal(found.numbers, quantise_reference(x, not is_rotated).numbers)


def test_rotated_queries_equal_the_reference(device):
    x = torch.randn(9, 2, 96, device=device)
    tokens, out = torch.tensor([6, 0, 3], device=device), torch.empty(3, 2, 96, device=device)
    assert torch.equal(rotate(x), quantise.rotate(x))
    assert torch.equal(rotate(x, tokens, out), quantise.rotate(x)[tokens])
    assert rotate(x.bfloat16()).dtype == torch.bfloat16 and not rotate(x[:0]).numel()


def launches() -> Iterator[Callable[[], object]]:
    """Representative calls, to be compiled for GPUs."""
    for dtype, page_size, head_dim in [
        (torch.bfloat16, 32, 128),
        (torch.bfloat16, 16, 64),
        (torch.bfloat16, 32, 96),
        (torch.float32, 64, 256),
        (torch.int8, 32, 96),
    ]:
        storage, keys, values, slots = _case(dtype, page_size, head_dim, 8, 4)
        yield partial(write_entries, storage, page_size, keys, values, slots)
    for dtype, head_dim in [(torch.bfloat16, 128), (torch.float32, 80), (torch.bfloat16, 256)]:
        x = torch.zeros(4, 8, head_dim, dtype=dtype)
        yield from (partial(quantise_here, x, is_rotated) for is_rotated in (True, False))
        yield partial(rotate, x)
        yield partial(rotate, x, torch.arange(4), torch.empty_like(x))
