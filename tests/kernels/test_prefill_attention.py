"""The compiled kernel for prompts against its torch reference."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.stored import in_8_bits, make_pages, place
from vllm_kvevict.kernels.decode_attention import BatchRows
from vllm_kvevict.kernels.prefill_attention import PrefillAttention, reference, supports
from vllm_kvevict.kernels.quantise import Quantised, fields

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.int8: 1e-5}
"""By the dtype of entries; queries are fp32 where those are int8."""
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 192, 256)


class Case(NamedTuple):
    """Arguments of the kernel."""

    query: Tensor
    key: Tensor | Quantised
    value: Tensor | Quantised
    new_tokens: Tensor
    pages: Tensor | None = None
    page_size: int = 32
    prefixes: BatchRows | None = None
    tokens: Tensor | None = None
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What follows the output."""
        scale = self.options.get("scale", self.query.shape[2] ** -0.5)
        softcap, sinks = self.options.get("softcap", 0.0), self.options.get("sinks")
        return self.new_tokens, self.prefixes, self.tokens, scale, softcap, sinks

    def run(self) -> tuple[Tensor, Tensor]:
        """The output, and the logarithms of the sums; NaN where nothing is written."""
        output = torch.full(self.query.shape, torch.nan, dtype=self.query.dtype)
        log_sums = torch.full(self.query.shape[:2], torch.nan)
        kernel = PrefillAttention(self.query.dtype, self.pages, self.page_size)
        kernel(self.query, self.key, self.value, output, *self.arguments, log_sums)
        return output, log_sums

    def expected(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The same by the reference."""
        output = torch.full(self.query.shape, torch.nan, dtype=dtype)
        log_sums = torch.full(self.query.shape[:2], torch.nan)
        matrices = self.query, self.key, self.value, output
        reference(self.pages, self.page_size, *matrices, *self.arguments, log_sums)
        return output, log_sums

    def check(self) -> None:
        """That the kernel computes what the reference does."""
        tolerance = TOLERANCE[self.query.dtype]
        for found, expected in zip(self.run(), self.expected(), strict=True):
            torch.testing.assert_close(
                found.float(), expected, atol=tolerance, rtol=tolerance, equal_nan=True
            )


def _case(dtype, head_dim, heads, group, new_tokens, seed=0, model=None, **options) -> Case:
    """Random queries, keys and values that are views of one projection's output."""
    random = torch.Generator().manual_seed(seed)
    parts = [heads * group, heads, heads]
    model = model or (torch.float32 if dtype == torch.int8 else dtype)
    whole = torch.randn(sum(new_tokens), sum(parts), head_dim, generator=random).to(model)
    query, key, value = whole.split(parts, 1)
    if dtype == torch.int8:
        key, value = in_8_bits(key, value)
    return Case(query, key, value, torch.tensor(new_tokens, dtype=torch.int32), options=options)


def _behind(case: Case, prefixes: list[list[int]], page_size: int, seed: int = 0) -> Case:
    """The same behind prefixes of these lengths, by request and head; what is not written is NaN."""
    random = torch.Generator().manual_seed(seed)
    pairs = zip(prefixes, case.new_tokens.tolist(), strict=True)
    rows = place([[count + new for count in mine] for mine, new in pairs], page_size, random)
    keys = torch.randn(len(rows.arena), case.query.shape[2], page_size, generator=random)
    values = torch.randn(keys.mT.shape, generator=random)
    dtype = torch.int8 if isinstance(case.key, Quantised) else case.query.dtype
    pages = make_pages(dtype, keys.mT, values, rows, prefixes)
    return case._replace(pages=pages, page_size=page_size, prefixes=rows)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
def test_equals_the_reference(dtype, head_dim, group):
    """Prompts of less than a tile, a panel and a block, of just so many tokens, and of more."""
    _case(dtype, head_dim, 2, group, [1, 63, 64, 130, 513]).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim, page_size", [(16, 32), (64, 32), (80, 48), (128, 256), (64, 1024)])
@pytest.mark.parametrize("group", [1, 2, 7])
def test_behind_prefixes_equals_the_reference(dtype, head_dim, page_size, group):
    """As long as they like, in each head, or none."""
    case = _case(dtype, head_dim, 2, group, [1, 70, 5, 300])
    _behind(case, [[0, 3], [31, 700], [513, 512], [64, 1]], page_size).check()


SHAPES = st.fixed_dictionaries(
    {
        "head_dim": st.sampled_from(HEAD_DIMS),
        "heads": st.integers(1, 3),
        "group": st.integers(1, 8),
        "new_tokens": st.lists(st.integers(1, 300), min_size=1, max_size=3),
        "seed": st.integers(0, 1000),
        "scale": st.sampled_from([0.05, 0.1, 0.2]),
        "softcap": st.sampled_from([0.0, 5.0, 30.0]),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(TOLERANCE)), SHAPES, st.booleans(), st.booleans(), st.data())
def test_any_shape_equals_the_reference(dtype, shape, has_sinks, has_prefixes, data):
    case = _case(dtype, **shape)
    if has_sinks:
        sinks = torch.randn(case.query.shape[1], generator=torch.Generator().manual_seed(1))
        case = case._replace(options={**case.options, "sinks": 3 * sinks})
    if has_prefixes:
        length = st.integers(0, 600)
        rows = st.lists(length, min_size=shape["heads"], max_size=shape["heads"])
        requests = len(shape["new_tokens"])
        prefixes = data.draw(st.lists(rows, min_size=requests, max_size=requests))
        case = _behind(case, prefixes, data.draw(st.sampled_from([16, 32, 96])))
    case.check()


def _check_shapes(dtype) -> None:
    """Shapes with full and half-filled panels and tiles."""
    for head_dim, group in ((16, 1), (80, 3), (64, 2), (112, 7)):
        case = _case(dtype, head_dim, 2, group, [100, 7], softcap=20.0, sinks=torch.randn(2 * group))
        _behind(case, [[33, 40], [0, 600]], 32).check()
        _case(dtype, head_dim, 2, group, [150, 1]).check()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_width_equals_the_reference(lanes, dtype):
    _check_shapes(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_level_equals_the_reference(level, dtype):
    _check_shapes(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_that_sees_the_next_one_answers_otherwise(dtype):
    """What the tests above would find: here each token sees one entry too many, as if that were in its prefix."""
    case = _behind(_case(dtype, 64, 1, 2, [40, 50]), [[64], [96]], 32)
    lengths = case.prefixes.lengths.clone()
    lengths[case.prefixes.request_slots] += 1
    pages = case.pages.nan_to_num(0.5)
    if dtype == torch.int8:
        for field in fields(pages, 32):
            field.numbers[field.scales.isnan()] = 64
            field.scales.nan_to_num_(0.02)
    wrong = case._replace(pages=pages, prefixes=replace(case.prefixes, lengths=lengths))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(wrong.run()[0].float(), case.expected()[0], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_comes_later_does_not_matter(dtype):
    """To the last bit: a prompt's tokens answer as those of a prompt that ends with them."""
    case = _behind(_case(dtype, 64, 2, 2, [300]), [[70, 600]], 32)
    output, log_sums = case.run()
    for tokens in (1, 2, 3, 64, 99, 299):
        some = torch.tensor([tokens], dtype=torch.int32)
        rows = replace(case.prefixes, lengths=case.prefixes.lengths - (300 - tokens))
        found = case._replace(new_tokens=some, prefixes=rows).run()
        assert torch.equal(found[0][:tokens], output[:tokens])
        assert torch.equal(found[1][:tokens], log_sums[:tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_request_does_not_depend_on_its_batch_or_on_threads(lanes, dtype):
    new_tokens = [513, 3, 130]
    case = _behind(_case(dtype, 64, 2, 3, new_tokens), [[600, 0], [7, 900], [1, 2]], 32)
    together, _ = case.run()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(case.run()[0], together)
    finally:
        torch.set_num_threads(threads)
    ends = case.new_tokens.cumsum(0).tolist()
    for i, (end, tokens) in enumerate(zip(ends, new_tokens, strict=True)):
        rows = replace(case.prefixes, request_slots=case.prefixes.request_slots[i : i + 1])
        places = torch.arange(end - tokens, end)
        alone = case._replace(new_tokens=case.new_tokens[i : i + 1], prefixes=rows, tokens=places)
        assert torch.equal(alone.run()[0][places], together[places])


def test_tokens_may_be_anywhere_in_a_batch():
    case = _behind(_case(torch.bfloat16, 64, 2, 2, [5, 40]), [[40, 60], [7, 90]], 32)
    tokens = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:45]
    query, key, value = torch.randn(60, 8, 64).to(torch.bfloat16).split([4, 2, 2], 1)
    query[tokens], key[tokens], value[tokens] = case.query, case.key, case.value
    output, log_sums = case._replace(query=query, key=key, value=value, tokens=tokens).run()
    expected = case.run()
    assert torch.equal(output[tokens], expected[0]) and torch.equal(log_sums[tokens], expected[1])
    others = sorted({*range(60)} - {*tokens.tolist()})
    assert output[others].isnan().all() and log_sums[others].isnan().all()


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("group", [1, 16])
def test_entries_in_8_bits_behind_a_bfloat16_model(level, head_dim, group):
    case = _case(torch.int8, head_dim, 2, group, [70, 5], model=torch.bfloat16, softcap=20.0)
    case.check()
    _behind(case, [[31, 700], [64, 1]], 32).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 10.0])
def test_flat_and_peaked_weights(scale, dtype):
    case = _behind(_case(dtype, 64, 2, 2, [600], scale=scale), [[40, 700]], 32)
    for found, expected in zip(case.run(), case.expected(torch.float64), strict=True):
        torch.testing.assert_close(found.double(), expected.double(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sink", [-1e4, 0.0, 1e4])
def test_sinks_far_from_the_logits(sink):
    """Weights that leave the range of a float in one direction or the other."""
    case = _case(torch.float32, 64, 1, 2, [70], sinks=torch.full((2,), sink))
    output, log_sums = case.run()
    assert output.isfinite().all() and log_sums.isfinite().all()
    case.check()


def test_a_scale_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="must be positive, got 0"):
        _case(torch.float32, 64, 2, 1, [8], scale=0.0).run()


@pytest.mark.parametrize(
    "dtype, page_size, vectors, expected",
    [
        (torch.bfloat16, 32, 1, True),
        (torch.float32, 6, 3, True),
        (torch.float16, 32, 2, False),
        (torch.bfloat16, 5, 2, False),
        (torch.bfloat16, 32, 1.5, False),
    ],
)
def test_what_it_serves(lanes, dtype, page_size, vectors, expected):
    """Head sizes in whole vectors."""
    assert supports(dtype, page_size, int(vectors * lanes)) is expected
