"""The last queries of answers come back as they were, whatever was overwritten, rejected or given back meanwhile."""

import random

import pytest
import torch

from vllm_kvevict.schedules.ring import KeptQueries, QueryRing

LAYERS, HEADS, DIM = 2, 3, 4


def ring(parts: int, size: int) -> QueryRing:
    return QueryRing(torch.full((LAYERS, parts + 1, size, HEADS, DIM), float("nan")), 8)


def query_of(name: int, layer: int, token: int, attempt: int = 0) -> torch.Tensor:
    """What a request's token asks in a layer; a draft that is rejected asks something else."""
    return torch.full((HEADS, DIM), 1e6 * name + 1e4 * attempt + 10.0 * token + layer)


class Writer:
    """A request that keeps the queries before its positions, as an eviction does."""

    def __init__(self, name: int, at: QueryRing, window: int, first: int, interval: int):
        self.name, self.ring, self.window = name, at, window
        self.part, self.tokens = at.acquire(), 0
        self.position, self.interval = first, interval

    def keeps(self, count: int, row: int) -> KeptQueries:
        """Of its next tokens, which are rows of a batch from ``row`` on."""
        first = max(self.tokens, self.position - self.window)
        places = [self.ring.slot(self.part, token) for token in range(first, self.tokens + count)]
        return KeptQueries(range(row + count - len(places), row + count), places)


def step(writers: list[tuple[Writer, int]], attempt: int = 0) -> None:
    """A step of several requests with so many tokens each."""
    kept, row = [], 0
    for writer, count in writers:
        kept.append(writer.keeps(count, row))
        row += count
    for layer in range(LAYERS):
        rows = [
            query_of(writer.name, layer, token, attempt)
            for writer, count in writers
            for token in range(writer.tokens, writer.tokens + count)
        ]
        ring_step = writers[0][0].ring.step(kept)
        writers[0][0].ring.write(layer, torch.stack(rows), ring_step)


def check(writer: Writer) -> None:
    """At a position the window's queries come back, oldest first."""
    for layer in range(LAYERS):
        found = writer.ring.read(writer.part, writer.position, writer.window)[layer]
        window = range(writer.position - writer.window, writer.position)
        expected = torch.stack([query_of(writer.name, layer, token) for token in window], 1)
        assert found.shape == (HEADS, writer.window, DIM) and torch.equal(found, expected)


@pytest.mark.parametrize("drafts", [0, 3])
def test_last_queries_come_back_oldest_first(drafts: int) -> None:
    """Of requests that come and go, in steps of any size, some of whose tokens are rejected and computed again."""
    choose, window, parts = random.Random(drafts), 5, 4
    shared = ring(parts, window + drafts)
    writers: list[Writer] = []
    reads = wraps = 0
    for number in range(600):
        if len(writers) < parts and choose.random() < 0.2:
            first = choose.randrange(1, 40) + window
            writers.append(Writer(number, shared, window, first, choose.choice((1, 2, 7, 30))))
        if not writers:
            continue
        active = choose.sample(writers, choose.randint(1, len(writers)))
        counts = [min(choose.choice((1, 1, 1, 4, 20)), x.position - x.tokens) for x in active]
        rejected = min(drafts, choose.randint(0, drafts))
        if rejected and all(x.position - x.tokens - rejected > 0 for x in active):
            step([(x, rejected) for x in active], attempt=1)
        step(list(zip(active, counts, strict=True)))
        for writer, count in zip(active, counts, strict=True):
            writer.tokens += count
            if writer.tokens == writer.position:
                check(writer)
                reads, wraps = reads + 1, wraps + (writer.position % shared.size not in (0, window))
                writer.position += writer.interval
        for writer in choose.sample(writers, choose.random() < 0.05):
            shared.release(writer.part)
            writers.remove(writer)
    assert reads > 100 and wraps > 50


def test_parts_are_given_back_and_run_out() -> None:
    shared = ring(2, 4)
    first, second = shared.acquire(), shared.acquire()
    assert {first, second} == {0, 1} and shared.num_parts == 2
    with pytest.raises(RuntimeError, match="all 2 parts of the ring"):
        shared.acquire()
    shared.release(first)
    assert shared.acquire() == first


def test_what_is_kept_of_nobody_touches_no_request() -> None:
    """A replayed graph writes all of its rows, in order; those of no request go to a part of their own."""
    shared = ring(2, 4)
    places = torch.tensor([shared.nowhere, shared.slot(1, 6), shared.nowhere])
    rows = torch.arange(5.0)[:, None, None].expand(5, HEADS, DIM)
    shared.write(1, rows, type(shared.step([]))(None, places))
    written = ~shared.memory.isnan().flatten(3).any(3)
    assert written.nonzero().tolist() == [[1, 1, 2], [1, 2, 0]]
    assert torch.equal(shared.read(1, 7, 1)[1], torch.ones(HEADS, 1, DIM))
