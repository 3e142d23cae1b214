"""Entries land in their places, bit for bit, and nothing else changes."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from vllm_kvevict.kernels import rotate_and_round
from vllm_kvevict.kernels.quantise import Quantised, quantise_reference, rotate
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
    keys, values = keys.to(device), values.to(device)
    if dtype == torch.int8:
        keys, values = map(Quantised, (keys, values), torch.randn(2, tokens, heads).to(device))
    return storage.to(device), keys, values, slots.to(device)


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


@pytest.mark.parametrize(
    "dtype, head_dim", [(torch.float32, 64), (torch.bfloat16, 80), (torch.bfloat16, 256)]
)
def test_quantising_equals_the_reference(device, dtype, head_dim):
    """Vectors that lie apart, among them zeros, numbers half-way between two steps, inf and NaN."""
    x = torch.randn(20, 4, head_dim, generator=torch.Generator().manual_seed(0)).to(device, dtype)[:, 1:3]
    x[0], x[1], x[1, 0, 0], x[2, 0, 1], x[2, -1, 5] = 0, 0.5, 127, torch.nan, torch.inf
    for is_rotated in (True, False):
        found, expected = (how(x, is_rotated) for how in (rotate_and_round.quantise, quantise_reference))
        torch.testing.assert_close(found.scales, expected.scales, atol=0, rtol=0, equal_nan=True)
        assert torch.equal(found.numbers, expected.numbers)
    which = torch.tensor([9, 0, 3], device=device)
    rotated = rotate_and_round.rotate(x, which, torch.empty_like(x[:3]))
    assert torch.equal(rotated, rotate(x)[which].to(dtype)) and not torch.equal(rotated, x[which])


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
    x = torch.zeros(4, 8, 80, dtype=torch.bfloat16)
    yield from (partial(rotate_and_round.quantise, x, is_rotated) for is_rotated in (True, False))
    yield partial(rotate_and_round.rotate, x, torch.arange(4), x)
