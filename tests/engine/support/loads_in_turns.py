"""Random loads whose prompts are evicted turn by turn, alone or in conversations that go on and branch."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.engine.support.loads import ANSWERED, Ask, Load, Saying, mixed, staged, tight
from tests.engine.support.servers import PAGE, Setup
from vllm_kvevict.policies.registry import lookup


def with_turns(load: Load, seed: int) -> Load:
    """Most prompts of a load are evicted part by part, in up to seven; some stay whole up to one of the ends."""
    choose, choose_whole = random.Random(f"turns {seed}"), random.Random(f"whole {seed}")
    options = _options_for_turns(load, choose)
    asks = []
    for ask in load.asks:
        extra = {name: value for name, value in ask.extra_args.items() if value != 64}
        if "kv_prefix_len" not in extra and choose.random() < 0.8:
            count = min(ask.prompt, choose.randrange(1, 8))
            extra["kv_turns"] = sorted(choose.sample(range(1, ask.prompt + 1), count))
            if choose_whole.random() < 0.3:
                extra["kv_rendered"] = {"whole": choose_whole.choice(extra["kv_turns"])}
        asks.append(dataclasses.replace(ask, extra_args=extra))
    return dataclasses.replace(load, setup=dataclasses.replace(load.setup, options=options), asks=asks)


def _options_for_turns(load: Load, choose: random.Random) -> dict[str, Any]:
    """A server's options, with a policy and a budget that evict part by part."""
    options = {**(load.setup.options or {}), "min_turn": choose.choice((1, 16, 64))}
    if not lookup(options["policy"]).parts:
        options["policy"] = "ada-snapkv"
    if options["budget"] > 1:
        options["budget"] = 0.3
    return options


ANSWER = 24
"""The longest answer in a conversation."""


def with_conversations(load: Load, seed: int, times: float | None = None) -> Load:
    """A load's server is asked for what conversations say, turn by turn: they go on, are tried again, and branch.

    Some are asked under another salt or adapter, some prompts are evicted in fewer parts than they have turns, and some
    otherwise. In half of the loads the cache is reset.

    Args:
        times: how many of the longest requests the pool holds; None for as many as it does.
    """
    choose = random.Random(f"conversations {seed}")
    setup = dataclasses.replace(
        load.setup,
        prefix_caching=True,
        adapters=choose.choice((0, 2)),
        options=_options_for_turns(load, choose),
    )
    if times is not None:
        longest = -(-setup.max_model_len // PAGE)
        setup = dataclasses.replace(
            setup, pages=[int(times * longest * layers * heads) for layers, heads in setup.shapes]
        )
    prompts: list[tuple[Saying, ...]] = []
    most = setup.max_model_len - ANSWER
    for index in range(choose.randrange(10, 24)):
        prompts.append(_goes_on(choose, prompts, 100 * index, most))
    arrivals = sorted(0 if choose.random() < 0.3 else choose.randrange(240) for _ in prompts)
    asks = [
        _turn(choose, setup, arrival, index, says)
        for index, (arrival, says) in enumerate(zip(arrivals, prompts, strict=True))
    ]
    resets = {choose.randrange(80): choose.random() < 0.3 for _ in range(choose.choice((0, 0, 1, 3)))}
    conversations = Load(setup, asks, resets=resets)
    for ask in asks:
        if choose.random() < 0.12:
            conversations.aborts.setdefault(ask.arrival + choose.randrange(12), []).append(ask.name)
    return conversations


def _goes_on(
    choose: random.Random, earlier: Sequence[tuple[Saying, ...]], new: int, most: int
) -> tuple[Saying, ...]:
    """What a prompt says: how an earlier one goes on, the same, another end of it, or a new conversation.

    Args:
        new: the number of the first document that nobody has said so far.
        most: tokens that it may have.
    """

    def sayings(count: int) -> tuple[Saying, ...]:
        return tuple((new + index, choose.randrange(1, max(2, most // 5))) for index in range(count))

    if not earlier or choose.random() < 0.1:
        return sayings(choose.randrange(2, 4))
    said, kind = choose.choice(earlier[-5:]), choose.random()
    if kind < 0.6:
        answer = ((ANSWERED, choose.randrange(1, 2 * ANSWER)),) if choose.random() < 0.6 else ()
        says = said + answer + sayings(choose.randrange(1, 3))
    elif kind < 0.75:
        says = said
    else:
        says = said[: choose.randrange(1, len(said) + 1)] + sayings(choose.randrange(1, 4))
    while sum(count for _, count in says) > most:
        says = says[:-1]
    return says


def _turn(choose: random.Random, setup: Setup, arrival: int, index: int, says: tuple[Saying, ...]) -> Ask:
    """A request of a conversation, which is named by what it begins with."""
    ends = list(itertools.accumulate(count for _, count in says))
    # A turn ends with an answer; at its question only where that is tried.
    likely = [0.2 if number == ANSWERED else 0.95 for number, _ in says[1:]] + [0.95]
    last = choose.choice((-1, -1, -1, None))
    turns = [end for end, often in list(zip(ends, likely, strict=True))[:last] if choose.random() < often]
    extra: dict[str, Any] = {"kv_turns": turns} if turns else {}
    if turns and says[0][0] % 500 == 200:
        extra["kv_rendered"] = {"whole": turns[0]}
    extra |= choose.choice([{}] * 10 + [{"kv_budget": 0.6}])
    if choose.random() < 0.05:
        extra = {"kv_eviction": "full"}
    return Ask(
        arrival,
        f"c{says[0][0]}:{index}",
        ends[-1],
        choose.randrange(1, ANSWER + 1),
        extra,
        choose.randrange(3),
        salt=choose.choice([None] * 12 + ["other"]),
        adapter=choose.choice([0] * 12 + [1, 2]) if setup.adapters else 0,
        says=says,
    )


CONVERSATIONS: dict[str, Callable[[int], Load]] = {
    "mixed": lambda seed: with_conversations(mixed(seed), seed, times=(1.5, 2.5, None)[seed % 3]),
    "staged": lambda seed: with_conversations(staged(seed), seed),
    "tight": lambda seed: with_conversations(tight(seed), seed, times=1.1),
}
"""Loads of conversations by the kind of their server."""
