"""Entries land in their places, bit for bit, and nothing else changes."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from vllm_kvevict.kernels.write_entries import reference, write_entries

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _case(dtype, page_size, head_dim, heads, tokens, device="cpu", seed=0):
    """Storage, keys, values and slots: keys and values are parts of one projection, slots are in no order."""
    random = torch.Generator().manual_seed(seed)
    count = -(-tokens * heads // page_size) + 2
    storage = torch.randn(count, 2 * page_size * head_dim, generator=random).to(dtype)
    projection = torch.randn(tokens, (2 + 2) * heads * head_dim, generator=random).to(dtype)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_copied(device, dtype):
    """Also those of NaN, -0.0 and denormal numbers."""
    storage, keys, values, slots = _case(dtype, 16, 64, 2, 16, device)
    bits = torch.arange(-1024, 1024, device=device).mul_(31).to(_bits(keys).dtype)
    _bits(keys).copy_(bits.view(16, 2, 64))
    _bits(values).copy_(bits.flip(0).view(16, 2, 64))
    write_entries(storage, 16, keys, values, slots)
    pages = storage.view(-1, 2, 16, 64)
    stored = pages[slots // 16, :, slots % 16]
    assert torch.equal(_bits(stored[:, 0]).flatten(), bits)
    assert torch.equal(_bits(stored[:, 1]).flatten(), bits.flip(0))


def test_nothing_to_store(device):
    storage, keys, values, slots = _case(torch.float32, 16, 64, 2, 3, device)
    before = storage.clone()
    write_entries(storage, 16, keys[:0], values[:0], slots[:0])
    write_entries(storage, 16, keys, values, slots.fill_(-1))
    assert torch.equal(storage, before)


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
