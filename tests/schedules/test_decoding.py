"""What requests hold at most whose answers are evicted: bounds against rows that are played through, token by token."""

import dataclasses
import itertools
import random
import sys

import numpy as np
import pytest

from vllm_kvevict.cache.counts import PageCount
from vllm_kvevict.policies import EvictionConfig, most_candidates
from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.bounds import MemoryBounds
from vllm_kvevict.schedules.plan import Plan, answer_phase
from vllm_kvevict.schedules.registry import plan_of

PAGE = 32
HOLDS = {"whole": "full", "uniform": "snapkv", "ragged": "ada-snapkv"}
"""What of a prompt is kept, and by which policy."""


def answer_config(policy: str, budget: int) -> EvictionConfig:
    return EvictionConfig(policy, budget=budget, window=4)


def plan(prompt: str, policy: str, n: int, budget: int, interval: int) -> Plan:
    """Of a prompt that is kept as ``HOLDS`` says, and an answer evicted by a policy."""
    config = EvictionConfig(HOLDS[prompt], **({} if prompt == "whole" else {"budget": 40}))
    return plan_of(config, n, answer_phase(answer_config(policy, budget), interval, n))


class Rows:
    """What one rank holds of a request; rows that compete take what they can in any order, its own first or not."""

    def __init__(self, its_plan: Plan, rank: RankCapacity, choose: random.Random):
        self.plan, self.rank, self.choose = its_plan, rank, choose
        self.tokens = 0
        self.lengths = np.zeros((rank.num_layers, rank.num_kv_heads), np.int64)
        self.pinned = self.lengths

    @property
    def pages(self) -> int:
        return int((-(-self.lengths // PAGE)).sum())

    @property
    def count(self) -> PageCount:
        residues = np.bincount(self.lengths.ravel() % PAGE, minlength=PAGE)
        return PageCount.from_residues(self.pages, self.tokens, residues.tolist())

    def go_on(self) -> int:
        """Store a token, and evict if that is due; pages held before that."""
        self.tokens, self.lengths = self.tokens + 1, self.lengths + 1
        held, prompt, answer = self.pages, self.plan.prompt, self.plan.answer
        assert answer is not None
        if prompt is not None and self.tokens == prompt.end:
            config = prompt.config
            self._keep(config, config.budget or 0, config.window_for(prompt.end), np.zeros_like(self.lengths))
        if self.tokens == answer.begins:
            self.pinned = self.lengths
        if self.tokens in answer.positions:
            budget = answer.config.budget or 0
            self._keep(answer.config, budget, answer.window, self.pinned)
        return held

    def _keep(self, config: EvictionConfig, budget: int, always: int, pinned: np.ndarray) -> None:
        stored = self.lengths - pinned
        if not config.heads_compete:
            self.lengths = pinned + budget
            return
        kept = np.full_like(stored, always)
        for layer in range(self.rank.num_layers):
            free, (heads, every) = budget - always, (self.rank.num_kv_heads, self.rank.num_model_kv_heads)
            left = heads * free
            if heads < every:
                left = self.choose.randint(0, most_candidates(config, free, every * free, heads, every))
            for head in self.choose.sample(range(self.rank.num_kv_heads), self.rank.num_kv_heads):
                more = min(left, int(stored[layer, head]) - always)
                kept[layer, head] += more
                left -= more
        self.lengths = pinned + kept


RANKS = {
    "one rank": RankCapacity(10**6, 0, 3, 2, 3, 2),
    "TP 2": RankCapacity(10**6, 0, 3, 2, 3, 4),
    "a stage": RankCapacity(10**6, 2, 2, 3, 6, 3),
}


def cases(seed: object, count: int):
    choose = random.Random(str(seed))
    for _ in range(count):
        n = choose.choice((45, 60, 64, 97, 130))
        budget = choose.choice((5, 8, 31, 32, 33, 64))
        interval = choose.choice((1, 2, 7, 32, 50))
        yield choose, n, budget, interval


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("prompt", HOLDS)
@pytest.mark.parametrize("policy", ["snapkv", "ada-snapkv"])
def test_no_rows_ever_hold_more_than_the_bound(policy: str, prompt: str, name: str) -> None:
    rank = RANKS[name]
    server = MemoryBounds([rank], PAGE, 4096, 1, False)
    is_exact = policy == "snapkv" and prompt != "ragged"
    for choose, n, budget, interval in cases((policy, prompt, name), 8):
        its = plan(prompt, policy, n, budget, interval)
        rows, last = Rows(its, rank, choose), n + budget + 3 * interval + 2
        since, most_since, most = rows.count, 0, 0
        for tokens in range(1, last + 1):
            held = rows.go_on()
            if tokens < n:
                continue
            if tokens == n:
                most, since, most_since = rows.pages, rows.count, rows.pages
            most, most_since = (
                max(most, held if tokens > n else 0),
                max(most_since, held if tokens > n else 0),
            )
            (bound,) = server.after_eviction(its, tokens)
            assert most <= bound, (its, tokens)
            later = server.most_held(its, 0, since, tokens)
            assert most_since <= later <= bound, (its, since.tokens, tokens)
            if is_exact:
                assert most == bound and most_since == later, (its, since.tokens, tokens)
            if its.phase_of(tokens) == its.answer or choose.random() < 0.1:
                since, most_since = rows.count, rows.pages


def test_counts_without_page_ids_follow_uniform_rows_and_bound_others() -> None:
    """10,000 steps: exact after each eviction where rows keep the same, never below what any other rows hold."""
    steps = 0
    for policy, prompt in itertools.product(("snapkv", "ada-snapkv"), HOLDS):
        for choose, n, budget, interval in cases((policy, prompt, "counts"), 30):
            its, rank = plan(prompt, policy, n, budget, interval), RANKS["one rank"]
            rows, count = Rows(its, rank, choose), PageCount.start(rank.rows, PAGE)
            answer = its.answer
            assert answer is not None
            for tokens in range(1, n + budget + 3 * interval):
                held = rows.go_on()
                assert held <= count.at(tokens)
                if tokens == n:
                    count = rows.count
                if tokens in answer.positions and policy == "snapkv":
                    count = count.after_dropping(interval, tokens)
                    assert count == rows.count
                elif tokens in answer.positions:
                    entries = count.entries + rank.rows * (tokens - interval - count.tokens)
                    assert rows.lengths.sum() == entries
                    bound = PageCount.most(entries, tokens, rank.rows, PAGE)
                    assert all(rows.count.at(tokens + more) <= bound.at(tokens + more) for more in range(70))
                    count = rows.count
                steps += 1
    assert steps > 10_000


@pytest.mark.parametrize("policy", ["snapkv", "ada-snapkv"])
def test_where_an_answer_ends_for_lack_of_memory(policy: str) -> None:
    """Before its second eviction, or never."""
    ends = set()
    for choose, n, budget, interval in cases(policy, 60):
        its, small = plan("whole", policy, n, budget, interval), choose.randrange(2, 8)
        rank = dataclasses.replace(RANKS["one rank"], pages=6 * small)
        server, rows = MemoryBounds([rank], PAGE, 4096, 1, False), Rows(its, rank, choose)
        while rows.tokens < n:
            rows.go_on()
        if rows.pages > rank.pages:
            continue
        most = server.most_tokens_from(its, [rows.count], 10**9)
        fits = server.most_held(its, 0, rows.count, most) <= rank.pages
        assert fits and (most == 10**9 or server.most_held(its, 0, rows.count, most + 1) > rank.pages)
        assert most == 10**9 or n <= most < n + budget + 2 * interval
        assert most == server.most_tokens(its, n, 10**9)
        ends.add(most == 10**9)
    assert ends == {True, False}


def test_positions_of_an_answer_never_end() -> None:
    its = plan("uniform", "ada-snapkv", 100, 8, 5)
    answer = its.answer
    assert answer is not None and its.prompt is not None and its.phases == (its.prompt, answer)
    assert (answer.positions[:3], answer.begins) == (range(113, 128, 5), 100)
    assert [its.next_eviction(x) for x in (0, 99, 100, 112, 113, 10**9 + 2)] == [
        *(100, 100, 113, 113, 118),
        10**9 + 3,
    ]
    assert [its.phase_at(x) for x in (99, 100, 10**12)] == [its.prompt, answer, answer]
    assert [its.phase_of(x) for x in (100, 108, 113, 115, 118)] == [its.prompt, None, answer, None, answer]
    assert [answer.last_eviction(x) for x in (112, 113, 117, 118)] == [None, 113, 113, 118]
    assert [answer.entries_at(x) for x in (100, 112, 113, 117, 118)] == [0, 12, 8, 12, 8]
    assert its.grows_until(100, 10**9) == 113 and its.grows_until(113, 115) == 115
    whole = plan("whole", "ada-snapkv", 100, 8, 5)
    assert whole.prompt is None and whole.answer == answer and whole.reserved(None) == 0
    assert answer.end > sys.maxsize - 5


def test_what_of_an_answer_is_left_for_others() -> None:
    """An answer is, to its first eviction, if nothing was evicted at all; while the request runs its prompt alone."""
    whole, evicted = plan("whole", "snapkv", 100, 8, 5), plan("uniform", "snapkv", 100, 8, 5)
    assert [whole.leaves(x) for x in (60, 100, 112, 500)] == [60, 100, 100, 100]
    assert [whole.leaves_at_end(x) for x in (60, 100, 112, 113, 500)] == [60, 100, 112, 100, 100]
    assert [evicted.leaves_at_end(x) for x in (60, 100, 112, 500)] == [60, 100, 100, 100]
    assert [whole.most_cached(x) for x in (60, 100, 101, 500)] == [59, 99, 100, 100]
