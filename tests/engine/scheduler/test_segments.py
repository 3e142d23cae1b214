"""Which uncompressed prefixes the scheduler knows: against a plain list of all that was stored."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from unittest import mock

import pytest

from vllm_kvevict.engine.scheduler.books import Books
from vllm_kvevict.engine.scheduler.keys import unit_keys
from vllm_kvevict.engine.scheduler.nodes import Segment
from vllm_kvevict.engine.scheduler.outbox import Outbox
from vllm_kvevict.engine.scheduler.shared.segments import SegmentCache
from vllm_kvevict.schedules.base import RankCapacity

COLUMNS = 4
"""Of a unit."""
UNIT = 2 * COLUMNS
"""Pages of a unit, with two rows."""


def make(longest: int = 2, most: int = 100) -> SegmentCache:
    books = Books([RankCapacity(10**6, 0, 1, 2, 1, 2)], mock.Mock())
    return SegmentCache(COLUMNS, longest * COLUMNS, most, Outbox(), books)


def keys(prompt: str):
    """A prompt has a unit for each letter; a block's hash stands for all before it."""
    return unit_keys([prompt[: end + 1] for end in range(len(prompt))], 1)


def store(cache: SegmentCache, prompt: str, name: str = "a") -> Segment | None:
    """Store what of a prompt is not there yet, as a request that ends does; the step is over after that."""
    found = cache.find(keys(prompt), len(prompt))
    parent, start = found or (None, 0)
    last = cache.store(name, parent, keys(prompt), start, len(prompt) * COLUMNS)
    cache.outbox.take_back(name)
    cache.new_step_starts()
    return last


def found(cache: SegmentCache, prompt: str) -> int:
    """Units of a prompt that are there."""
    hit = cache.find(keys(prompt), len(prompt))
    return hit[1] // COLUMNS if hit else 0


def use(cache: SegmentCache, prompt: str) -> None:
    """What is there of a prompt counts as used."""
    last, _ = cache.find(keys(prompt), len(prompt))
    cache.touch(last)


def check(cache: SegmentCache, loans: Sequence[tuple[Segment, bool]] = ()) -> None:
    """Counters say what the segments say."""
    cache.check(segment for segment, _ in loans)
    segments = list(cache)
    lasting = Counter(part for segment, to_the_end in loans if to_the_end for part in segment.chain())
    assert {x: x.lasting_refs for x in segments} == {x: lasting[x] for x in segments}
    assert cache.held == [2 * sum(x.columns for x in segments)]
    assert cache.used() == [2 * sum(x.columns for x in segments if x.refs)]
    assert cache.used(to_the_end=True) == [2 * sum(x.columns for x in lasting)]
    assert all(0 < x.columns <= cache._longest for x in segments)


def test_the_longest_common_prefix_is_found():
    cache = make()
    store(cache, "abcdefg")
    store(cache, "abcxy")
    assert [found(cache, p) for p in ("abcdefgh", "abcdx", "abcxyz", "abx", "x", "")] == [7, 4, 5, 2, 0, 0]
    assert found(cache, "abcdefg"[:3]) == 3
    last, columns = cache.find(keys("abcxyz"), 6)
    assert [number for number, _ in last.parts(columns)] == [1, 2, 5, 6][: len(list(last.chain()))]
    assert sum(part for _, part in last.parts(columns)) == 5 * COLUMNS
    check(cache)


def test_what_a_step_makes_is_found_after_it():
    cache = make()
    cache.store("a", None, keys("abc"), 0, 3 * COLUMNS)
    assert found(cache, "abc") == 0 and cache.longest(keys("abx"), 3) == 2 and cache.knows(keys("abc")(3))
    cache.new_step_starts()
    assert found(cache, "abx") == 2


def test_the_least_recently_used_goes_first_and_none_before_its_followers():
    cache = make(longest=1)
    store(cache, "ab")
    store(cache, "xy")
    use(cache, "ab")
    gone = []
    while cache.drop_one():
        gone.append([found(cache, "ab"), found(cache, "xy")])
    # To ask is not to use.
    assert gone == [[2, 1], [2, 0], [1, 0], [0, 0]] and not cache.held[0]
    assert len(cache.outbox.flush(None, None).drops) == 4


def test_what_is_used_and_what_will_be_is_not_dropped():
    cache = make(longest=1)
    store(cache, "abc")
    other = store(cache, "xy")
    used, _ = cache.find(keys("ab"), 2)
    cache.retain(used, lasting=True)
    check(cache, [(used, True)])
    assert cache.droppable_pages(other) == [UNIT] and cache.used(other) == [4 * UNIT]
    assert cache.used(to_the_end=True) == [2 * UNIT] and cache.used(other, to_the_end=True) == [4 * UNIT]
    assert cache.drop_one(other) and not cache.drop_one(other)
    assert (found(cache, "abc"), found(cache, "xy")) == (2, 2)
    cache.release(used, lasting=True)
    check(cache)


