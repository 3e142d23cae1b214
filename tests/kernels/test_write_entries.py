"""Entries land in their places, bit for bit, and nothing else changes."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from vllm_kvevict.kernels.write_entries import reference, write_entries

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _case(dtype, page_size, head_dim, heads, tokens, device="cpu", seed=0):
    """Storage, keys, values and slots: keys and values are parts of one projection, slots are in no order.

    All bits are random, so that there is NaN of every kind, -0.0 and denormal numbers.
    """
    random = torch.Generator().manual_seed(seed)

    def bits(rows, columns):
        size = (rows, columns * dtype.itemsize)
        return torch.randint(256, size, dtype=torch.uint8, generator=random).view(dtype)

    count = -(-tokens * heads // page_size) + 2
    storage = bits(count, 2 * page_size * head_dim)
    projection = bits(tokens, (2 + 2) * heads * head_dim)
    _, keys, values = projection.view(tokens, -1, head_dim).split([2 * heads, heads, heads], 1)
    slots = torch.randperm(count * page_size, generator=random)[: tokens * heads]
    return storage.to(device), keys.to(device), values.to(device), slots.to(device)


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


def launches() -> Iterator[Callable[[], object]]:
    """Representative calls, to be compiled for GPUs."""
    for dtype, page_size, head_dim in [
        (torch.bfloat16, 32, 128),
        (torch.bfloat16, 16, 64),
        (torch.bfloat16, 32, 96),
        (torch.float32, 64, 256),
    ]:
        storage, keys, values, slots = _case(dtype, page_size, head_dim, 8, 4)
        yield partial(write_entries, storage, page_size, keys, values, slots)
