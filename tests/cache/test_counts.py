"""PageCount against rows that are really counted."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.cache.counts import PageCount


def pages_of(lengths: list[int], page_size: int) -> int:
    return sum(math.ceil(length / page_size) for length in lengths)


def residues_of(lengths: list[int], page_size: int) -> list[int]:
    return [sum(length % page_size == residue for length in lengths) for residue in range(page_size)]


@settings(deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 3, 8, 32]),
    lengths=st.lists(st.integers(0, 100), min_size=1, max_size=40),
    tokens=st.integers(0, 1000),
    more=st.integers(0, 200),
)
def test_every_further_token_grows_every_row(
    page_size: int, lengths: list[int], tokens: int, more: int
) -> None:
    count = PageCount.from_residues(pages_of(lengths, page_size), tokens, residues_of(lengths, page_size))
    assert count.rows == len(lengths)
    assert count.at(tokens + more) == pages_of([length + more for length in lengths], page_size)


@given(page_size=st.sampled_from([1, 2, 32]), rows=st.integers(1, 300), tokens=st.integers(0, 500))
def test_start_stores_nothing(page_size: int, rows: int, tokens: int) -> None:
    assert PageCount.start(rows, page_size).at(tokens) == rows * math.ceil(tokens / page_size)


@pytest.mark.parametrize(
    "length, pages",
    [(1, [1, 1, 1, 1, 2, 2]), (3, [1, 1, 2, 2, 2, 2]), (4, [1, 2, 2, 2, 2, 3])],
)
def test_a_row_takes_a_page_with_the_first_token_beyond_its_last(length: int, pages: list[int]) -> None:
    count = PageCount.from_residues(1, length, residues_of([length], 4))
    assert [count.at(length + more) for more in range(6)] == pages
