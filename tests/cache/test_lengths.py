import numpy as np

from vllm_kvevict.cache.lengths import RowLengths


def ceil(a, b):
    return -(-a // b)


def test_demand_equals_counting_every_row():
    rng = np.random.default_rng(0)
    lengths = RowLengths(4, 3, 2, 32)
    rows = {slot: np.zeros((3, 2), np.int64) for slot in range(4)}
    for _ in range(400):
        slots = rng.permutation(4)[: rng.integers(1, 5)]
        tokens = rng.choice([1, 1, 2, 31, 32, 33, 100], slots.size)
        pages, partial = lengths.demand(slots, tokens)
        for i, slot in enumerate(slots):
            need = ceil(rows[slot] + tokens[i], 32) - ceil(rows[slot], 32)
            assert pages[i] == need.sum()
            assert partial[i] == ((need > 0) & ((rows[slot] + tokens[i]) % 32 > 0)).sum()
            rows[slot] = rows[slot] + tokens[i]
        lengths.append(slots, tokens, pages)
        slot, layer = int(rng.integers(4)), int(rng.integers(3))
        if rng.random() < 0.3 and rows[slot].min() > 0:
            after = rng.integers(1, rows[slot][layer] + 1)
            freed = lengths.replace(slot, 2 * layer, after)
            assert freed == (ceil(rows[slot][layer], 32) - ceil(after, 32)).sum()
            rows[slot][layer] = after
        elif rng.random() < 0.05:
            lengths.clear(slot)
            rows[slot][:] = 0
        for slot, want in rows.items():
            assert (lengths.of(slot) == want).all()
            assert lengths.pages[slot] == ceil(want, 32).sum()
            assert lengths.longest(np.array([slot]))[0] == want.max()
            assert lengths.shortest(slot, 1) == want[1].min()
            assert (lengths.residues(slot) == np.bincount(want.ravel() % 32, minlength=32)).all()
