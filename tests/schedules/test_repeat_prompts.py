"""The tokens that ask a model to repeat a chunk of its prompt."""

import pytest

from vllm_kvevict.schedules.repeat_prompts import HINT, RepeatPrompts

PROMPTS = RepeatPrompts((1, 2), (3,), (4, 5))


@pytest.mark.parametrize(
    "lo, hi, rows",
    [
        (0, 3, [1, 2, 100, 101, 102]),
        (20, 22, [3, *range(112, 120), 4, 5, 120, 121]),
        (8, 9, [3, *range(100, 108), 4, 5, 108]),
        (5, 6, [3, *range(100, 105), 4, 5, 105]),  # fewer tokens than a hint has
    ],
)
def test_rows_of_a_chunk(lo, hi, rows):
    assert PROMPTS.rows(range(100, 130), lo, hi) == rows
    assert len(rows) - (hi - lo) <= PROMPTS.overhead == 1 + HINT + 2


def test_the_longer_form_is_the_overhead():
    assert RepeatPrompts((1,) * 30, (), ()).overhead == 30
    assert RepeatPrompts((), (), ()).overhead == HINT
    assert RepeatPrompts((), (), ()).rows(range(100), 20, 22) == [*range(12, 20), 20, 21]