def test_two_that_were_read_side_by_side_do_not_hide_each_other():
    cache = make()
    cache.store("a", None, keys("abc"), 0, 3 * COLUMNS)
    cache.store("b", None, keys("abd"), 0, 3 * COLUMNS)
    cache.new_step_starts()
    assert cache.held[0] == 6 * UNIT and found(cache, "abc") == found(cache, "abd") == 3
    use(cache, "abc")
    assert cache.drop_one() and cache.drop_one()
    assert cache.held[0] == 3 * UNIT and found(cache, "abc") == 3 and found(cache, "abd") == 2
    check(cache)


def test_no_more_than_there_may_be():
    cache = make(longest=1, most=3)
    store(cache, "ab")
    store(cache, "xyz")
    assert len(cache) == 3 and (found(cache, "xyz"), found(cache, "ab")) == (3, 0)
    none = make(most=0)
    assert store(none, "ab") is None and not len(none)


def test_what_will_not_be_made_is_taken_back():
    cache = make()
    store(cache, "ab")
    parent, _ = cache.find(keys("ab"), 2)
    cache.store("b", parent, keys("abcdef"), 2 * COLUMNS, 6 * COLUMNS)
    untold = cache.outbox.take_back("b")
    assert len(untold.segments) == 2 and cache.cancel(untold.segments) is parent
    check(cache)
    assert cache.outbox.is_empty


def test_after_a_reset_nothing_is_found_and_the_rest_goes_with_its_users():
    cache = make(longest=1)
    store(cache, "abc")
    used, _ = cache.find(keys("ab"), 2)
    cache.retain(used, lasting=False)
    cache.begin("reader", keys("xyz"), 3)
    cache.invalidate()
    assert found(cache, "abc") == 0 and cache.held[0] == 2 * UNIT and cache.readers(keys("xyz"), 3) == ([], 0)
    # What follows it could be found, and it could not.
    assert cache.store("a", used, keys("abq"), 2 * COLUMNS, 3 * COLUMNS) is used
    cache.release(used, lasting=False)
    assert not len(cache) and sorted(cache.outbox.flush(None, None).drops) == [1, 2, 3]
    check(cache)


WRONG = {"refs": 2, "children": 1, "counted": ([UNIT], [0], [0]), "keys": ["z"], "number": 9}


@pytest.mark.parametrize("what", [*WRONG, "sums"])
def test_what_is_counted_wrongly_is_noticed(what):
    cache = make()
    last = store(cache, "abc")
    cache.retain(last, lasting=True)
    check(cache, [(last, True)])
    if what == "sums":
        cache.sums[1][0] += 1
    else:
        setattr(last, what, WRONG[what])
    with pytest.raises(RuntimeError, match="kv eviction check"):
        cache.check([last])


def test_who_reads_what():
    cache = make()
    cache.begin("a", keys("abcd"), 4)
    cache.begin("b", keys("abx"), 3)
    assert cache.readers(keys("abcz"), 4) == (["a"], 3)
    assert cache.readers(keys("abz"), 3) == (["a", "b"], 2)
    cache.end("a")
    cache.end("a")
    assert cache.readers(keys("abcz"), 4) == (["b"], 2)


@pytest.mark.parametrize("seed", range(20))
def test_against_all_that_was_stored(seed):
    """A prefix is there exactly if a prompt that begins with it was stored, and nothing was dropped."""
    choose = random.Random(seed)
    cache, stored, loans = make(longest=choose.randint(1, 3)), [], []
    for _ in range(60):
        prompt = "".join(choose.choices("ab", k=choose.randint(1, 7)))
        expected = max((common(prompt, other) for other in stored), default=0)
        assert found(cache, prompt) == expected
        if choose.random() < 0.5:
            store(cache, prompt)
            stored.append(prompt)
        hit = cache.find(keys(prompt), len(prompt))
        if hit and choose.random() < 0.5:
            loans.append((hit[0], choose.random() < 0.5))
            cache.retain(*loans[-1])
        elif loans and choose.random() < 0.5:
            cache.release(*loans.pop(choose.randrange(len(loans))))
        check(cache, loans)
    pinned = {part.number for segment, _ in loans for part in segment.chain()}
    while cache.drop_one():
        check(cache, loans)
    assert {segment.number for segment in cache} == pinned and cache.held == cache.used()


def common(one: str, other: str) -> int:
    """Letters that two words begin with."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
