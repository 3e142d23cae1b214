"""The compiled kernel against its torch reference."""

import pytest
import torch

from vllm_kvevict.kernels.decode_attention import DecodeAttention, reference, supports

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _case(dtype, page_size, head_dim, group, lengths, seed=0):
    """Random pages in random order; what lies behind a sequence's last entry is NaN."""
    random = torch.Generator().manual_seed(seed)
    width = -(-max(lengths) // page_size) + 1
    count = width * len(lengths)
    tables = torch.randperm(count, generator=random).int().view(len(lengths), width)
    keys = torch.randn(count, head_dim, page_size, generator=random)
    values = torch.randn(count, page_size, head_dim, generator=random)
    for table, length in zip(tables.tolist(), lengths, strict=True):
        last, used = divmod(length, page_size)
        keys[table[last], :, used:] = values[table[last], used:] = torch.nan
    pages = torch.cat([keys.flatten(1), values.flatten(1)], 1).to(dtype)
    query = torch.randn(len(lengths), group, head_dim, generator=random).to(dtype)
    return query, pages, torch.tensor(lengths, dtype=torch.int32), tables


def _run(query, pages, page_size, lengths, tables, scale):
    output = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
    DecodeAttention(pages, page_size)(query, output, lengths, tables, scale)
    return output


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 15])
def test_equals_the_reference(dtype, page_size, head_dim, group):
    lengths = [1, 31, 32, 33, 64, 200, 2047, 2048, 2049, 5000]
    query, pages, lengths, tables = _case(dtype, page_size, head_dim, group, lengths)
    output = _run(query, pages, page_size, lengths, tables, head_dim**-0.5)
    clean = pages.nan_to_num(0)
    expected = reference(query, clean, page_size, lengths, tables, head_dim**-0.5)
    torch.testing.assert_close(output.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_flat_and_peaked_weights(scale):
    query, pages, lengths, tables = _case(torch.float32, 32, 64, 2, [1, 40, 3000])
    output = _run(query, pages, 32, lengths, tables, scale)
    expected = reference(query.double(), pages.nan_to_num(0), 32, lengths, tables, scale)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


def test_a_sequence_does_not_depend_on_its_batch_or_on_threads():
    query, pages, lengths, tables = _case(torch.float32, 32, 64, 2, [5000, 7, 2100, 33, 900])
    together = _run(query, pages, 32, lengths, tables, 0.125)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(_run(query, pages, 32, lengths, tables, 0.125), together)
    finally:
        torch.set_num_threads(threads)
    for i in range(len(lengths)):
        alone = _run(query[i : i + 1], pages, 32, lengths[i : i + 1], tables[i : i + 1].contiguous(), 0.125)
        assert torch.equal(alone[0], together[i])


def test_order_of_pages_does_not_matter():
    query, pages, lengths, tables = _case(torch.bfloat16, 32, 64, 2, [1000, 3000])
    ascending = torch.empty_like(pages)
    ascending[: tables.numel()] = pages[tables.flatten().long()]
    ordered = torch.arange(tables.numel(), dtype=torch.int32).view_as(tables)
    assert torch.equal(
        _run(query, pages, 32, lengths, tables, 0.125), _run(query, ascending, 32, lengths, ordered, 0.125)
    )


def test_a_query_may_be_a_view():
    query, pages, lengths, tables = _case(torch.float32, 32, 64, 4, [100, 50])
    wide = torch.randn(2, 6, 64)
    wide[:, :4] = query
    assert torch.equal(
        _run(wide[:, :4], pages, 32, lengths, tables, 0.125), _run(query, pages, 32, lengths, tables, 0.125)
    )


@pytest.mark.parametrize(
    "dtype, page_size, head_dim, expected",
    [
        (torch.bfloat16, 32, 64, True),
        (torch.float32, 96, 32, True),
        (torch.float16, 32, 64, False),
        (torch.bfloat16, 16, 64, False),
        (torch.bfloat16, 32, 80, False),
    ],
)
def test_what_it_can_read(dtype, page_size, head_dim, expected):
    assert supports(dtype, page_size, head_dim) is expected
