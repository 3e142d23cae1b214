"""The compiled kernel against its torch reference."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.stored import in_8_bits, make_pages, place, without_last
from vllm_kvevict.kernels.decode_attention import BatchRows, DecodeAttention, numbers, reference, supports
from vllm_kvevict.kernels.quantise import Quantised, fields

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.int8: 1e-5}
"""By the dtype of pages; queries are fp32 where those are int8."""
LENGTHS = ((1, 31), (32, 33), (64, 200), (2047, 2048), (2049, 4100))
"""Of the requests' heads, the new entry included."""


class Case(NamedTuple):
    """Arguments of the kernel."""

    pages: Tensor
    page_size: int
    query: Tensor
    key: Tensor | Quantised
    value: Tensor | Quantised
    rows: BatchRows
    tokens: Tensor | None
    scale: float

    def run(self, tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """Output and pages afterwards; what is behind a row's last entry stays NaN."""
        pages = self.pages.clone()
        shape = (tokens or len(self.query), *self.query.shape[1:])
        output = torch.full(shape, torch.nan, dtype=self.query.dtype)
        new_tokens = self.rows.new_tokens
        most = 1 if new_tokens is None else int(new_tokens.max())
        kernel = DecodeAttention(pages, self.page_size, most, self.query.dtype)
        kernel(self.query, self.key, self.value, output, self.rows, self.tokens, self.scale)
        return output, pages

    def expected(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The same by the reference."""
        pages, output = self.pages.clone(), torch.full(self.query.shape, torch.nan, dtype=dtype)
        reference(
            pages,
            self.page_size,
            self.query,
            self.key,
            self.value,
            output,
            self.rows,
            self.tokens,
            self.scale,
        )
        return output, pages

    def check(self) -> None:
        """That the kernel computes what the reference does, and writes nothing but the new entries."""
        output, pages = self.run()
        expected, expected_pages = self.expected()
        tolerance = max(TOLERANCE[x.dtype] for x in (self.query, self.pages))
        torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(pages, expected_pages, atol=0, rtol=0, equal_nan=True)

    def one_by_one(self) -> tuple[Tensor, Tensor]:
        """The same as :meth:`run`, a call for each new token of a request."""
        pages, rows = self.pages.clone(), self.rows
        output = torch.full(self.query.shape, torch.nan, dtype=self.query.dtype)
        kernel = DecodeAttention(pages, self.page_size, dtype=self.query.dtype)
        new_tokens = rows.new_tokens.tolist()
        ends = rows.new_tokens.cumsum(0)
        for number in range(max(new_tokens)):
            which = torch.tensor([i for i, count in enumerate(new_tokens) if number < count])
            behind = rows.new_tokens[which] - number - 1
            lengths = rows.lengths.clone()
            lengths[rows.request_slots[which]] -= behind.unsqueeze(1)
            now = replace(rows, lengths=lengths, request_slots=rows.request_slots[which], new_tokens=None)
            tokens = ends[which] - behind - 1
            kernel(self.query, self.key, self.value, output, now, tokens, self.scale)
        return output, pages


def _with_new_tokens(case: Case, new_tokens: list[int]) -> Case:
    """The same entries with more of them new."""
    total = sum(new_tokens)
    random = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(total, *numbers(x).shape[1:], generator=random).to(case.query.dtype)
        for x in (case.query, case.key, case.value)
    )
    if case.pages.dtype == torch.int8:
        key, value = in_8_bits(key, value)
    rows = replace(case.rows, new_tokens=torch.tensor(new_tokens, dtype=torch.int32))
    return case._replace(query=query, key=key, value=value, rows=rows)


def _model(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.int8 else dtype


def _case(
    dtype, page_size, head_dim, group, lengths=LENGTHS, layer=1, scale=None, seed=0, model=None
) -> Case:
    """Random pages in random order, two layers, slots that are not in order; unwritten entries are NaN."""
    random = torch.Generator().manual_seed(seed)
    requests, heads = len(lengths), len(lengths[0])
    rows = place(lengths, page_size, random, layer)
    keys = torch.randn(len(rows.arena), head_dim, page_size, generator=random)
    values = torch.randn(len(rows.arena), page_size, head_dim, generator=random)
    pages = make_pages(dtype, keys.mT, values, rows, without_last(lengths))
    model = model or _model(dtype)
    query = torch.randn(requests, heads * group, head_dim, generator=random).to(model)
    new = torch.randn(2, requests, heads, head_dim, generator=random).to(model)
    new = in_8_bits(*new) if dtype == torch.int8 else new
    return Case(pages, page_size, query, *new, rows, None, head_dim**-0.5 if scale is None else scale)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 15])
def test_equals_the_reference(dtype, page_size, head_dim, group):
    _case(dtype, page_size, head_dim, group).check()


def _check_shapes(dtype) -> None:
    """Shapes with full and half-filled pairs of blocks, on one and on several passes over the query heads."""
    for page_size, head_dim, group in ((32, 32, 1), (64, 96, 3), (32, 128, 7), (128, 256, 4)):
        _case(dtype, page_size, head_dim, group).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_width_equals_the_reference(lanes, dtype):
    _check_shapes(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_level_equals_the_reference(level, dtype):
    _check_shapes(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_head_sizes_that_only_narrow_vectors_divide(lanes, dtype):
    assert supports(_model(dtype), 32, 80) is (lanes <= 8)
    if lanes <= 8:
        _case(dtype, 32, 80, 2).check()


DRAFTED = ((2, 31), (40, 33), (64, 200), (2047, 2048), (2049, 4100), (2050, 7))
NEW_TOKENS = [2, 8, 1, 5, 3, 7]
"""Some start a page, some cross from one to the next, and one from what a thread takes to what the next takes."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [32, 96, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_several_new_tokens_equal_the_reference(dtype, head_dim, group):
    _with_new_tokens(_case(dtype, 32, head_dim, group, DRAFTED), NEW_TOKENS).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size, group", [(32, 1), (64, 2), (32, 5)])
def test_several_new_tokens_equal_one_after_the_other(lanes, dtype, page_size, group):
    """To the last bit, whatever comes after a token; so drafts do not change what a request answers."""
    case = _with_new_tokens(_case(dtype, page_size, 64, group, DRAFTED), NEW_TOKENS)
    output, pages = case.run()
    expected, expected_pages = case.one_by_one()
    assert torch.equal(output, expected)
    assert torch.equal(pages.nan_to_num(), expected_pages.nan_to_num())


def test_a_token_that_sees_those_after_it_answers_otherwise():
    """What the two tests above would find: here the last entry is there when the token before it attends."""
    case = _with_new_tokens(_case(torch.float32, 32, 64, 2, [(40, 60)]), [2])
    output, pages = case.run()
    lengths = case.rows.lengths
    seeing = case._replace(pages=pages, rows=replace(case.rows, lengths=lengths, new_tokens=None))
    wrong = seeing._replace(query=case.query[:1], key=case.key[1:], value=case.value[1:]).run()[0]
    assert (wrong[0] - output[0]).abs().max() > 1e-2


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("group", [1, 16])
def test_pages_in_8_bits_behind_a_bfloat16_model(level, head_dim, group):
    case = _case(torch.int8, 32, head_dim, group, model=torch.bfloat16)
    case.check()
    _with_new_tokens(case, [1, 3, 8, 2, 5]).check()


@pytest.mark.parametrize("which", [0, 1])
def test_a_scale_that_is_a_little_off_is_found(which):
    """What the tests of pages in 8 bits would find, of a key or a value."""
    case = _case(torch.int8, 32, 64, 2, [(40, 60)])
    wrong = case._replace(pages=case.pages.clone())
    fields(wrong.pages, 32)[which].scales[:] *= 1.01
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(wrong.run()[0], case.expected()[0], atol=1e-5, rtol=1e-5)


def test_keys_and_values_must_be_quantised_alike():
    case = _case(torch.int8, 32, 64, 2)
    with pytest.raises(ValueError, match="alike"):
        case._replace(value=case.value.numbers.float()).run()
    with pytest.raises(ValueError, match="not like them"):
        case._replace(key=case.key.numbers).run()
    apart = Quantised(case.key.numbers, case.key.scales.repeat_interleave(2, 1)[:, ::2])
    with pytest.raises(ValueError, match="scales must lie side by side"):
        case._replace(key=apart).run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_flat_and_peaked_weights(scale, dtype):
    case = _case(dtype, 32, 64, 2, [(1, 40), (3000, 7)], scale=scale)
    torch.testing.assert_close(case.run()[0].double(), case.expected(torch.float64)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_request_does_not_depend_on_its_batch_or_on_threads(lanes, dtype):
    case = _case(dtype, 32, 64, 2)
    together, _ = case.run()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(case.run()[0], together)
    finally:
        torch.set_num_threads(threads)
    for i in range(len(LENGTHS)):
        one = slice(i, i + 1)
        alone = case._replace(
            query=case.query[one],
            key=case.key[one],
            value=case.value[one],
            rows=replace(case.rows, request_slots=case.rows.request_slots[one]),
        )
        assert torch.equal(alone.run()[0], together[one])


def test_tokens_may_be_anywhere_in_a_batch_and_lie_apart():
    """Query, key and value are parts of one projection's output, among tokens of other requests."""
    case = _case(torch.float32, 32, 64, 4)
    tokens = torch.tensor([6, 0, 3, 8, 7])
    whole = torch.randn(9, 8 + 2 + 2, 64)
    query, key, value = whole.split([8, 2, 2], 1)
    query[tokens], key[tokens], value[tokens] = case.query, case.key, case.value
    output, pages = case._replace(query=query, key=key, value=value, tokens=tokens).run()
    expected, expected_pages = case.run()
    assert torch.equal(output[tokens], expected)
    assert torch.equal(pages.nan_to_num(), expected_pages.nan_to_num())
    others = sorted({*range(9)} - {*tokens.tolist()})
    assert output[others].isnan().all()


def test_heads_that_lie_apart_are_refused():
    case = _case(torch.float32, 32, 64, 2)
    with pytest.raises(ValueError, match="side by side"):
        case._replace(query=case.query.repeat_interleave(2, 1)[:, ::2]).run()


@pytest.mark.parametrize(
    "dtype, page_size, blocks, expected",
    [
        (torch.bfloat16, 32, 2, True),
        (torch.float32, 96, 1, True),
        (torch.float16, 32, 2, False),
        (torch.bfloat16, 4, 2, False),
        (torch.bfloat16, 32, 1.5, False),
    ],
)
def test_what_it_can_read(lanes, dtype, page_size, blocks, expected):
    """Head sizes in blocks of two vectors."""
    assert supports(dtype, page_size, int(blocks * 2 * lanes)) is expected
