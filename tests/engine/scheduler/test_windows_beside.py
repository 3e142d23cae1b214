"""Layers with a sliding window share the memory with evicted ones: preemptions come to an end."""

import contextlib
import dataclasses
import random
import sys
from typing import Any

import pytest

from tests.engine.support.servers import PAGE, Setup, make_request
from tests.engine.support.simulation import Simulation
from vllm_kvevict.engine.scheduler import other_layers, scheduler
from vllm_kvevict.engine.scheduler.account import Account
from vllm_kvevict.engine.scheduler.admission import PATIENCE
from vllm_kvevict.engine.scheduler.blocks import SharedBlocks
from vllm_kvevict.engine.scheduler.shared import uncompressed

LONGEST, ROWS = 1024, 4
OPTIONS = {"policy": "ada-snapkv", "budget": 0.2, "min_prompt": 0, "check": True}


def server(window: int, cached: bool = False, **sizes: Any) -> Simulation:
    """With memory for two of the longest requests; for eight, which are kept whole, if prefixes are cached."""
    pages, options = ROWS * (8 if cached else 2) * LONGEST // PAGE, dict(OPTIONS)
    if cached:
        options["policy"] = "full"
    step = 128 if cached else 512
    setup = Setup([(2, 2)], [pages], LONGEST, step, window=window, prefix_caching=cached, options=options)
    return Simulation(dataclasses.replace(setup, **sizes))


def load(seed: int, window: int, **sizes: Any) -> Simulation:
    """Requests with long answers, half of them kept whole."""
    simulation, choose = server(window, **sizes), random.Random(seed)
    for index in range(24):
        fields: dict[str, Any] = {"kv_eviction": "full"} if index % 2 else {}
        prompt, answer = choose.randrange(100, 500), choose.randrange(50, 500)
        simulation.add(make_request(f"r{index}", prompt, answer, fields))
    simulation.run(20_000)
    return simulation


@pytest.mark.parametrize("window", [512, 900])
@pytest.mark.parametrize("seed", [0, 2])
def test_nobody_is_preempted_again_and_again(seed: int, window: int) -> None:
    simulation, alone = load(seed, window), load(seed, 0)
    assert simulation.outputs == alone.outputs
    assert max(simulation.preemptions.values()) <= PATIENCE + 1
    assert simulation.prefilled <= 2 * alone.prefilled


@pytest.mark.parametrize("window", [40, 100, 512])
@pytest.mark.parametrize("prompt", [5, 300, 500])
def test_what_a_window_takes_of_an_answer(window: int, prompt: int) -> None:
    """As many blocks as it lies over at most; the last one behind it is given back a step late."""
    simulation = server(window)
    simulation.add(make_request("r", prompt, 400, {}))
    simulation.step()
    ledger, most = simulation.ledger, 0
    assert ledger.blocks is not None
    _, counted = ledger.accounts["r"].beside
    while "r" in ledger.accounts:
        if ledger.accounts["r"].tokens > prompt + 2:
            most = max(most, ledger.blocks.of_others - 1)
        simulation.step()
    assert most - 1 <= counted <= most


def test_what_windows_will_take_must_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: beside what other layers hold now there seems to be room."""

    def as_now(self: Any, while_read: Any, at_end: Any, *args: Any) -> Any:
        now = self._blocks.of_others
        return self._with_blocks(while_read, now), self._with_blocks(at_end, now)

    monkeypatch.setattr(other_layers.OtherLayers, "together_later", as_now)
    assert max(load(2, 512).preemptions.values()) > PATIENCE + 1


DRAFTING = {"drafter": "draft_model", "drafts": 3}


def test_what_a_draft_model_will_take_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: beside what it holds now there seems to be room."""
    counted = sum(load(1, 0, **DRAFTING).preemptions.values())
    nothing_more = lambda self, accounts, *_: (self._drafting_blocks(x.tokens for x in accounts), 0, 0)  # noqa: E731
    monkeypatch.setattr(other_layers.OtherLayers, "_of_draft_model", nothing_more)
    assert 3 * counted < sum(load(1, 0, **DRAFTING).preemptions.values())


