"""The cache against a plain Python model, over random schedules."""

import random

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_kvevict.cache import PagedKVCache
from vllm_kvevict.cache.runs import Runs

from .writers import Payload, dim_pairs, plain, token_pairs, transposed, writer

L, H, D, PS = 2, 2, 32, 32
SLOTS = 5
ORDERS = [(plain, plain), (transposed, plain), (dim_pairs, token_pairs)]


class Model:
    """A cache and what it should hold: for each open request and each run the payload ids of every row.

    Attributes:
        borrows: the run of each request that borrows one.
        outside: pages of the storage that were removed.
    """

    def __init__(self, pages, max_requests, orders):
        self.cache = PagedKVCache(
            torch.zeros(pages, 2 * PS * D),
            num_layers=L,
            num_kv_heads=H,
            page_size=PS,
            max_requests=max_requests,
            write=writer(PS, *orders),
        )
        self.pages = pages
        self.outside: list[int] = []
        self.payload = Payload(D)
        self.rows: dict[int, list[list[int]]] = {}
        self.runs = Runs(self.cache)
        self.run_rows: dict[int, list[list[int]]] = {}
        self.borrows: dict[int, int] = {}

    def open(self):
        slot = self.cache.open()
        assert slot not in self.rows
        self.rows[slot] = [[] for _ in range(L * H)]

    def extend(self, slots, tokens):
        need = sum(
            -(-(len(row) + n) // PS) + -len(row) // PS
            for slot, n in zip(slots, tokens, strict=True)
            for row in self.rows[slot]
        )
        if need > self.cache.num_free:
            try:
                self.cache.extend(slots, tokens)
            except RuntimeError as error:
                assert f"{need} pages needed" in str(error)
                return
            raise AssertionError("the pool gave pages that it does not have")
        step = self.cache.extend(slots, tokens)
        places = self.cache.entry_slots(step)
        ids = self.payload.ids(places.numel()).view(L, -1)
        for layer in range(L):
            self.cache._write(
                self.cache.storage,
                self.payload.keys(ids[layer]),
                self.payload.values(ids[layer]),
                places[layer],
            )
            at = 0
            for slot, n in zip(slots, tokens, strict=True):
                for head in range(H):
                    self.rows[slot][layer * H + head] += ids[layer, at + head : at + n * H : H].tolist()
                at += n * H
        want = [
            [len(row) for slot in slots for row in self.rows[slot][i * H : (i + 1) * H]] for i in range(L)
        ]
        assert self.cache.seq_lens(step.request_slots).tolist() == want
        assert step.max_lens == [max(map(len, self.rows[slot])) for slot in slots]

    def read_layer_by_layer(self, slot, tokens, fractions, rng):
        """Fill and evict one layer after the other; needs the pages of one whole layer and what the others keep."""
        self.cache.announce(slot, tokens)
        for layer in range(L):
            places, pages = self.cache.fill(slot, layer, tokens)
            assert pages.shape == (H, -(-tokens // PS))
            ids = self.payload.ids(tokens * H)
            self.cache._write(self.cache.storage, self.payload.keys(ids), self.payload.values(ids), places)
            kept = []
            for head in range(H):
                row = ids.view(tokens, H)[:, head].tolist()
                count = max(1, round(fractions[layer * H + head] * tokens))
                index = sorted(rng.sample(range(tokens), count))
                self.rows[slot][layer * H + head] = [row[i] for i in index]
                kept.append(torch.tensor(index))
            self.cache.compact(slot, layer, kept)
        self.cache.settle(slot)

    def evict(self, slot, fractions, rng):
        """Keep a random part of each row, of about the given fraction of it."""
        free = self.cache.num_free
        for layer in range(L):
            kept = []
            for head in range(H):
                row = self.rows[slot][layer * H + head]
                count = max(1, round(fractions[layer * H + head] * len(row)))
                index = sorted(rng.sample(range(len(row)), count))
                self.rows[slot][layer * H + head] = [row[i] for i in index]
                kept.append(torch.tensor(index))
            self.cache.compact(slot, layer, kept)
        settled = self.cache.settle(slot)
        rows = self.rows[slot]
        assert settled.kept.ravel().tolist() == [len(row) for row in rows]
        assert settled.pages == sum(-(-len(row) // PS) for row in rows)
        assert settled.residues.tolist() == [sum(len(row) % PS == m for row in rows) for m in range(PS)]
        assert self.cache.num_free >= free

    def truncate(self, dropped):
        """Forget the newest entries of some requests, so many of each of their rows."""
        self.cache.truncate(list(dropped), list(dropped.values()))
        for slot, count in dropped.items():
            self.rows[slot] = [row[: len(row) - count] for row in self.rows[slot]]

    def copy_entries(self, source, entries):
        """Begin a request with copies of the given entries of every row of another."""
        before = set(self.rows)
        self.open()
        (slot,) = set(self.rows) - before
        need = L * H * -(-len(entries) // PS)
        if need > self.cache.num_free:
            try:
                self.cache.copy_entries(source, slot, torch.tensor(entries))
            except RuntimeError as error:
                assert f"{need} pages needed" in str(error)
                return
            raise AssertionError("the pool gave pages that it does not have")
        self.cache.copy_entries(source, slot, torch.tensor(entries))
        self.rows[slot] = [[row[i] for i in entries] for row in self.rows[source]]

    def close(self, slots):
        self.cache.close(slots)
        for slot in slots:
            del self.rows[slot]
            self.borrows.pop(slot, None)

    def share(self, source, act, rows):
        """Freeze or fork by ``act``, which needs a page for each row that ends within one."""
        need = sum(len(row) % PS > 0 for row in rows)
        if need > self.cache.num_free:
            try:
                act(source)
            except RuntimeError as error:
                assert f"{need} pages needed" in str(error)
                return None
            raise AssertionError("the pool gave pages that it does not have")
        return act(source)

    def freeze(self, slot):
        run = self.share(slot, self.runs.freeze, self.rows[slot])
        if run is not None:
            self.run_rows[run] = [list(row) for row in self.rows[slot]]
            self.lend(run, slot)

    def fork(self, run):
        slot = self.share(run, self.runs.fork, self.run_rows[run])
        if slot is not None:
            self.rows[slot] = [list(row) for row in self.run_rows[run]]
            self.lend(run, slot)

    def lend(self, run, slot):
        """Only full pages are lent."""
        if any(len(row) >= PS for row in self.run_rows[run]):
            self.borrows[slot] = run

    def drop(self, run):
        borrowers = [slot for slot, lender in self.borrows.items() if lender == run]
        assert sorted(self.runs.borrowers(run)) == sorted(borrowers)
        if len(borrowers) > 1:
            try:
                self.runs.drop(run)
            except ValueError as error:
                assert f"borrowed by {len(borrowers)} requests" in str(error)
                return
            raise AssertionError("a run was dropped that two requests borrow")
        self.runs.drop(run)
        del self.run_rows[run]
        for slot in borrowers:
            del self.borrows[slot]

    def remove_pages(self, pages):
        self.cache.remove_pages(torch.tensor(pages, dtype=torch.int64))
        self.cache.storage[pages] = float("nan")
        self.outside += pages

    def add_pages(self, pages):
        self.cache.add_pages(torch.tensor(pages, dtype=torch.int64))
        self.outside = [page for page in self.outside if page not in pages]

    def check_content(self, slot):
        rows = self.rows[slot] if slot in self.rows else self.run_rows[slot]
        for i, row in enumerate(rows):
            heads = torch.full((len(row),), i % H)
            keys, values = self.cache.gather(slot, i // H, heads, torch.arange(len(row)))
            want = self.payload.keys(torch.tensor(row, dtype=torch.int64))
            assert torch.equal(keys, want)
            assert torch.equal(values, -want)

    def check_counts(self):
        self.cache.verify()
        held = {
            slot: sum(-(-len(row) // PS) for row in rows)
            for slot, rows in (self.rows | self.run_rows).items()
        }
        for slot, run in self.borrows.items():
            held[slot] -= sum(len(row) // PS for row in self.run_rows[run])
        assert all(self.cache.held(slot) == pages for slot, pages in held.items())
        assert self.cache.physical_pages == sum(held.values())
        assert self.runs.pages == sum(held[run] for run in self.run_rows)
        assert self.runs.entries == sum(len(row) for rows in self.run_rows.values() for row in rows)


class CacheMachine(RuleBasedStateMachine):
    @initialize(orders=st.sampled_from(ORDERS), pages=st.sampled_from([24, 100]))
    def start(self, orders, pages):
        self.model = Model(pages, SLOTS, orders)

    @property
    def is_full(self):
        return len(self.model.rows) + len(self.model.run_rows) == SLOTS

    @precondition(lambda self: not self.is_full)
    @rule()
    def open(self):
        self.model.open()

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def extend(self, data):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.model.rows)), min_size=1, unique=True))
        count = st.one_of(st.just(1), st.integers(1, 100), st.sampled_from([31, 32, 33, 64]))
        self.model.extend(slots, [data.draw(count) for _ in slots])

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def decode_all(self, data):
        slots = data.draw(st.permutations(sorted(self.model.rows)))
        for _ in range(data.draw(st.integers(1, 40))):
            self.model.extend(slots, [1] * len(slots))

    @precondition(lambda self: any(not rows[0] for rows in self.model.rows.values()))
    @rule(data=st.data(), rng=st.randoms(use_true_random=False))
    def read_layer_by_layer(self, data, rng):
        empty = [slot for slot, rows in sorted(self.model.rows.items()) if not rows[0]]
        tokens = data.draw(st.one_of(st.integers(1, 150), st.sampled_from([31, 32, 33, 64])))
        if self.model.cache.num_free < L * H * -(-tokens // PS):
            return
        fractions = data.draw(st.lists(st.floats(0, 1), min_size=L * H, max_size=L * H))
        self.model.read_layer_by_layer(data.draw(st.sampled_from(empty)), tokens, fractions, rng)

    def own(self):
        """Requests that hold something in each row, all of it their own."""
        return [
            slot
            for slot, rows in sorted(self.model.rows.items())
            if all(rows) and slot not in self.model.borrows
        ]

    @precondition(lambda self: self.own() and not self.is_full)
    @rule(data=st.data())
    def freeze(self, data):
        self.model.freeze(data.draw(st.sampled_from(self.own())))

    @precondition(lambda self: self.model.run_rows and not self.is_full)
    @rule(data=st.data())
    def fork(self, data):
        self.model.fork(data.draw(st.sampled_from(sorted(self.model.run_rows))))

    @precondition(lambda self: self.model.run_rows)
    @rule(data=st.data())
    def drop(self, data):
        self.model.drop(data.draw(st.sampled_from(sorted(self.model.run_rows))))

    @precondition(lambda self: self.own())
    @rule(data=st.data(), rng=st.randoms(use_true_random=False))
    def evict(self, data, rng):
        slot = data.draw(st.sampled_from(self.own()))
        fraction = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0]))
        self.model.evict(slot, data.draw(st.lists(fraction, min_size=L * H, max_size=L * H)), rng)

    @precondition(lambda self: self.own())
    @rule(data=st.data())
    def truncate(self, data):
        slots = data.draw(st.lists(st.sampled_from(self.own()), min_size=1, max_size=3, unique=True))
        shortest = {slot: min(map(len, self.model.rows[slot])) for slot in slots}
        self.model.truncate({slot: data.draw(st.integers(0, most)) for slot, most in shortest.items()})

    @precondition(lambda self: any(map(all, self.model.rows.values())) and not self.is_full)
    @rule(data=st.data(), rng=st.randoms(use_true_random=False))
    def copy_entries(self, data, rng):
        source = data.draw(
            st.sampled_from(sorted(slot for slot, rows in self.model.rows.items() if all(rows)))
        )
        shortest = min(map(len, self.model.rows[source]))
        count = data.draw(st.integers(1, shortest))
        self.model.copy_entries(source, sorted(rng.sample(range(shortest), count)))

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def close(self, data):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.model.rows)), min_size=1, unique=True))
        self.model.close(slots)

    @invariant()
    def agrees(self):
        self.model.check_counts()
        for slot in (*self.model.rows, *self.model.run_rows):
            self.model.check_content(slot)

    @precondition(lambda self: self.model.cache.num_free)
    @rule(data=st.data(), rng=st.randoms(use_true_random=False))
    def remove_pages(self, data, rng):
        inside = sorted(set(range(self.model.pages)) - set(self.model.outside))
        count = data.draw(st.integers(1, self.model.cache.num_free))
        self.model.remove_pages(rng.sample(inside, count))

    @precondition(lambda self: self.model.outside)
    @rule(data=st.data())
    def add_pages(self, data):
        count = data.draw(st.integers(1, len(self.model.outside)))
        self.model.add_pages(self.model.outside[:count])

    def teardown(self):
        if hasattr(self, "model"):
            self.model.close(sorted(self.model.rows))
            for run in sorted(self.model.run_rows):
                self.model.drop(run)
            assert self.model.cache.num_free == self.model.pages - len(self.model.outside)


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = pytest.mark.long(CacheMachine.TestCase)


def test_soak():
    """Ten thousand operations on a pool that is full most of the time; at the end every page is free."""
    rng = random.Random(0)
    model = Model(pages=300, max_requests=12, orders=ORDERS[1])
    for step in range(10_000):
        slots = sorted(model.rows)
        kind = rng.random()
        if len(slots) < 12 and kind < 0.02:
            model.open()
        elif slots and kind < 0.035:
            model.close(rng.sample(slots, rng.randint(1, min(2, len(slots)))))
        elif slots and kind < 0.05:
            slot = rng.choice(slots)
            if model.rows[slot][0]:
                model.evict(slot, [rng.random() ** 2 for _ in range(L * H)], rng)
        elif slots and kind < 0.07:
            model.extend(slots, [rng.choice([1, 1, 17, 90]) for _ in slots])
        elif slots:
            model.extend(rng.sample(slots, len(slots)), [1] * len(slots))
        if step % 100 == 0:
            model.check_counts()
            for slot in model.rows:
                model.check_content(slot)
    model.close(sorted(model.rows))
    model.check_counts()
    assert model.cache.num_free == 300
    assert model.cache.stored_entries == 0
