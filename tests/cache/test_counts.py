"""PageCount against rows that are really counted."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvevict.cache.counts import PageCount


def pages_of(lengths: list[int], page_size: int) -> int:
    return sum(math.ceil(length / page_size) for length in lengths)


def residues_of(lengths: list[int], page_size: int) -> list[int]:
    return [sum(length % page_size == residue for length in lengths) for residue in range(page_size)]


sizes = st.sampled_from([1, 2, 3, 8, 32])
rows_of_lengths = st.lists(st.integers(0, 100), min_size=1, max_size=40)


@settings(deadline=None)
@given(page_size=sizes, lengths=rows_of_lengths, tokens=st.integers(0, 1000), more=st.integers(0, 200))
def test_every_further_token_grows_every_row(
    page_size: int, lengths: list[int], tokens: int, more: int
) -> None:
    count = PageCount.from_residues(pages_of(lengths, page_size), tokens, residues_of(lengths, page_size))
    assert count.rows == len(lengths)
    assert count.at(tokens + more) == pages_of([length + more for length in lengths], page_size)


@given(page_size=st.sampled_from([1, 2, 32]), rows=st.integers(1, 300), tokens=st.integers(0, 500))
def test_start_stores_nothing(page_size: int, rows: int, tokens: int) -> None:
    assert PageCount.start(rows, page_size).at(tokens) == rows * math.ceil(tokens / page_size)
    assert PageCount.start(rows, page_size).entries == 0


@given(page_size=sizes, lengths=rows_of_lengths)
def test_a_count_knows_the_entries_of_all_rows(page_size: int, lengths: list[int]) -> None:
    count = PageCount.from_residues(pages_of(lengths, page_size), 7, residues_of(lengths, page_size))
    assert count.entries == sum(lengths)


def exceeds(count: PageCount, lengths: list[int], more: int) -> bool:
    """Whether rows hold more than ``count`` says, after so many further tokens."""
    held = pages_of([length + more for length in lengths], count.page_size)
    return held > count.at(count.tokens + more)


@settings(deadline=None)
@given(page_size=sizes, lengths=rows_of_lengths, tokens=st.integers(0, 1000), more=st.integers(0, 200))
def test_no_rows_exceed_the_bound(page_size: int, lengths: list[int], tokens: int, more: int) -> None:
    rows, entries = len(lengths), sum(lengths)
    count = PageCount.most(entries, tokens, rows, page_size)
    assert (count.tokens, count.rows, count.page_size) == (tokens, rows, page_size)
    assert count.at(tokens + more) == (entries + rows * (more + page_size - 1)) // page_size
    assert not exceeds(count, lengths, more)


@given(
    page_size=sizes,
    rows=st.integers(1, 40),
    pages=st.integers(0, 9),
    rest=st.integers(0, 31),
    more=st.integers(0, 70),
)
def test_some_rows_reach_the_bound(page_size: int, rows: int, pages: int, rest: int, more: int) -> None:
    """All but one end with the first entry of a page then; so any bound that says less would be exceeded."""
    lengths = [(1 - more) % page_size + pages * page_size] * rows
    lengths[0] += rest % page_size
    count = PageCount.most(sum(lengths), 0, rows, page_size)
    assert count.at(more) == pages_of([length + more for length in lengths], page_size)
    assert exceeds(PageCount(count.pages - 1, 0, rows, count.gains), lengths, more)
