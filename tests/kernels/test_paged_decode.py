"""The decode kernels for GPUs against their torch reference."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.stored import IN_8_BITS, forget, in_8_bits, pages_in_8_bits, place, without_last
from vllm_kvevict.kernels import paged_decode
from vllm_kvevict.kernels.decode_attention import BatchRows, numbers
from vllm_kvevict.kernels.paged_decode import PagedDecode, reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SMS = 2
"""A device so small that a row has 4 parts only: long rows fill them soon."""


class Case(NamedTuple):
    """Arguments of the kernels."""

    pages: Tensor
    page_size: int
    query: Tensor
    key: Tensor
    value: Tensor
    rows: BatchRows
    tokens: Tensor | None = None
    scale: float = 0.125
    softcap: float = 0.0

    def kernel(self, num_sms: int = SMS, max_requests: int = 8) -> PagedDecode:
        """Over these pages."""
        heads = numbers(self.key).shape[1]
        sizes = self.page_size, max_requests, heads, self.query.shape[1] // heads
        return PagedDecode(self.pages, *sizes, self.softcap, num_sms, self.query.dtype)

    def run(self, kernel: PagedDecode | None = None) -> tuple[Tensor, Tensor]:
        """Output and pages afterwards; these pages stay as they are."""
        case = self._replace(pages=self.pages.clone())
        kernel = kernel or case.kernel()
        kernel.pages = case.pages
        output = torch.full_like(self.query, torch.nan)
        kernel(self.query, self.key, self.value, output, self.rows, self.tokens, self.scale)
        return output, case.pages

    def expected(self) -> tuple[Tensor, Tensor]:
        """The same by the reference, the output in fp32."""
        pages = self.pages.clone()
        output = torch.full(self.query.shape, torch.nan, device=pages.device)
        more = self.rows, self.tokens, self.scale, self.softcap
        reference(pages, self.page_size, self.query, self.key, self.value, output, *more)
        return output, pages

    def check(self, kernel: PagedDecode | None = None) -> None:
        """Nothing but the new entries may be written."""
        output, pages = self.run(kernel)
        expected, expected_pages = self.expected()
        limit = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(output.float(), expected, atol=limit, rtol=limit, equal_nan=True)
        torch.testing.assert_close(pages, expected_pages, atol=0, rtol=0, equal_nan=True)

    def only(self, which: list[int]) -> "Case":
        """Some requests of the batch."""
        rows = replace(self.rows, request_slots=self.rows.request_slots[which])
        return self._replace(query=self.query[which], key=self.key[which], value=self.value[which], rows=rows)


def _case(lengths, device, dtype=torch.float32, page_size=32, head_dim=64, group=2, **more) -> Case:
    """Random pages in random order, two layers, slots that are not in order; what is behind a row is NaN.

    ``lengths`` are of the requests' heads, the new entry included; ``dtype`` can be that of queries and that of pages.
    """
    dtype, stored_as = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    random = torch.Generator().manual_seed(0)
    requests, heads = len(lengths), len(lengths[0])
    stored = place(lengths, page_size, random)
    pages = torch.randn(len(stored.arena), 2, page_size, head_dim, generator=random)
    forget(stored, without_last(lengths), *pages.unbind(1))
    query = torch.randn(requests, heads * group, head_dim, generator=random)
    new = torch.randn(2, requests, heads, head_dim, generator=random)
    query, *new = (x.to(device, dtype) for x in (query, *new))
    if stored_as == torch.int8:
        pages, new = pages_in_8_bits(*pages.unbind(1)), in_8_bits(*new)
    tables = (stored.arena, stored.starts, stored.lengths, stored.request_slots)
    rows = BatchRows(*(x.to(device) for x in tables), first=heads)
    return Case(pages.flatten(1).to(device, stored_as), page_size, query, *new, rows, **more)


@pytest.mark.parametrize("page_size, head_dim", [(16, 96), (32, 64), (32, 128), (64, 80), (16, 256)])
@pytest.mark.parametrize("dtype", [*TOLERANCE, *IN_8_BITS])
def test_all_kinds_of_pages(dtype, page_size, head_dim, device):
    lengths = [(1, page_size + 1), (page_size - 1, page_size), (3 * page_size + 3, 270)]
    _case(lengths, device, dtype, page_size, head_dim).check()


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 16, 20])
def test_groups_of_query_heads(group, device):
    _case([(33, 270), (64, 1)], device, group=group).check()


@pytest.mark.parametrize("lengths", [(256, 257), (511, 512), (513, 1024), (1025, 1500)])
def test_rows_of_several_parts(lengths, device):
    _case([lengths], device, page_size=64, group=4).check()


@pytest.fixture
def few_programs(monkeypatch):
    """Fewer than parts of these short rows."""
    monkeypatch.setattr(paged_decode, "_PER_SM", 4)


@pytest.mark.usefixtures("few_programs")
def test_programs_take_parts_in_turn(device):
    """There are more parts than programs per row."""
    case = _case([(1, 30), (700, 2000), (60, 300)], device, page_size=64)
    kernel = case.kernel(num_sms=8)
    assert (kernel.parts, kernel._programs(3)) == (8, 6)
    case.check(kernel)


@pytest.mark.parametrize("scale, softcap", [(0.0, 0.0), (0.0, 5.0), (1.0, 50.0), (30.0, 0.0), (30.0, 50.0)])
def test_flat_and_peaked_weights(scale, softcap, device):
    _case([(1, 40), (300, 7)], device, scale=scale, softcap=softcap).check()


@pytest.mark.usefixtures("few_programs")
def test_a_request_does_not_depend_on_its_batch(device):
    """Not on its mates, nor on the number of programs, which follows from that of requests."""
    case = _case([(1, 31), (32, 33), (64, 200), (300, 1100)], device)
    kernel = case.kernel(num_sms=8)
    together, _ = case.run(kernel)
    for which in ([0], [3], [3, 1]):
        assert torch.equal(case.only(which).run(kernel)[0], together[which])
    assert kernel._programs(1) > kernel._programs(4)
    assert torch.equal(case.run(kernel)[0], together)


def test_what_is_left_in_the_workspace_does_not_matter(device):
    case = _case([(40, 600), (1, 300)], device)
    kernel = case.kernel()
    kernel._partial.fill_(torch.nan)
    kernel._log_sums.fill_(torch.nan)
    case.check(kernel)


def test_requests_that_are_skipped(device):
    """A negative slot pads the batch of a CUDA graph; the slot before the first one is full of wild values."""
    case = _case([(5, 40), (300, 7), (64, 1), (3, 3)], device)
    slots = case.rows.request_slots.clone()
    slots[[0, 2]] = torch.tensor([-1, -9], device=device)
    wild = [torch.cat([torch.full_like(x[:1], 2**30), x]) for x in (case.rows.starts, case.rows.lengths)]
    rows = replace(case.rows, starts=wild[0][1:], lengths=wild[1][1:], request_slots=slots)
    case = case._replace(rows=rows)
    case.query[[0, 2]] = case.key[[0, 2]] = torch.nan
    case.check()
    assert (case.run()[0][[0, 2]] == 0).all()
    everyone = case._replace(rows=replace(rows, request_slots=torch.full_like(slots, -1)))
    output, pages = everyone.run()
    assert (output == 0).all()
    assert torch.equal(pages.nan_to_num(), case.pages.nan_to_num())


def test_tokens_may_be_anywhere_in_a_batch_and_lie_apart(device):
    """Query, key and value are parts of one projection's output, among tokens of other requests."""
    case = _case([(1, 31), (32, 300), (5, 64)], device, group=4)
    tokens = torch.tensor([6, 0, 3], device=device)
    query, key, value = torch.randn(9, 8 + 2 + 2, 64, device=device).split([8, 2, 2], 1)
    query[tokens], key[tokens], value[tokens] = case.query, case.key, case.value
    scattered = case._replace(query=query, key=key, value=value, tokens=tokens)
    output, pages = scattered.run()
    expected, expected_pages = case.run()
    assert torch.equal(output[tokens], expected)
    assert torch.equal(pages.nan_to_num(), expected_pages.nan_to_num())
    assert output[[1, 2, 4, 5, 7, 8]].isnan().all()


