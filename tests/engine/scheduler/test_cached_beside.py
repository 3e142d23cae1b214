"""Prefixes beside windows or states are found in as little memory as vLLM finds them in: all that belongs to one of
them goes at the same time."""

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.support.servers import TOKEN, Setup, make_request
from tests.engine.support.simulation import Simulation
from vllm_kvevict.engine.layers import LayerMap
from vllm_kvevict.engine.scheduler.cache_order import CacheOrder

LONGEST = 2560
Said = list[tuple[list[int], int]]
"""Prompts, and tokens of their answers."""


def text(name: str, tokens: int) -> list[int]:
    return random.Random(name).choices(range(10, 30_000), k=tokens)


def chats(choose: random.Random) -> Said:
    """Eight turns of ten chats, in another order each time."""
    said, asks = {chat: text(f"begin {chat}", 200) for chat in range(10)}, []
    for turn in range(8):
        for chat in choose.sample(range(10), 10):
            said[chat] += text(f"{chat} {turn}", choose.randrange(60, 250))
            asks.append((list(said[chat]), 12))
            said[chat] += [TOKEN] * 12
    return asks


def documents(choose: random.Random) -> Said:
    """Three questions about each, twice, with questions about others between."""
    asks = []
    for document in range(14):
        begins, first = text(f"document {document}", choose.randrange(600, 2000)), document + choose.random()
        for time in range(6):
            question = text(f"{document} {time % 3}", 40)
            asks.append((first + 1.4 * time + choose.random(), begins + question))
    return [(prompt, 8) for _, prompt in sorted(asks)]


def agents(choose: random.Random) -> Said:
    """Tasks of four kinds with a common beginning; half of them go on."""
    tools, asks = text("tools", 500), []
    running: list[list[int]] = []
    for task in range(60):
        begins = tools + text(f"kind {choose.randrange(4)}", 700)
        if running and task % 2:
            begins = running.pop(choose.randrange(len(running)))
        prompt = begins + text(f"task {task}", choose.randrange(50, 300))
        asks.append((prompt, 10))
        if len(prompt) < LONGEST - 350:
            running.append([*prompt, *[TOKEN] * 10])
    return asks


def found(simulation: Simulation, asks: Said) -> int:
    """Tokens that requests find, two at a time."""
    waiting, tokens = deque(enumerate(asks)), 0
    while waiting or simulation.scheduler.has_requests():
        while waiting and simulation.scheduler.get_num_unfinished_requests() < 2:
            index, (prompt, answer) = waiting.popleft()
            simulation.add(make_request(f"r{index}", prompt, answer))
        tokens += sum(new.num_computed_tokens for new in simulation.step().scheduled_new_reqs)
    return tokens


@pytest.mark.parametrize("layers", [{"window": 200}, {"states": True}], ids=["windows", "states"])
@pytest.mark.parametrize("load, columns", [(chats, 330), (documents, 420), (agents, 170)])
def test_as_much_is_found_as_by_vllm(
    load: Callable[[random.Random], Said],
    columns: int,
    layers: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In half the memory of all, or less; much less if segments go only once there is no other memory."""
    setup = Setup(
        [(2, 2)], [4 * columns], LONGEST, 512, prefix_caching=True, options={"policy": "full"}, **layers
    )
    asks, ours = load(random.Random(0)), Simulation(setup)
    blocks = ours.ledger.block_pool.num_gpu_blocks
    tokens = found(ours, asks)
    with monkeypatch.context() as patch:
        patch.setattr(CacheOrder, "drop_older", lambda *args: None)
        out_of_step = found(Simulation(setup), asks)
    monkeypatch.setattr(LayerMap, "blocks_kept", lambda self, config: blocks - columns - 1)
    stock = Simulation(dataclasses.replace(setup, options=None))
    assert stock.scheduler.kv_cache_manager.block_pool.num_gpu_blocks == blocks
    expected = found(stock, asks)
    assert tokens >= 0.95 * expected > out_of_step
