"""What is said of a conversation's turns: how much of each is kept, and which of them a branch shares."""

from dataclasses import replace

import pytest

from tests.inspection.pages import conversation
from vllm_kvevict.inspect.turns import lines_of


def cells(line):
    return line.replace(" %", "%").split()


def test_a_line_for_each_turn():
    inspection = conversation()
    names, first, second, rest = map(cells, lines_of(inspection))
    assert names == ["turn", "tokens", "ada-snapkv", "lava", "snapkv"]
    assert [first[:2], second[:2], rest[:2]] == [["1", "40"], ["2", "50"], ["rest", "40"]]
    for column, kept in enumerate(inspection.kept, 2):
        masks = kept.mask[:, :, :40], kept.mask[:, :, 40:90], kept.mask[:, :, 90:]
        assert [line[column] for line in (first, second, rest)] == [
            f"{100 * mask.mean():.1f}%" for mask in masks
        ]
    # A control: another end, other shares.
    assert lines_of(replace(inspection, turns=(41, 90)))[1] != lines_of(inspection)[1]


@pytest.mark.parametrize(
    ("turns", "differs_at", "shared"),
    [
        ((40, 90), 90, 2),
        ((40, 90), 89, 1),
        ((40, 90), 0, 0),
        ((40, 91), 130, 1),
        ((39, 90), 130, 0),
        ((40,), 130, 1),
    ],
)
def test_turns_are_shared_that_end_alike_behind_the_same_tokens(turns, differs_at, shared):
    first = conversation()
    ids = [*first.prompt.ids[:differs_at], *(5 for _ in first.prompt.ids[differs_at:])]
    branch = replace(first, turns=turns, prompt=replace(first.prompt, ids=ids))
    assert replace(first, branch=branch).shared_turns == shared
