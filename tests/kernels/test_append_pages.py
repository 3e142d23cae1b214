"""The kernel that gives rows room for one more entry against its torch reference and the cache's torch code."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.cache.writers import WritableCache, plain, writer
from vllm_kvevict.kernels.append_pages import append_pages, reference


def _tables(
    max_requests: int, num_rows: int, page_size: int, device: str, seed: int = 0
) -> tuple[Tensor, ...]:
    """An arena of unused places, row starts and random lengths, of which many end with a page."""
    random = torch.Generator().manual_seed(seed)
    kv_len = torch.randint(0, 4 * page_size, (max_requests, num_rows), generator=random)
    full = torch.rand(kv_len.shape, generator=random) < 0.1
    kv_len[full] -= kv_len[full] % page_size
    starts = torch.randperm(max_requests * num_rows, generator=random).view_as(kv_len) * 5
    arena = torch.full((max_requests * num_rows * 5,), -1)
    return tuple(x.to(device, torch.int32) for x in (arena, starts, kv_len))


def _new_pages(kv_len: Tensor, slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Distinct pages for the rows of ``slots`` that need one, and where each request's begin."""
    counts = (kv_len[slots] % page_size == 0).sum(1)
    total = int(counts.sum())
    pages = torch.randperm(total + 2, generator=torch.Generator().manual_seed(1))[:total]
    return pages.to(slots.device, torch.int32), counts.cumsum(0) - counts


@pytest.mark.parametrize("num_rows, page_size", [(1, 32), (6, 16), (6, 32), (6, 64), (160, 64), (2100, 32)])
@pytest.mark.parametrize(
    "dtype, head_dim",
    [(torch.float32, 2), (torch.bfloat16, 80), (torch.float16, 256), (torch.int8, 84)],
)
def test_equals_the_reference(num_rows, page_size, dtype, head_dim, device):
    """New pages are zero, and no others."""
    tables = _tables(4, num_rows, page_size, device)
    slots = torch.tensor([3, 0, 2], device=device)
    pages, first = _new_pages(tables[2], slots, page_size)
    shape = (len(pages) + 2, 2 * page_size * head_dim)
    storage = torch.full(shape, 5 if dtype == torch.int8 else torch.nan, dtype=dtype, device=device)
    expected = [x.clone() for x in (*tables, storage)]
    reference(*expected[:3], slots, pages, first, page_size, expected[3])
    append_pages(*tables, slots, pages, first, page_size, storage)
    for mine, theirs in zip((*tables, storage), expected, strict=True):
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))


def test_the_cache_gives_the_same_pages_without_it(device):
    """A page for each row in turn, after an eviction that left them unequal."""
    caches = []
    for triton in (False, True):
        storage = torch.ones(150, 2 * 32 * 4, device=device)
        sizes = {"num_layers": 2, "num_kv_heads": 3, "page_size": 32, "max_requests": 4}
        caches.append(WritableCache(storage, **sizes, write=writer(32, plain, plain), triton=triton))
        slots = [caches[-1].open() for _ in range(3)]
        caches[-1].extend(slots, [64, 33, 95])
        for layer, counts in enumerate([(32, 1, 64), (31, 64, 5)]):
            caches[-1].compact(slots[0], layer, [torch.arange(n, device=device) for n in counts])
    order = [slots[2], slots[0], slots[1]]
    for _ in range(35):
        for cache in caches:
            cache.storage.fill_(1)
            cache.extend(order, [1, 1, 1])
        without, mine = caches
        assert torch.equal(mine.tables.arena, without.tables.arena)
        assert torch.equal(mine.tables.kv_len, without.tables.kv_len)
        assert torch.equal(mine.storage, without.storage)


def launches() -> Iterator[Callable[[], object]]:
    """Representative calls, to be compiled for GPUs."""
    slots = torch.arange(2)
    for dtype, page_size, num_rows in [
        (torch.bfloat16, 32, 256),
        (torch.float16, 16, 1),
        (torch.float32, 64, 2100),
    ]:
        arena, starts, kv_len = _tables(2, num_rows, page_size, "cpu")
        pages, first = _new_pages(kv_len * page_size, slots, page_size)
        storage = torch.zeros(len(pages) + 2, 2 * page_size * 80, dtype=dtype)
        yield partial(append_pages, arena, starts, kv_len, slots, pages, first, page_size, storage)
