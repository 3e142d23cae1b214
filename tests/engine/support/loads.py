"""Random servers and random requests for the scheduler simulation."""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import Request

from tests.engine.support.servers import PAGE, TOKEN, Setup, Shape, make_request
from tests.engine.support.simulation import Simulation
from vllm_kvevict.policies.registry import lookup

POLICIES = ("ada-snapkv", "snapkv", "streaming-llm", "pyramidkv", "h2o")

Saying = tuple[int, int]
"""Number of a document, and how many of its tokens are said."""

ANSWERED = -1
"""Number of what the simulated model answers."""


@dataclass(frozen=True)
class Ask:
    """One request: the step at which it arrives, and what it wants.

    Its prompt is the beginning of a document, if it names one, or what several say, by the number of each and how many
    of its tokens; else its tokens do not matter. Only requests with the same salt and the same LoRA adapter share what
    they have read.
    """

    arrival: int
    name: str
    prompt: int
    output: int
    extra_args: dict[str, Any]
    priority: int
    min_tokens: int = 0
    document: int | None = None
    salt: str | None = None
    adapter: int = 0
    says: tuple[Saying, ...] = ()

    @property
    def tokens(self) -> int | list[int]:
        """Of the prompt, or how many they are."""
        if self.says:
            return [token for number, count in self.says for token in _text(number, count)]
        if self.document is None:
            return self.prompt
        return _text(self.document, self.prompt)


def _text(number: int, tokens: int) -> list[int]:
    """The beginning of a document, or of an answer."""
    if number == ANSWERED:
        return [TOKEN] * tokens
    return random.Random(number).choices(range(1000), k=tokens)


@dataclass
class Load:
    """A server, what it is asked, and by step the names of requests that are aborted, how the server is paused, or
    whether its cache is reset hard, which preempts all that run. Then pauses reset it hard, too, as in vLLM."""

    setup: Setup
    asks: list[Ask]
    aborts: dict[int, list[str]] = field(default_factory=dict)
    pauses: dict[int, str] = field(default_factory=dict)
    resets: dict[int, bool] = field(default_factory=dict)

    @property
    def aborted(self) -> set[str]:
        return {name for names in self.aborts.values() for name in names}

    @property
    def ideal_work(self) -> int:
        """Prefill tokens if every prompt were computed once and nothing twice."""
        return sum(ask.prompt for ask in self.asks)


def mixed(seed: int) -> Load:
    """Anything a server may meet: pools of 1.1 to 8 times the longest sequence, all kinds of requests."""
    choose = random.Random(seed)
    prompt, output = choose.choice((300, 700, 1500)), choose.choice((8, 64, 300))
    shapes = choose.choice(([(2, 2)], [(4, 4)], [(3, 2), (3, 2)], [(4, 1), (2, 1)], [(2, 2), (1, 2), (3, 2)]))
    return _load(
        choose,
        prompt,
        output,
        shapes,
        times=choose.choice((1.1, 1.5, 2.5, 4.0, 8.0)),
        chunk=choose.choice((64, 200, 512, 2048, 8192)),
        max_num_seqs=choose.choice((4, 64)),
        options={
            "policy": choose.choice(POLICIES),
            "budget": choose.choice((0.05, 0.1, 0.2, 0.5, 0.9, 1.0)),
            "min_prompt": choose.choice((0, 64, 256)),
            "decode_reserve": choose.choice((8, 32, 512)),
        },
        requests=choose.randrange(8, 30),
        aborts=choose.random() < 0.5,
    )


