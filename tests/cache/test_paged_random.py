"""The cache against a plain Python model, over random schedules."""

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from .writers import MORE, Payload, WritableCache, dim_pairs, plain, token_pairs, transposed, writer

L, H, D, PS = 2, 2, 32, 32
SLOTS = 5
ORDERS = [(plain, plain), (transposed, plain), (dim_pairs, token_pairs)]


class Model:
    """A cache and what it should hold: for each open request and each shared entry the payload ids of every row.

    Attributes:
        firsts: columns of the parents of each shared entry, None where it is what an eviction left.
        lent: what each request has begun with or frozen: numbers, and columns of each, None for all.
        columns: how many pages of each row a request borrows.
        outside: pages of the storage that were removed.
    """

    def __init__(self, pages, max_requests, orders):
        self.cache = WritableCache(
            torch.zeros(pages, PS * (2 * D + 1)),
            num_layers=L,
            num_kv_heads=H,
            page_size=PS,
            max_requests=max_requests,
            write=writer(PS, *orders),
            more=MORE,
        )
        self.pages = pages
        self.outside: list[int] = []
        self.payload = Payload(D)
        self.rows: dict[int, list[list[int]]] = {}
        self.shared: dict[int, list[list[int]]] = {}
        self.firsts: dict[int, int | None] = {}
        self.lent: dict[int, list[tuple[int, int | None]]] = {}
        self.columns: dict[int, list[int]] = {}

    def entries(self, ids):
        """All fields of entries by their ids, in the order of the layout."""
        keys, values = self.payload.keys(ids), self.payload.values(ids)
        score = torch.stack([ids, -ids], 1).to(torch.int32)
        return {"key": keys, "value": values, "scale": ids[:, None] + 0.5, "score": score}

    def open(self):
        slot = self.cache.open()
        assert slot not in self.rows
        self.rows[slot] = [[] for _ in range(L * H)]
        return slot

    def extend(self, slots, tokens):
        need = sum(
            -(-(len(row) + n) // PS) + -len(row) // PS
            for slot, n in zip(slots, tokens, strict=True)
            for row in self.rows[slot]
        )
        if self.is_refused(need, self.cache.extend, slots, tokens):
            return
        step = self.cache.extend(slots, tokens)
        places = self.cache.entry_slots(step)
        ids = self.payload.ids(places.numel()).view(L, -1)
        for layer in range(L):
            self.cache.memory.write(self.entries(ids[layer]), places[layer])
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
            ids, stores = self.payload.ids(tokens * H), rng.random() < 0.5
            entries = self.entries(ids)
            if stores:
                self.cache.expect(slot, layer, tokens)
            else:
                places, pages = self.cache.fill(slot, layer, tokens)
                assert pages.shape == (H, -(-tokens // PS))
                self.cache.memory.write(entries, places)
            kept = []
            for head in range(H):
                row = ids.view(tokens, H)[:, head].tolist()
                count = max(1, round(fractions[layer * H + head] * tokens))
                index = sorted(rng.sample(range(tokens), count))
                self.rows[slot][layer * H + head] = [row[i] for i in index]
                kept.append(torch.tensor(index))
            if stores:
                by_token = {name: numbers.view(tokens, H, -1) for name, numbers in entries.items()}
                self.cache.store(slot, layer, by_token, kept)
            else:
                self.cache.compact(slot, layer, kept)
        self.cache.settle(slot)

    def evict(self, slot, fractions, rng):
        """Keep a random part of each row, of about the given fraction of it."""
        free, borrows = self.cache.num_free, self.borrowed(slot) != [0] * (L * H)
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
        assert borrows or self.cache.num_free >= free
        self.forget_loans(slot)

    def evict_behind(self, slot, first, counts, rng, layers):
        """Keep so many random entries of each row behind its first ones, of so many layers at a time."""
        rows, free, copied, before = self.rows[slot], self.cache.num_free, False, self.cache.held(slot)
        kept = [
            sorted(rng.sample(range(len(row) - n), m)) for row, n, m in zip(rows, first, counts, strict=True)
        ]
        borrowed = self.borrowed(slot)
        for layer in range(0, L, layers):
            part = range(layer * H, (layer + layers) * H)
            index = [torch.tensor(kept[i], dtype=torch.int64) for i in part]
            self.cache.compact(slot, layer, index, np.array([first[i] for i in part], np.int64))
        for i, row in enumerate(rows):
            rows[i] = row[: first[i]] + [row[first[i] + entry] for entry in kept[i]]
        for layer in range(L):
            part = range(layer * H, (layer + 1) * H)
            if any(borrowed[i] * PS > first[i] for i in part):
                copied = True
                for i in part:
                    borrowed[i] = min(borrowed[i], first[i] // PS)
        if copied:
            self.shorten(slot, borrowed)
        else:
            # Nothing was copied: what it holds less is free.
            assert self.cache.num_free - free == before - self.cache.held(slot) >= 0
        assert self.cache.settle(slot).kept.ravel().tolist() == [len(row) for row in rows]

    def shorten(self, slot, borrowed):
        """A request borrows so many pages of each row and no more."""
        self.columns[slot], lent = borrowed, []
        for number, columns in self.lent[slot]:
            left = max(borrowed) - (self.firsts[number] or 0)
            if left > 0:
                lent.append((number, columns if columns is None else min(columns, left)))
        self.lent[slot] = lent
        if not lent:
            self.forget_loans(slot)

    def forget_loans(self, slot):
        self.lent.pop(slot, None)
        self.columns.pop(slot, None)

    def truncate(self, dropped):
        """Forget the newest entries of some requests, so many of each of their rows."""
        self.cache.truncate(list(dropped), list(dropped.values()))
        for slot, count in dropped.items():
            self.rows[slot] = [row[: len(row) - count] for row in self.rows[slot]]

    def copy_entries(self, source, entries):
        """Begin a request with copies of the given entries of each row of another, as many of each."""
        slot = self.open()
        need = L * H * -(-len(entries[0]) // PS)
        if self.is_refused(need, self.cache.copy_entries, source, slot, torch.tensor(entries)):
            return
        self.cache.copy_entries(source, slot, torch.tensor(entries))
        rows = self.rows[source]
        chosen = entries * len(rows) if len(entries) == 1 else entries
        self.rows[slot] = [[row[i] for i in own] for row, own in zip(rows, chosen, strict=True)]

    def close(self, slots):
        self.cache.close(slots)
        for slot in slots:
            del self.rows[slot]
            self.forget_loans(slot)

    def borrowed(self, slot):
        """Pages of each row that a request borrows."""
        return list(self.columns.get(slot, [0] * (L * H)))

    def is_refused(self, need, act, *arguments):
        """Whether fewer pages are free than ``act`` needs, which then says so."""
        if need <= self.cache.num_free:
            return False
        with pytest.raises(RuntimeError, match=f"{need} pages needed"):
            act(*arguments)
        return True

    def freeze(self, slot, columns):
        """Share a request's next columns, or all that it holds."""
        number, rows, first = self.pages + len(self.shared), self.rows[slot], max(self.borrowed(slot))
        while number in self.shared:
            number += 1
        need = sum(len(row) % PS > 0 for row in rows) if columns is None else 0
        if self.is_refused(need, self.cache.loans.freeze, number, slot, columns):
            return
        self.cache.loans.freeze(number, slot, columns)
        stop = None if columns is None else (first + columns) * PS
        self.shared[number] = [row[first * PS : stop] for row in rows]
        self.firsts[number] = None if columns is None else first
        self.lend(slot, [(number, columns)])

    def begin(self, parts):
        """Begin a request with shared entries."""
        cut = [(self.shared[n], None if columns is None else columns * PS) for n, columns in parts]
        rows = [[entry for part, stop in cut for entry in part[i][:stop]] for i in range(L * H)]
        if self.is_refused(sum(len(row) % PS > 0 for row in rows), self.cache.open, parts):
            return
        slot = self.cache.open(parts)
        self.rows[slot] = rows
        self.lend(slot, parts)

    def lend(self, slot, parts):
        """Only full pages are lent."""
        if any(columns or max(map(len, self.shared[number])) >= PS for number, columns in parts):
            self.lent.setdefault(slot, []).extend(parts)
            borrowed = self.borrowed(slot)
            for number, columns in parts:
                for i, row in enumerate(self.shared[number]):
                    borrowed[i] += len(row) // PS if columns is None else columns
            self.columns[slot] = borrowed

    def drop(self, number):
        borrowers = [slot for slot, parts in self.lent.items() if number in dict(parts)]
        assert sorted(self.cache.loans.borrowers(number)) == sorted(borrowers)
        if len(borrowers) > (self.firsts[number] is None):
            with pytest.raises(ValueError, match=f"shared entry {number} is borrowed by"):
                self.cache.loans.drop(number)
            return
        self.cache.loans.drop(number)
        del self.shared[number], self.firsts[number]
        for slot in borrowers:
            self.forget_loans(slot)

    def remove_pages(self, pages):
        self.cache.remove_pages(torch.tensor(pages, dtype=torch.int64))
        self.cache.storage[pages] = float("nan")
        self.outside += pages

    def add_pages(self, pages):
        self.cache.add_pages(torch.tensor(pages, dtype=torch.int64))
        self.outside = [page for page in self.outside if page not in pages]

    def check(self):
        self.check_counts()
        for slot in self.rows:
            self.check_content(slot)
        for number in self.shared:
            self.check_shared(number)

    def check_content(self, slot):
        for i, row in enumerate(self.rows[slot]):
            heads = torch.full((len(row),), i % H)
            self.check_entries(row, self.cache.gather(slot, i // H, heads, torch.arange(len(row))))

    def check_shared(self, number):
        table, memory = self.cache.loans[number].table, self.cache.memory
        for i, row in enumerate(self.shared[number]):
            places = self.cache.rows.places(table, torch.full((len(row),), i), torch.arange(len(row)))
            self.check_entries(row, [memory.read(field.name, *places) for field in memory.layout.fields])

    def check_entries(self, row, found):
        want = self.entries(torch.tensor(row, dtype=torch.int64))
        assert all(torch.equal(*pair) for pair in zip(found, want.values(), strict=True))

    def check_counts(self):
        self.cache.verify()
        filled = {slot: sum(-(-len(row) // PS) for row in rows) for slot, rows in self.rows.items()}
        lent = {slot: sum(self.borrowed(slot)) for slot in self.rows}
        assert {slot: self.cache.borrowed(slot) for slot in self.rows} == lent
        assert {slot: self.cache.held(slot) + lent[slot] for slot in self.rows} == filled
        shared = {number: sum(-(-len(row) // PS) for row in rows) for number, rows in self.shared.items()}
        assert {number: len(self.cache.loans[number].pages) for number in self.cache.loans} == shared
        compressed = sum(pages for number, pages in shared.items() if self.firsts[number] is None)
        assert self.cache.loans.pages == {True: compressed, False: sum(shared.values()) - compressed}
        assert self.cache.physical_pages == sum(filled.values()) - sum(lent.values()) + sum(shared.values())


class CacheMachine(RuleBasedStateMachine):
    @initialize(orders=st.sampled_from(ORDERS), pages=st.sampled_from([24, 100]))
    def start(self, orders, pages):
        self.model = Model(pages, SLOTS, orders)

    @property
    def is_full(self):
        return len(self.model.rows) == SLOTS

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

    @precondition(lambda self: any(not any(rows) for rows in self.model.rows.values()))
    @rule(data=st.data(), rng=st.randoms(use_true_random=False))
    def read_layer_by_layer(self, data, rng):
        empty = [slot for slot, rows in sorted(self.model.rows.items()) if not any(rows)]
        tokens = data.draw(st.one_of(st.integers(1, 150), st.sampled_from([31, 32, 33, 64])))
        if self.model.cache.num_free < L * H * -(-tokens // PS):
            return
        fractions = data.draw(st.lists(st.floats(0, 1), min_size=L * H, max_size=L * H))
        self.model.read_layer_by_layer(data.draw(st.sampled_from(empty)), tokens, fractions, rng)

    def filled(self):
        """Requests that store something."""
        return [slot for slot, rows in sorted(self.model.rows.items()) if all(rows)]

    def own(self):
        """Requests that hold something, all of it their own."""
        return [slot for slot in self.filled() if slot not in self.model.lent]

    @precondition(lambda self: self.own())
    @rule(data=st.data())
    def freeze(self, data):
        self.model.freeze(data.draw(st.sampled_from(self.own())), None)

    def with_columns(self):
        """Requests that may leave whole columns, and how many."""
        model, found = self.model, {}
        for slot in self.filled():
            parents = [model.firsts[number] for number, _ in model.lent.get(slot, ())]
            columns = min(map(len, model.rows[slot])) // PS - max(model.borrowed(slot))
            even = len(set(model.borrowed(slot))) == 1
            if columns > 0 and even and None not in parents:
                found[slot] = columns
        return found

    @precondition(lambda self: self.with_columns())
    @rule(data=st.data())
    def freeze_columns(self, data):
        slot, most = data.draw(st.sampled_from(sorted(self.with_columns().items())))
        self.model.freeze(slot, data.draw(st.integers(1, most)))

    @precondition(lambda self: self.model.shared and not self.is_full)
    @rule(data=st.data())
    def begin(self, data):
        number = data.draw(st.sampled_from(sorted(self.model.shared)))
        if self.model.firsts[number] is None:
            self.model.begin([(number, None)])
            return
        # Whoever froze or began with it knows its parents, as the scheduler does.
        chains = [parts for parts in self.model.lent.values() if number in dict(parts)]
        for parts in chains[:1]:
            at = [part[0] for part in parts].index(number)
            most = len(self.model.shared[number][0]) // PS
            self.model.begin([*parts[:at], (number, data.draw(st.integers(1, most)))])

    @precondition(lambda self: self.model.shared)
    @rule(data=st.data())
    def drop(self, data):
        self.model.drop(data.draw(st.sampled_from(sorted(self.model.shared))))

    @precondition(lambda self: self.filled())
    @rule(data=st.data(), rng=st.randoms(use_true_random=False))
    def evict(self, data, rng):
        slot = data.draw(st.sampled_from(self.filled()))
        rows = self.model.rows[slot]
        copies = sum(-(-len(row) // PS) for row in rows) if slot in self.model.lent else 0
        if copies > self.model.cache.num_free:
            return
        fraction = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0]))
        self.model.evict(slot, data.draw(st.lists(fraction, min_size=L * H, max_size=L * H)), rng)

    @precondition(lambda self: self.filled())
    @rule(data=st.data(), rng=st.randoms(use_true_random=False), in_place=st.booleans())
    def evict_behind(self, data, rng, in_place):
        """What is borrowed may lie among what stays, or be chosen among."""
        borrowers = [slot for slot in self.filled() if slot in self.model.lent]
        slot = data.draw(
            st.sampled_from(borrowers if borrowers and data.draw(st.booleans()) else self.filled())
        )
        rows = self.model.rows[slot]
        least = [columns * PS if in_place else 0 for columns in self.model.borrowed(slot)]
        first = [data.draw(st.integers(n, len(row))) for n, row in zip(least, rows, strict=True)]
        if not in_place and sum(-(-len(row) // PS) for row in rows) > self.model.cache.num_free:
            return
        counts = [
            data.draw(st.integers(0 if n else 1, len(row) - n)) for n, row in zip(first, rows, strict=True)
        ]
        self.model.evict_behind(slot, first, counts, rng, data.draw(st.sampled_from([1, L])))

    @precondition(lambda self: self.filled())
    @rule(data=st.data())
    def truncate(self, data):
        slots = data.draw(st.lists(st.sampled_from(self.filled()), min_size=1, max_size=3, unique=True))
        most = {}
        for slot in slots:
            pairs = zip(self.model.rows[slot], self.model.borrowed(slot), strict=True)
            most[slot] = min(len(row) - PS * lent for row, lent in pairs)
        self.model.truncate({slot: data.draw(st.integers(0, count)) for slot, count in most.items()})

    @precondition(lambda self: self.filled() and not self.is_full)
    @rule(data=st.data(), rng=st.randoms(use_true_random=False))
    def copy_entries(self, data, rng):
        source = data.draw(st.sampled_from(self.filled()))
        lengths = list(map(len, self.model.rows[source]))
        if data.draw(st.booleans()):
            lengths = [min(lengths)]
        count = data.draw(st.integers(1, min(lengths)))
        self.model.copy_entries(source, [sorted(rng.sample(range(length), count)) for length in lengths])

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def close(self, data):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.model.rows)), min_size=1, unique=True))
        self.model.close(slots)

    @invariant()
    def agrees(self):
        self.model.check()

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
            for number in sorted(self.model.shared):
                self.model.drop(number)
            assert self.model.cache.num_free == self.model.pages - len(self.model.outside)


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase


def with_borrowers():
    """A model of three requests: one borrows what it read, one what an eviction left, one nothing."""
    model, rng = Model(100, SLOTS, (transposed, plain)), random.Random(0)
    for _ in range(3):
        model.open()
    model.extend([0, 1, 2], [130, 130, 75])
    model.freeze(0, 2)
    model.evict(1, [0.6] * 4, rng)
    model.freeze(1, None)
    model.check()
    return model


def evict_borrowers(model):
    """Evict them behind what they borrow, and then in the midst of it."""
    rng = random.Random(1)
    for slot, first, counts in (
        (0, [64, 70, 95, 127], [20, 0, 35, 1]),
        (1, [64, 65, 70, 78], [3, 13, 0, 0]),
        (2, [0, 1, 32, 40], [31, 0, 9, 0]),
        (0, [64, 69, 31, 33], [1, 0, 3, 0]),
        (1, [0, 32, 64, 66], [9, 3, 4, 5]),
    ):
        model.evict_behind(slot, first, counts, rng, layers=1 if slot else L)
        model.check()
        model.extend([slot], [40])
        model.check()


def test_what_stays_is_not_moved_and_stays_borrowed():
    model = with_borrowers()
    evict_borrowers(model)
    assert model.columns == {0: [2, 2, 0, 1], 1: [0, 1, 2, 2]}