def test_the_arena_may_move_between_calls(device):
    """The second call has the same arguments as the first, as a replay has, but other pages in another place."""
    case = _case([(40, 600), (1, 300)], device)
    kernel = case.kernel()
    by_address = case._replace(rows=replace(case.rows, arena=kernel.arena_address))
    kernel.set_arena(case.rows.arena)
    assert torch.equal(by_address.run(kernel)[0], case.run()[0])

    moved = case.rows.arena.roll(1)
    kernel.set_arena(moved)
    elsewhere = case._replace(pages=torch.empty_like(case.pages))
    elsewhere.pages[moved.long()] = case.pages[case.rows.arena.long()]
    assert torch.equal(elsewhere._replace(rows=by_address.rows).run(kernel)[0], case.run()[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_graph_sees_new_values(device):
    """Other requests, lengths, pages and padding, and an arena elsewhere, without recording anew."""
    case = _case([(40, 600), (1, 300), (64, 65)], device, torch.bfloat16)
    kernel = case.kernel()
    kernel.set_arena(case.rows.arena)
    rows = replace(case.rows, arena=kernel.arena_address, request_slots=case.rows.request_slots.clone())
    output = torch.empty_like(case.query)
    arguments = case.query, case.key, case.value, output, rows, None, case.scale
    kernel(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(*arguments)
    for slots in (
        case.rows.request_slots,
        case.rows.request_slots.flip(0),
        torch.full_like(case.rows.request_slots, -1),
    ):
        rows.request_slots.copy_(slots)
        kernel.set_arena(case.rows.arena.clone())
        output.fill_(torch.nan)
        graph.replay()
        expected, _ = case._replace(rows=replace(case.rows, request_slots=slots)).expected()
        torch.testing.assert_close(output.float(), expected, atol=1e-2, rtol=1e-2)


def test_what_is_refused(device):
    case = _case([(1, 31), (32, 300)], device)
    with pytest.raises(ValueError, match="2 requests, but there is a workspace for 1"):
        case.run(case.kernel(max_requests=1))
    with pytest.raises(ValueError, match=r"expected \[tokens, 4, 64\]"):
        case._replace(query=case.query[:, :2]).run(case.kernel())
    with pytest.raises(ValueError, match="side by side"):
        case._replace(key=case.key.repeat_interleave(2, 2)[..., ::2]).run()


def launches() -> Iterator[Callable[[], object]]:
    """Representative calls, to be compiled for GPUs."""
    for dtype, page_size, head_dim, group, softcap in [
        (torch.bfloat16, 32, 128, 4, 0.0),
        (torch.bfloat16, 16, 256, 2, 50.0),
        (torch.bfloat16, 64, 64, 20, 0.0),
        (torch.float16, 32, 80, 7, 0.0),
        (torch.float32, 32, 128, 4, 0.0),
        (torch.float32, 32, 256, 16, 0.0),
        (IN_8_BITS[1], 32, 128, 4, 0.0),
    ]:
        case = _case([(40, 3), (5, 6)], "cpu", dtype, page_size, head_dim, group, softcap=softcap)
        kernel = case.kernel(num_sms=132)
        by_address = replace(case.rows, arena=kernel.arena_address)
        yield partial(case._replace(rows=by_address).run, kernel)
        yield partial(case._replace(tokens=torch.arange(2)).run, kernel)
