"""The window's attention over pages, against plain torch and against what the policies define."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.stored import IN_8_BITS, pages_in_8_bits
from vllm_kvevict.kernels import window_attention as module
from vllm_kvevict.kernels.window_attention import reference, window_attention
from vllm_kvevict.policies import attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = ("mean", "max", "recent")
TOLERANCE = 2e-6
"""Relative to the largest value, for every dtype: products of 16-bit numbers are exact in fp32, too."""


class Case(NamedTuple):
    """Arguments of the kernel."""

    query: Tensor
    storage: Tensor
    page_size: int
    table: Tensor
    n: int
    scale: float
    softcap: float = 0.0
    rows: str = "mean"

    def to(self, device: str) -> "Case":
        return self._replace(
            query=self.query.to(device), storage=self.storage.to(device), table=self.table.to(device)
        )


def _case(dtype, page_size, head_dim, kv_heads, group, window, m, softcap=0.0, peaked=1.0, seed=0) -> Case:
    """Random pages in random order, NaN behind the last entry; queries and table are parts of something larger.

    ``dtype`` can be that of queries and that of pages.
    """
    dtype, stored_as = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    random = torch.Generator().manual_seed(seed)
    n = m + window
    columns = -(-n // page_size)
    table = torch.randperm(kv_heads * columns + 1, generator=random)[: kv_heads * columns].int()
    table = torch.cat([table.view(kv_heads, columns), torch.full((kv_heads, 3), 2**30, dtype=torch.int32)], 1)
    pages = torch.randn(kv_heads * columns + 1, 2, page_size, head_dim, generator=random)
    pages[:, 1] = torch.nan  # values are none of its business
    pages[table[:, columns - 1].long(), :, n - (columns - 1) * page_size :] = torch.nan
    heads = kv_heads * group
    query = torch.randn(window, heads + 2, head_dim, generator=random).to(dtype)[:, 1 : 1 + heads]
    if stored_as == torch.int8:
        pages = pages_in_8_bits(*pages.unbind(1))
    return Case(query, pages.flatten(1).to(stored_as), page_size, table, n, peaked * head_dim**-0.5, softcap)


def _check(case: Case, device: str) -> None:
    for rows in ROWS:
        storage = case.storage if case.storage.dtype == torch.int8 else case.storage.double()
        wide = case._replace(query=case.query.double(), storage=storage, rows=rows)
        expected = reference(*wide)
        actual = window_attention(*case._replace(rows=rows).to(device)).cpu()
        assert actual.dtype == torch.float32 and actual.shape == expected.shape
        error = (actual - expected).abs().max() / expected.max()
        assert error < TOLERANCE * max(1, case.softcap)


@pytest.mark.parametrize("dtype", [*DTYPES, IN_8_BITS[0]])
@pytest.mark.parametrize("page_size, head_dim", [(16, 64), (32, 80), (64, 128), (16, 96), (32, 256)])
def test_kinds_of_pages(device, dtype, page_size, head_dim):
    _check(_case(dtype, page_size, head_dim, kv_heads=2, group=2, window=8, m=150), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "group, window", [(1, 1), (4, 1), (16, 1), (1, 64), (3, 32), (4, 32), (7, 33), (5, 5), (16, 16)]
)
def test_groups_and_windows(device, dtype, group, window):
    _check(_case(dtype, 32, 64, kv_heads=2, group=group, window=window, m=100), device)


@pytest.mark.parametrize("m", [1, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 500])
def test_lengths(device, m):
    """m and n = m + window end before, at and behind the ends of pages and tiles."""
    for window in (1, 15, 16):
        _check(_case(torch.bfloat16, 16, 64, kv_heads=1, group=2, window=window, m=m), device)


@pytest.mark.parametrize("programs", [1, 2, 6, 1000])
def test_any_number_of_splits(device, programs, monkeypatch):
    """Also where a split ends inside the window, so that some rows see none of the last one's keys."""
    for kernel in ("_SUMS", "_SHARES"):
        monkeypatch.setattr(module, kernel, (programs, *getattr(module, kernel)[1:]))
    for m in (60, 1500):
        _check(_case(torch.bfloat16, 32, 64, kv_heads=1, group=2, window=40, m=m), device)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # of a saturated tanh, in the interpreter
@pytest.mark.parametrize("softcap", [1.0, 50.0])
@pytest.mark.parametrize("peaked", [0.1, 5.0, 500.0])
def test_softcap(device, softcap, peaked):
    _check(_case(torch.float32, 32, 64, 2, 2, 8, 100, softcap=softcap, peaked=peaked), device)


@pytest.mark.parametrize("peaked", [0.0, 30.0])
def test_flat_and_peaked_weights(device, peaked):
    case = _case(torch.float32, 32, 64, 2, 2, 8, 100, peaked=peaked)
    expected = reference(*case._replace(query=case.query.double(), storage=case.storage.double()))
    torch.testing.assert_close(
        window_attention(*case.to(device)).cpu().double(), expected, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_the_policies_define_it(device, softcap, rows):
    case = _case(torch.float32, 32, 64, 2, 3, 16, 300, softcap=softcap)._replace(rows=rows)
    actual = window_attention(*case.to(device)).cpu()
    pages = case.storage.view(-1, 2, 32, 64)[:, 0]
    query = case.query.mul(case.scale).transpose(0, 1).unflatten(0, (2, 3))
    for head in range(2):
        keys = pages[case.table[head, :-3].long()].flatten(0, 1)[: case.n]
        past = attention.window_attention(query[head], keys, softcap, torch.empty(3, 16, case.n))[..., :300]
        expected = attention.combine_rows(past.clone(), rows)
        torch.testing.assert_close(actual[3 * head : 3 * head + 3], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("attend", [window_attention, reference])
def test_what_is_refused(device, attend):
    case = _case(torch.float32, 32, 64, 2, 2, 8, 100).to(device)
    for changed, message in [
        (case._replace(query=case.query.half()), "dtype"),
        (case._replace(query=case.query.repeat_interleave(2, 2)[..., ::2]), "adjacent"),
        (case._replace(query=case.query[:, :3]), "evenly"),
        (case._replace(n=8), "window"),
        (case._replace(rows="sum"), "rows must be mean, max or recent, not 'sum'"),
    ]:
        with pytest.raises(ValueError, match=message):
            attend(*changed)


def launches() -> Iterator[Callable[[], object]]:
    """Representative calls, to be compiled for GPUs."""
    for dtype, page_size, head_dim, group, window, softcap in [
        (torch.bfloat16, 32, 128, 4, 32, 0.0),
        (torch.bfloat16, 16, 64, 1, 1, 0.0),
        (torch.bfloat16, 64, 256, 2, 64, 50.0),
        (torch.float16, 32, 96, 7, 8, 0.0),
        (torch.float32, 32, 128, 4, 32, 0.0),
        (IN_8_BITS[1], 32, 128, 4, 32, 0.0),
    ]:
        case = _case(dtype, page_size, head_dim, 2, group, window, 100, softcap)
        for rows in ROWS:
            yield partial(window_attention, *case._replace(rows=rows))
