"""The kernel that moves survivors against its torch reference."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cache.writers import WritableCache, plain, writer
from vllm_kvevict.kernels.compact_rows import compact_rows, reference
from vllm_kvevict.kernels.layout import Field


def _arguments(
    rows: int, columns: int, page_size: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, int, Tensor]:
    """Storage, with three pages more than the rows have, page size and the rows' tables, part of wider ones."""
    random = torch.Generator().manual_seed(0)
    count = rows * columns + 3
    size = page_size * (2 * head_dim + 8 * (dtype == torch.int8))
    storage = torch.randn(count, size, generator=random).mul(40).to(device, dtype)
    wide = torch.zeros(rows, columns + 5, dtype=torch.int32)
    wide[:, 2 : 2 + columns] = torch.randperm(count, generator=random)[: rows * columns].view(rows, columns)
    return storage, page_size, wide.to(device)[:, 2 : 2 + columns]


def _check(
    storage: Tensor, page_size: int, table: Tensor, kept: list[Tensor], first: Tensor | None = None
) -> None:
    """Every element of the storage must be as the reference has it, also what no survivor was moved to."""
    expected = storage.clone()
    starts = torch.tensor([0, *(len(entries) for entries in kept)]).cumsum(0).to(storage.device)
    together = torch.cat(kept).to(storage.device)
    first = first if first is None else first.to(storage.device)
    reference(expected, page_size, table, together, starts, first)
    compact_rows(storage, page_size, table, together, starts, first)
    assert torch.equal(storage, expected)


def _subset(length: int, count: int, seed: int = 0) -> Tensor:
    """``count`` of the numbers below ``length``, ascending."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))[:count].sort().values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("page_size, head_dim", [(16, 96), (32, 64), (32, 128), (64, 80), (16, 256)])
def test_equals_the_reference(dtype, page_size, head_dim, device):
    length = 6 * page_size - 3
    kept = [_subset(length, count) for count in (1, page_size, page_size + 1, length - 1)]
    _check(*_arguments(4, 6, page_size, head_dim, dtype, device), kept)


@pytest.mark.parametrize("shift", [1, 31, 255, 256, 257, 600])
def test_long_rows_whose_survivors_move_onto_each_other(shift, device):
    """Sources and destinations of neighbouring blocks overlap; the first few entries stay."""
    kept = torch.cat([torch.arange(3), torch.arange(3 + shift, 1600)])
    _check(*_arguments(2, 50, 32, 64, torch.bfloat16, device), [kept, _subset(1600, 1500, shift)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size, head_dim", [(16, 96), (32, 64)])
def test_entries_at_the_front_of_rows_stay(dtype, page_size, head_dim, device):
    """Rows whose survivors go to the middle of a page, to the first or the last place of one, or nowhere."""
    length, first = 6 * page_size, torch.tensor([0, 1, page_size - 1, page_size, 3 * page_size + 5, 40, 0])
    kept = [_subset(length - n, (length - n) // 2, n) for n in first.tolist()]
    kept[-2:] = [torch.arange(0), torch.arange(length)]
    _check(*_arguments(7, 6, page_size, head_dim, dtype, device), kept, first)


def test_the_check_sees_a_kernel_that_ignores_what_stays(device, monkeypatch):
    kernel = compact_rows
    monkeypatch.setitem(_check.__globals__, "compact_rows", lambda *arguments: kernel(*arguments[:5]))
    arguments, kept = _arguments(1, 6, 32, 64, torch.float32, device), [torch.arange(9, 50)]
    with pytest.raises(AssertionError):
        _check(*arguments, kept, torch.tensor([20]))


def test_no_rows(device):
    storage, _, table = _arguments(1, 2, 32, 64, torch.float32, device)
    before = storage.clone()
    empty = torch.zeros(1, dtype=torch.int64, device=device)
    compact_rows(storage, 32, table[:0], empty[:0], empty)
    assert torch.equal(storage, before)


def test_pages_that_lie_apart_are_refused(device):
    storage, _, table = _arguments(2, 4, 32, 64, torch.float32, device)
    empty = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="side by side"):
        compact_rows(storage, 32, table[:, ::2], empty[:0], empty)


@pytest.mark.parametrize("first", [None, [0, 1, 40, 64, 95, 31]])
def test_the_cache_keeps_the_same_without_it(first, device):
    caches, random = [], torch.Generator().manual_seed(0)
    content = torch.randn(50, 2 * 32 * 8, generator=random).to(device)
    aside = Field("score", 3, "float16", aside=True)
    scores = torch.randn(50, 32 * 3, generator=random).to(device, torch.float16)
    stay = [0] * 6 if first is None else first
    kept = [_subset(100 - n, (100 - n) // 3, n).to(device) for n in stay]
    for triton in (False, True):
        sizes = {"num_layers": 2, "num_kv_heads": 3, "page_size": 32, "max_requests": 1, "triton": triton}
        write = writer(32, plain, plain)
        caches.append(WritableCache(content.clone(), **sizes, write=write, more=[aside]))
        slot = caches[-1].open()
        caches[-1].extend([slot], [100])
        caches[-1].storage.copy_(content)
        caches[-1].memory.asides[0].copy_(scores)
        caches[-1].compact(slot, 0, kept, None if first is None else np.array(first))
        caches[-1].verify()
    without, mine = caches
    assert torch.equal(mine.tables.arena, without.tables.arena)
    assert torch.equal(mine.tables.kv_len, without.tables.kv_len)
    assert torch.equal(mine.storage, without.storage) and not torch.equal(mine.storage, content)
    (moved,), (expected,) = mine.memory.asides, without.memory.asides
    assert torch.equal(moved, expected) and not torch.equal(moved, scores)


def launches() -> Iterator[Callable[[], object]]:
    """Representative calls, to be compiled for GPUs."""
    starts = torch.tensor([0, 3, 5])
    for dtype, page_size, head_dim in [
        (torch.bfloat16, 32, 128),
        (torch.float16, 16, 80),
        (torch.float32, 64, 256),
        (torch.int8, 32, 128),
    ]:
        yield partial(
            compact_rows, *_arguments(2, 3, page_size, head_dim, dtype, "cpu"), torch.arange(5), starts
        )
    first = torch.tensor([40, 0])
    arguments = _arguments(2, 3, 32, 128, torch.bfloat16, "cpu")
    yield partial(compact_rows, *arguments, torch.arange(5), starts, first)
    yield partial(compact_rows, *arguments, torch.arange(5), starts, parts=1)
