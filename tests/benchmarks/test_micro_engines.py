"""Parts of steps, accounts and chats that `micro` times; no engine is started."""

import itertools
from types import SimpleNamespace

import pytest

from benchmarks.harness.scenarios import STOCK
from benchmarks.micro import breakdown, frontend
from benchmarks.micro.breakdown import REST, Stopwatch
from benchmarks.micro.decode import check_steps
from benchmarks.micro.frontend import CHAT, DOCUMENT, TURN
from benchmarks.micro.ledger import PROMPT, decode_round, make_ledger, make_requests, make_stock
from vllm_kvevict.engine.request_options import CHAT as CHAT_FACTS
from vllm_kvevict.engine.request_options import ChatFacts


def test_the_time_of_what_a_function_calls_is_not_its_own(monkeypatch):
    now = SimpleNamespace(time=100.0)  # moves only when it is told to
    monkeypatch.setattr(breakdown.time, "perf_counter", lambda: now.time)

    def spend(seconds):
        now.time += seconds

    stopwatch, work = Stopwatch(), SimpleNamespace()
    work.inner = lambda seconds: spend(seconds) or seconds
    work.outer = lambda: spend(1) or work.inner(2) + work.inner(4)
    stopwatch.watch(work, "inner", "inside")
    stopwatch.watch(work, "outer", "outside")
    assert stopwatch.run(lambda: spend(16) or work.outer()) == {REST: 16, "outside": 1, "inside": 6}
    assert stopwatch.run(lambda: None) == {REST: 0}


def test_medians_of_parts_and_of_steps():
    steps = [{REST: 0.001, "attention": seconds} for seconds in (0.002, 0.004, 0.010)]
    # A part that a step did not have took no time.
    found = breakdown.milliseconds([*steps[:2], {REST: 0.003}])
    assert found == pytest.approx({REST: 1, "attention": 2, breakdown.TOTAL: 3})


@pytest.mark.parametrize("seen", [[(0.1, 7, 4)], [(0.1, 0, 3)], [(0.1, 0, 4)] * 2, []])
def test_timed_steps_must_be_pure_decode(seen):
    check_steps([(0.1, 0, 4)], steps=1, batch=4)
    with pytest.raises(RuntimeError, match="pure decode"):
        check_steps(seen, steps=1, batch=4)


def test_both_managers_schedule_the_same_steps():
    requests = [make_requests(2, last=PROMPT) for _ in range(2)]
    ledger = make_ledger(requests[0][:-1], 1)
    stock = make_stock(make_requests(2, last=0)[:-1])
    assert decode_round(ledger, requests[0][:-1], requests[0][-1]) > 0
    assert stock.block_pool.get_num_free_blocks() > 0


# The front end.


class FrontEnd:
    """A token is a word; ``notes`` are what a prompt gets besides."""

    def __init__(self, *ends):
        self.facts, self.rendered = ChatFacts(ends=list(ends)), itertools.count()
        encode = SimpleNamespace(encode=lambda text, **options: text.split())
        self.renderer = SimpleNamespace(get_tokenizer=lambda: encode)

    def render(self, messages):
        next(self.rendered)
        words = " ".join(message["content"] for message in messages).split()
        return {"type": "token", "prompt_token_ids": words, CHAT_FACTS: self.facts}


@pytest.mark.parametrize("kind, count", [(DOCUMENT, 2), (CHAT, 2 * 4 + 1)])
def test_chats_have_about_as_many_tokens_as_asked(kind, count):
    messages = frontend.messages_of(kind, FrontEnd(), 4 * TURN)
    assert len(messages) == count and messages[-1]["role"] == "user"
    words = sum(len(message["content"].split()) for message in messages)
    assert 0.9 * 4 * TURN <= words <= 1.1 * 4 * TURN


def test_sides_must_find_what_they_look_for():
    found = {STOCK: FrontEnd(), "prefix": FrontEnd(5), "turns": FrontEnd(5)}
    _, seconds = frontend.compare(DOCUMENT, found, 100, rounds=3)
    assert {name: len(of) for name, of in seconds.items()} == {STOCK: 3, "prefix": 3, "turns": 3}
    assert frontend.added_ms({STOCK: [1.0, 2.0], "turns": [1.5, 2.5]}, "turns").median == 500
    assert next(found["prefix"].rendered) == 1 + 4
    with pytest.raises(RuntimeError, match="scope turns found no end in a document"):
        frontend.compare(DOCUMENT, found | {"turns": FrontEnd()}, 100, rounds=1)


def test_what_a_breakdown_watches_is_there():
    assert all(callable(getattr(owner, name)) for owner, name, _ in breakdown.of_eviction())
