"""What all ranks say of an eviction becomes one."""

import dataclasses

from tests.schedules.ranks import eviction_of_eight_ranks, part
from vllm_kvevict.schedules.reports import join


def test_a_kv_head_counts_once_however_many_ranks_hold_it() -> None:
    eviction = eviction_of_eight_ranks()
    assert eviction.heads == [[90, 110], [120, 80]]
    assert (eviction.kept, eviction.stored) == (400, 4 * 500)
    # Each of the eight ranks has pages of its own, and the request waits for the slowest.
    assert (eviction.pinned, eviction.kept_ratio) == (0, 0.2)
    assert (eviction.freed_pages, eviction.held_pages) == (8 * 24, 8 * 32)
    assert (eviction.decision_seconds, eviction.compaction_seconds) == (7, 14)


def test_ranks_with_several_layers_and_heads() -> None:
    parts = [part(2, 0, [[5, 6]]), part(0, 2, [[3, 4], [7, 8]]), part(0, 0, [[1, 2], [5, 6]])]
    assert join("r", 500, [*parts, part(2, 2, [[7, 8]])]).heads == [[1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 8]]


def test_what_was_pinned_is_no_part_of_the_share_that_was_kept() -> None:
    kept, pinned = {0: [[90]], 1: [[110]]}, {0: [[60]], 1: [[40]]}
    stored = {head: [[rows[0][0] + 100]] for head, rows in pinned.items()}
    parts = [
        dataclasses.replace(part(0, head, kept[head]), stored=stored[head], pinned=pinned[head])
        for head in (0, 0, 1, 1)
    ]
    eviction = join("r", 500, parts)
    assert (eviction.kept, eviction.stored, eviction.pinned) == (200, 300, 100)
    assert eviction.kept_ratio == 0.5