def staged(seed: int) -> Load:
    """A mixed load on pipeline stages, which the scheduler decides for."""
    choose = random.Random(seed)
    load = mixed(seed)
    shapes = choose.choice(([(2, 2), (2, 2)], [(1, 4), (3, 4)], [(2, 1), (1, 1), (2, 1)]))
    longest = load.setup.max_model_len
    times = choose.choice((1.1, 1.5, 2.5, 4.0))
    setup = dataclasses.replace(
        load.setup,
        shapes=shapes,
        pages=[int(times * -(-longest // PAGE) * layers * heads) for layers, heads in shapes],
        pipeline=True,
        depth=choose.choice((1, len(shapes))),
        options={
            **(load.setup.options or {}),
            "policy": choose.choice(("lava", "cake", "lava-uniform-head", "layer-defensivekv")),
        },
    )
    return dataclasses.replace(load, setup=setup)


def tight(seed: int) -> Load:
    """What admission cannot foresee: outputs far beyond the reserve, and ranks that keep unlike shares."""
    choose = random.Random(seed)
    prompt, output = choose.choice((300, 600)), choose.choice((300, 600))
    shapes = choose.choice(([(2, 2)], [(1, 2), (1, 2)], [(2, 1), (2, 1), (2, 1)], [(1, 1), (3, 2)]))
    return _load(
        choose,
        prompt,
        output,
        shapes,
        times=choose.choice((1.1, 1.3, 1.7, 2.2, 3.0)),
        chunk=choose.choice((64, 100, 200, 2048)),
        max_num_seqs=64,
        options={
            "policy": "ada-snapkv",
            "budget": choose.choice((0.05, 0.3, 0.6, 0.9)),
            "min_prompt": 0,
            "decode_reserve": choose.choice((1, 8, 32)),
        },
        requests=choose.randrange(6, 16),
        aborts=False,
    )


def _load(
    choose: random.Random,
    prompt: int,
    output: int,
    shapes: Sequence[Shape],
    *,
    times: float,
    chunk: int,
    max_num_seqs: int,
    options: dict[str, Any],
    requests: int,
    aborts: bool,
) -> Load:
    depth = choose.choice((1, 1, 2, 3))
    longest = prompt + output
    setup = Setup(
        shapes,
        [int(times * -(-longest // PAGE) * layers * heads) for layers, heads in shapes],
        max_model_len=longest,
        max_num_batched_tokens=chunk,
        max_num_seqs=max_num_seqs,
        depth=depth,
        asynchronous=depth > 1 and choose.random() < 0.6,
        priority=choose.random() < 0.3,
        options=options,
    )
    arrivals = sorted(0 if choose.random() < 0.6 else choose.randrange(200) for _ in range(requests))
    asks = []
    for index, arrival in enumerate(arrivals):
        # Half of the prompts and outputs are as long as can be: these are what the pool is short of.
        tokens = choose.choice((prompt, choose.randrange(1, prompt + 1)))
        extra: dict[str, Any] = {}
        if choose.random() < 0.15:
            extra["kv_eviction"] = "full"
        elif choose.random() < 0.2:
            extra["kv_prefix_len"] = choose.randrange(1, tokens + 1)
        elif choose.random() < 0.2:
            extra["kv_budget"] = choose.choice((0.1, 0.7, 64))
        wanted = choose.choice((output, choose.randrange(1, output + 1)))
        asks.append(Ask(arrival, f"r{index}", tokens, wanted, extra, choose.randrange(3)))
    load = Load(setup, asks)
    for ask in asks:
        if aborts and choose.random() < 0.25:
            load.aborts.setdefault(choose.randrange(300), []).append(ask.name)
    return load


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
                extra["kv_turns_whole"] = choose_whole.choice(extra["kv_turns"])
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
        extra["kv_turns_whole"] = turns[0]
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


def play(load: Load, seed: int, repeats: bool = False, kind: type[Simulation] = Simulation) -> Simulation:
    """Run a load until every request is finished or aborted.

    Args:
        repeats: whether prompts are repeated, 64 tokens a step or more.
        kind: of simulation.
    """
    simulation = kind(load.setup, seed)
    # One request after the other, each token in a step of its own, would take no longer.
    limit = 600 + sum(
        load.setup.depth * (ask.output + 2 + ask.prompt // load.setup.max_num_batched_tokens)
        for ask in load.asks
    )
    limit += sum(ask.prompt // 64 + 1 for ask in load.asks) if repeats else 0
    limit *= 1 + len(load.resets)
    last_event = max([ask.arrival for ask in load.asks] + list(load.aborts) + list(load.resets))
    for step in range(last_event + 1):
        for ask in load.asks:
            if ask.arrival == step:
                simulation.add(_request(ask))
        for name in load.aborts.get(step, ()):
            simulation.abort(name)
        if step in load.resets:
            simulation.reset(load.resets[step])
        simulation.step()
    simulation.run(limit)
    return simulation


def _request(ask: Ask) -> Request:
    return make_request(
        ask.name,
        ask.tokens,
        ask.output,
        ask.extra_args,
        ask.priority,
        arrival=ask.arrival,
        salt=ask.salt,
        adapter=ask.adapter,
    )