@pytest.mark.parametrize("drafts", [1, 40])
def test_what_a_draft_model_takes(drafts: int) -> None:
    """All tokens, and those that it drafts."""
    simulation = server(0, drafter="eagle3", drafts=drafts)
    simulation.add(make_request("r", 300, 400, {"kv_eviction": "full"}))
    simulation.step()
    ledger, most, tokens = simulation.ledger, 0, 0
    assert ledger.blocks is not None
    while "r" in ledger.accounts:
        most, tokens = max(most, ledger.blocks.of_others - 1), max(tokens, ledger.accounts["r"].tokens)
        simulation.step()
    assert ledger.others.pages_beside(tokens) == [most * ROWS]


def most_at_once(**drafting: Any) -> int:
    """Requests that run together in the memory of eight whole prompts of a model with 24 layers."""
    shape, prompt = (24, 2), 2048
    options = {"policy": "ada-snapkv", "budget": 0.2}
    simulation = Simulation(Setup([shape], [48 * 8 * prompt // PAGE], 4096, options=options, **drafting))
    for index in range(60):
        simulation.add(make_request(f"r{index}", prompt, 128, {}))
    simulation.run(20_000)
    assert not sum(simulation.preemptions.values())
    return simulation.most_running


def test_a_draft_model_of_one_layer_leaves_room_for_most_requests() -> None:
    without = most_at_once()
    assert most_at_once(drafter="eagle3", drafts=3, is_small=True) >= 0.85 * without
    # The control: one with as many layers takes more.
    assert most_at_once(drafter="eagle3", drafts=3) < 0.6 * without


def test_requests_that_begin_alike_share_what_a_draft_model_has() -> None:
    simulation = server(0, cached=True, **DRAFTING)
    for number in range(25):
        simulation.add(make_request(f"r{number}", [*range(8, 808), *[number] * 8], 60))
        if not number:
            simulation.run(200)
    simulation.run(5000)
    assert simulation.most_running >= 20 and not sum(simulation.preemptions.values())


PROMPT, LAST = list(range(8, 708)), list(range(5000, 5040))


def found_beside(is_reset: bool, has_states: bool) -> int:
    """Blocks of others' windows or states that requests see where an earlier one is evicted or reset while it is
    read."""
    simulation = server(0 if has_states else 100, cached=True, states=has_states)
    evicted = {"kv_eviction": "ada-snapkv", "kv_prefix_len": 300}
    simulation.add(make_request("a", PROMPT, 4, None if is_reset else evicted))
    for _ in range(3):
        simulation.step()
    if is_reset:
        simulation.reset()
    for name in ("", "b", "c"):
        if name:
            simulation.add(make_request(name, PROMPT, 4))
        simulation.run(100)
    return simulation.windows.shared


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("is_reset", [False, True])
def test_what_others_may_begin_with(
    is_reset: bool, has_states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not windows and states behind an eviction, nor those of before a reset; without either rule they would be
    found."""
    assert found_beside(is_reset, has_states) > 0
    if is_reset:
        monkeypatch.setattr(Account, "invalidate", lambda self: None)
    for module in (uncompressed, scheduler):
        monkeypatch.setattr(module, "whole_until", lambda plan: sys.maxsize)
    with pytest.raises(AssertionError, match="read before a reset" if is_reset else "evicted before"):
        found_beside(is_reset, has_states)


def crowd(seed: int, **layers: Any) -> None:
    """Prompts about three documents on a server with memory for two or three; in the end nothing is held."""
    choose = random.Random(seed)
    pages, options = ROWS * choose.choice((2, 3)) * LONGEST // PAGE, {**OPTIONS, "policy": "full"}
    step, window = choose.choice((128, 512)), choose.choice((100, 300))
    layers = layers or {"window": window}
    simulation = Simulation(
        Setup([(2, 2)], [pages], LONGEST, step, prefix_caching=True, options=options, **layers)
    )
    for index in range(30):
        document, length, rest = choose.randrange(3), choose.randrange(100, 700), choose.randrange(1, 80)
        prompt = [8 + (document * 131 + token) % 400 for token in range(length)]
        prompt += [choose.randrange(8, 400) for _ in range(rest)]
        fields = {"kv_eviction": "ada-snapkv"} if index % 3 == 0 else {}
        simulation.add(make_request(f"r{index}", prompt, choose.randrange(1, 100), fields))
        for _ in range(choose.randrange(12)):
            simulation.step()
    simulation.run(20_000)
    ledger, pool = simulation.ledger, simulation.ledger.block_pool
    assert ledger.blocks is not None and ledger.books.used == [0]
    assert pool.get_num_free_blocks() + len(ledger.blocks.as_pages) == pool.num_gpu_blocks - 1


def test_a_crowd_beside_states() -> None:
    for seed in range(12):
        crowd(seed, states=True)


def crowd_of_prefixes(seed: int, columns: int = 40, **layers: Any) -> Simulation:
    """Questions about documents, and conversations, all of which are compressed; in the end nothing is held."""
    choose = random.Random(seed)
    options = {**OPTIONS, "budget": 0.3, "decode_reserve": 1, "min_turn": 32}
    sizes = {"prefix_caching": True, "options": options, "depth": choose.choice((1, 3)), **layers}
    simulation = Simulation(
        Setup([(2, 2)], [ROWS * columns], LONGEST, choose.choice((128, 512)), **sizes), seed
    )
    for index in range(24):
        document = choose.randrange(3)
        ends = [60 + 140 * turn + 37 * document for turn in range(choose.randrange(1, 5))]
        prompt = [8 + (document * 131 + token) % 400 for token in range(ends[-1])]
        prompt += [choose.randrange(8, 400) for _ in range(choose.randrange(1, 80))]
        fields = {"kv_turns": ends} if index % 3 else {"kv_prefix_len": ends[0]}
        simulation.add(make_request(f"r{index}", prompt, choose.choice((1, 20, 100)), fields))
        for _ in range(choose.randrange(20)):
            simulation.step()
        if choose.random() < 0.2:
            simulation.abort(choose.choice([f"r{number}" for number in range(index + 1)]))
    simulation.run(20_000)
    simulation.reset()
    simulation.add(make_request("last", 5, 3))
    simulation.run(100)
    ledger, pool = simulation.ledger, simulation.ledger.block_pool
    assert ledger.blocks is not None and ledger.books.held == [0] and not ledger.others.snapshots.references()
    assert pool.get_num_free_blocks() + len(ledger.blocks.as_pages) == pool.num_gpu_blocks - 1
    return simulation


@pytest.mark.parametrize("layers", [{"window": 100}, {"window": 300}, {"states": True}], ids=str)
@pytest.mark.parametrize("columns", [33, 100])
def test_compressed_prefixes_beside_other_layers(columns: int, layers: dict[str, Any]) -> None:
    """Everybody ends, in whatever they begin; what is found there is what its first reader has left."""
    crowds = [crowd_of_prefixes(seed, columns, **layers) for seed in range(3)]
    assert sum(crowd.workers.hits for crowd in crowds) > 3
    assert max(max(crowd.preemptions.values()) for crowd in crowds) <= PATIENCE + 1


def asked(simulation: Simulation, name: str, prompt: list[int], fields: dict[str, Any]) -> int:
    """Tokens that a request reads."""
    before = simulation.prefilled
    simulation.add(make_request(name, prompt, 2, fields))
    simulation.run(500)
    return simulation.prefilled - before


@pytest.mark.parametrize("has_states", [False, True])
def test_a_prefix_is_found_again(has_states: bool) -> None:
    """Whose snapshot went: the next request reads it anew, and leaves another one."""
    simulation = server(0 if has_states else 100, cached=True, states=has_states)
    shared, ends = simulation.ledger.shared, [300, 360, 420]
    questions = [[*PROMPT[:420], *LAST[:20], number] for number in range(4)]
    fields = {"kv_eviction": "snapkv", "kv_turns": ends}
    assert [asked(simulation, f"a{n}", questions[n], fields) for n in range(2)] == [441, 21]
    while shared.compressed._release_one(shared.compressed):
        pass
    assert [asked(simulation, f"b{n}", questions[n], fields) for n in range(2, 4)] == [441, 21]


def test_nobody_begins_with_what_is_read_again_in_the_same_step() -> None:
    """One that waits copies its last block before the other one has written it."""
    crowd_of_prefixes(491608, 40, window=300, priority=True)


def test_where_there_are_too_many_prefixes_their_snapshots_stay() -> None:
    """As long as there is memory: to part with them makes no place for another prefix."""
    simulation = server(100, cached=True)
    compressed = simulation.ledger.shared.compressed
    for number in range(3):
        prompt = [*(8 + number * 131 + token for token in range(300)), *LAST]
        asked(simulation, f"r{number}", prompt, {"kv_eviction": "snapkv", "kv_turns": [100, 200, 300]})
    compressed.most = 9
    asked(simulation, "last", PROMPT[300:], {"kv_eviction": "snapkv", "kv_prefix_len": 200})
    assert [prefix.snapshot is None for prefix in compressed] == [False] * 9


def test_cached_windows_do_not_become_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a request is about to begin with them; else some would."""
    for seed in range(12):
        crowd(seed)
    monkeypatch.setattr(SharedBlocks, "holding", lambda self, found: contextlib.nullcontext())
    with pytest.raises(AssertionError, match="a block is of windows and pages"):
        for seed in range(12):
            crowd(seed)


@pytest.mark.parametrize("window, columns, seed", [(300, 40, 1), (100, 60, 1), (100, 40, 0)])
def test_what_is_cached_costs_nobody_else_anything(window: int, columns: int, seed: int) -> None:
    """Requests with nothing in common go the same way as without a cache."""
    found = []
    for is_cached in (False, True):
        choose, options = random.Random(seed), {**OPTIONS, "budget": 0.3, "decode_reserve": 200}
        sizes = {"window": window, "prefix_caching": is_cached, "options": options}
        simulation = Simulation(Setup([(2, 2)], [ROWS * columns], LONGEST, 256, **sizes), seed)
        for index in range(12):
            prompt = [choose.randint(8, 9999) for _ in range(choose.randint(300, 800))]
            simulation.add(make_request(f"r{index}", prompt, choose.randint(20, 200)))
        simulation.run(3000)
        found.append((simulation.preemptions, simulation.steps, simulation.prefilled))
    assert found[0] == found[1]


def test_windows_of_a_step_that_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody begins with windows that a request would have left, had it not been preempted in the very same step."""
    simulation = server(100, cached=True, max_num_batched_tokens=256, long_prefill=128, priority=True)
    ledger, found = simulation.ledger, []
    simulation.add(make_request("x", PROMPT, 2))
    simulation.run(100)
    ledger.others.invalidate()  # as if pages had taken the blocks
    simulation.add(make_request("a", PROMPT, 3, priority=5, arrival=1.0))
    simulation.step()
    simulation.add(make_request("b", LAST, 60, arrival=2.0))
    allocate, are_short = ledger.allocate_slots, ["b"]

    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        account = ledger.accounts.get("a")
        if account is not None and account.tokens == len(PROMPT) and request.request_id in are_short:
            are_short.remove(request.request_id)
            return None
        if request.request_id == "a" and account is None:
            found.append(kwargs["num_new_computed_tokens"])
        return allocate(request, *args, **kwargs)

    monkeypatch.setattr(ledger, "allocate_slots", allocate_slots)
    simulation.run(200)
    assert simulation.preemptions["a"] == 1 and found == [0]
