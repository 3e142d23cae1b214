"""Readings, steps and bookkeeping of engines that `micro` times; no engine is started."""

import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.harness.scenarios import BLOCK, STOCK, token_bytes
from benchmarks.micro import breakdown, engines, frontend, loop, prefill, waste
from benchmarks.micro.engines import REST, Stopwatch
from benchmarks.micro.frontend import CHAT, DOCUMENT, TURN
from benchmarks.micro.managers import PROMPT, decode_round, make_ledger, make_requests, make_stock
from benchmarks.micro.prefill import ALL, IN_ONE_STEP, IN_STEPS, KEPT, ONLINE, OWN_CHUNK, Reading, paper_share
from benchmarks.micro.waste import Sample, object_bytes, summary
from vllm_kvevict.cache.pool import PagePool
from vllm_kvevict.cache.tables import PageTables
from vllm_kvevict.quality import checkpoint


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when it is told to."""
    now = SimpleNamespace(time=100.0)
    monkeypatch.setattr(engines.time, "perf_counter", lambda: now.time)
    return now


def test_the_time_of_what_a_function_calls_is_not_its_own(clock):
    stopwatch = Stopwatch()

    class Work:
        def inner(self, seconds):
            clock.time += seconds
            return seconds

        def outer(self):
            clock.time += 1
            result = self.inner(2) + self.inner(4)
            clock.time += 8
            return result

    stopwatch.watch(Work, "inner", "inside")
    work = Work()
    stopwatch.watch(work, "outer", "outside")

    def step():
        clock.time += 16
        assert work.outer() == 6

    assert stopwatch.run(step) == {REST: 16, "outside": 9, "inside": 6}
    assert stopwatch.run(lambda: None) == {REST: 0}


def test_medians_of_parts_and_of_steps():
    steps = [{REST: 0.001, "attention": seconds} for seconds in (0.002, 0.004, 0.010)]
    cell = breakdown.Cell(4, "stock", breakdown.DECODE, [*steps[:2], {REST: 0.003}])
    # A part that a step did not have took no time.
    assert cell.milliseconds == pytest.approx({REST: 1, "attention": 2}) and cell.total == pytest.approx(3)


def test_both_managers_schedule_the_same_steps():
    requests = [make_requests(2, last=PROMPT) for _ in range(2)]
    ledger, report = make_ledger(requests[0][:-1], 1, seed=0)
    stock = make_stock(make_requests(2, last=0)[:-1])
    assert report > 0 and decode_round(ledger, requests[0][:-1], requests[0][-1]) > 0
    assert stock.block_pool.get_num_free_blocks() > 0


# Prompts.


def cell(context: int, sides: dict[str, tuple[float, float, int]]) -> prefill.Cell:
    found = prefill.Cell(context)
    for side, (wall, attention, held) in sides.items():
        found.readings[side] = [Reading(wall, wall, attention, held)] * 3
    return found


QUESTION_SIDES = {KEPT: (1.0, 1.0, 100), ALL: (3.0, 1.0, 100), OWN_CHUNK: (1.7, 1.0, 100)}
ONLINE_SIDES = {KEPT: (1.0, 1.0, 100), ONLINE[0]: (1.02, 1.0, 100), ONLINE[1]: (1.04, 1.0, 100)}


@pytest.mark.parametrize(
    "words, context, sides, values, met",
    [
        ([], 32768, {STOCK: (10.0, 8.0, 1000), "take": (5.0, 1.0, 130)}, [0.13, 0.125], [False, True]),
        (["--dtype", "float32"], 32768, {STOCK: (1, 1, 100), "take": (1, 1, 10)}, [0.1], [True]),
        (["--contexts", "8192"], 8192, {STOCK: (1, 1, 100), "take": (1, 1, 10)}, [], []),
        (["recycle"], 8192, {IN_STEPS: (1.0, 1.0, 100), IN_ONE_STEP: (1.0, 1.0, 16)}, [0.16], [True]),
        (["recycle", "--budget", "0.5"], 8192, {IN_STEPS: (1, 1, 100), IN_ONE_STEP: (1, 1, 16)}, [], []),
        (["repeat"], 8192, QUESTION_SIDES, [3.0, 1.7], [True, False]),
        (["online"], 8192, ONLINE_SIDES, [1.02, 1.04], [True, False]),
    ],
)
def test_targets_of_reading_prompts(at_level, words, context, sides, values, met):
    at_level("avx512")
    found = prefill.targets(loop.parse("prefill", prefill, words), [cell(context, sides)])
    assert [target.value.median for target in found] == values and [target.met for target in found] == met


def test_the_formula_of_the_paper():
    # (2 * 2048 + 512 + 2048) / (2 * 32768) - 2048 * 2560 / (2 * 32768^2)
    assert paper_share(32768) == pytest.approx(0.09912, abs=1e-5)
    assert paper_share(2048) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("what", ["repeat", "online"])
def test_sides_with_a_question_differ_in_eviction_alone(what, monkeypatch):
    monkeypatch.setattr(prefill, "model", lambda max_len, layers: "m")
    monkeypatch.setattr(prefill, "Side", lambda name, model, threads, **settings: settings)
    settings = prefill.make_sides(loop.parse("prefill", prefill, [what]))
    policies = [one.pop("kv_eviction") for one in settings]
    assert policies == (["full", "kvzip", "kvzip"] if what == "repeat" else ["full", *ONLINE])
    settings[-1].pop("kv_eviction_config", None)
    assert settings[0] == settings[1] == settings[2]


# Waste.

GOOD = Sample([100, 129], entries=960, pages=31, page_size=32, page_bytes=8192, metadata={"tables": 1000})


@dataclass
class Node:
    value: object


def test_every_object_counts_once_and_classes_do_not():
    shared = [1000001, 1000002]
    alone = object_bytes(shared)
    assert alone == sys.getsizeof(shared) + sum(map(sys.getsizeof, shared))
    assert object_bytes([shared, shared]) == sys.getsizeof([shared, shared]) + alone
    node = Node(None)
    node.value = node  # a circle ends
    assert object_bytes(node) == sys.getsizeof(node) + sys.getsizeof(node.__dict__) + sys.getsizeof("value")
    assert object_bytes(torch.zeros(10, dtype=torch.int32)) == 40 and object_bytes(Node) == 0
    assert object_bytes({"a": np.zeros(10)}) == sys.getsizeof({"a": 0}) + sys.getsizeof("a") + 80


def test_all_arrays_of_the_cache_are_found():
    tables, pool = PageTables(4, 8, "cpu"), PagePool(100, "cpu")
    assert tables.nbytes < object_bytes(tables) < tables.nbytes + 1500
    assert 5 * 100 < object_bytes(pool) < 5 * 100 + 1500  # an int32 and an int8 a page


def test_the_worst_step_counts():
    assert GOOD.stock_bytes == 3 * BLOCK * token_bytes("bfloat16")  # 100 tokens take one block, 129 two
    samples = [GOOD, replace(GOOD, entries=900), replace(GOOD, metadata={"tables": 9000})]
    figures = summary(samples)
    assert figures["live_after_evictions"] == GOOD.live == 960 / 992 and figures["live_worst"] == 900 / 992
    assert figures["live_worst"] < figures["live_mean"] < GOOD.live
    assert figures["metadata_worst"] == 9000 / (31 * 8192)
    assert [target.met for target in waste.targets({"a": summary([GOOD])})] == [True, True]
    assert [target.met for target in waste.targets({"a": summary([GOOD]), "b": figures})] == [False, False]


# The front end.


class FrontEnd:
    """A token is a word; ``notes`` are what a prompt gets besides."""

    def __init__(self, **notes):
        self.notes, self.rendered = notes, itertools.count()
        encode = SimpleNamespace(encode=lambda text, **options: text.split())
        self.renderer = SimpleNamespace(get_tokenizer=lambda: encode)

    def render(self, messages):
        next(self.rendered)
        words = " ".join(message["content"] for message in messages).split()
        return {"prompt_token_ids": words, **self.notes}


@pytest.mark.parametrize("kind, count", [(DOCUMENT, 2), (CHAT, 2 * 4 + 1)])
def test_chats_have_about_as_many_tokens_as_asked(kind, count):
    messages = frontend.messages_of(kind, FrontEnd(), 4 * TURN)
    assert len(messages) == count and messages[-1]["role"] == "user"
    words = sum(len(message["content"].split()) for message in messages)
    assert 0.9 * 4 * TURN <= words <= 1.1 * 4 * TURN


def test_sides_must_find_what_they_look_for():
    def sides(**notes):
        return {STOCK: FrontEnd(), "prefix": FrontEnd(**notes), "turns": FrontEnd(**notes)}

    found = sides(kv_prefix_len=5, kv_turns=[5])
    cell = frontend.compare(DOCUMENT, found, 100, rounds=3)
    assert len(cell.seconds) == 3 and all(list(of) == [STOCK, "prefix", "turns"] for of in cell.seconds)
    assert next(found["prefix"].rendered) == 1 + 4
    with pytest.raises(RuntimeError, match="scope turns found no kv_turns in a document"):
        frontend.compare(DOCUMENT, sides(kv_prefix_len=5), 100, rounds=1)


def test_the_verdict_is_on_the_long_document_with_the_usual_tokenizer(monkeypatch):
    monkeypatch.setattr(checkpoint, "find", lambda: Path("usual"))

    def cell(kind, tokens, added):
        return frontend.Cell(kind, tokens, [{STOCK: 0.2, "prefix": 0.2 + added, "turns": 1.0}] * 3)

    cells = [cell(DOCUMENT, 1024, 0.5), cell(CHAT, 32768, 0.5), cell(DOCUMENT, 32800, 0.015)]
    assert [target.met for target in frontend.targets(cells, Path("usual"))] == [True]
    assert [target.met for target in frontend.targets([cell(DOCUMENT, 32800, 0.025)], Path("usual"))] == [
        False
    ]
    assert frontend.targets(cells, Path("another")) == []
