import pytest
import torch

from vllm_kvevict.cache import PagePool


def test_runs_ascend_from_the_low_end_and_single_pages_come_from_the_high_end():
    pool = PagePool(12, "cpu")
    first, second = pool.allocate_stretch(4), pool.allocate_stretch(3)
    assert first.tolist() == [0, 1, 2, 3] and second.tolist() == [4, 5, 6]
    assert sorted(pool.allocate(2).tolist()) == [10, 11]
    # What comes back in any order is handed out as the longest runs there are.
    pool.free(second[[2, 0, 1]])
    pool.free(first[[3, 1]])
    assert pool.allocate_stretch(6).tolist() == [1, 3, 4, 5, 6, 7]
    assert sorted(pool.allocate(2).tolist()) == [8, 9]
    assert pool.num_free == 0
    pool.verify()


@pytest.mark.parametrize("name", ["allocate", "allocate_stretch"])
def test_exhaustion_changes_nothing(name):
    pool = PagePool(5, "cpu")
    pool.allocate(3)
    owners = pool.owners.clone()
    with pytest.raises(RuntimeError, match="exhausted: 3 pages needed, 2 of 5 free"):
        getattr(pool, name)(3)
    assert pool.num_free == 2
    assert torch.equal(pool.owners, owners)
    pool.verify()


def test_gives_no_more_than_was_taken():
    pool = PagePool(5, "cpu")
    ids = pool.allocate(2)
    with pytest.raises(RuntimeError, match="3 pages were freed in the page pool, but only 2"):
        pool.free(torch.cat([ids, ids[:1]]))
    pool.verify()


def test_verify_sees_double_and_lost_pages():
    pool = PagePool(4, "cpu")
    ids = pool.allocate(3)
    pool.free(ids[[0, 0]])
    with pytest.raises(RuntimeError, match=f"page {int(ids[0])} has -1 owners and is 2 times free"):
        pool.verify()
    pool = PagePool(4, "cpu")
    pool.owners[pool.allocate(1).long()] = 0
    with pytest.raises(RuntimeError, match="page 3 has 0 owners and is 0 times free"):
        pool.verify()


def test_pages_are_added_and_removed():
    pool = PagePool(8, "cpu", is_empty=True)
    assert pool.num_free == pool.num_pages == 0
    with pytest.raises(RuntimeError, match="1 pages needed, 0 of 0 free"):
        pool.allocate(1)
    pool.add(torch.tensor([5, 2, 3]))
    assert pool.allocate_stretch(3).tolist() == [2, 3, 5]
    pool.free(torch.tensor([3, 2], dtype=torch.int32))
    pool.remove(torch.tensor([2]))
    pool.verify()
    assert (pool.num_pages, pool.num_free) == (2, 1)
    assert pool.allocate(1).tolist() == [3]
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.remove(torch.tensor([3]))
