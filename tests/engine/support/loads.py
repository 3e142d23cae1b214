"""Random servers and random requests for the scheduler simulation."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import Request

from tests.engine.support.servers import PAGE, TOKEN, Setup, Shape, make_request
from tests.engine.support.simulation import Simulation

POLICIES = ("ada-snapkv", "snapkv", "streaming-llm", "pyramidkv", "h2o")

# By name, in this order: a new policy changes no load that was recorded.
PROMPT_POLICIES = (
    *("full", "streaming-llm", "snapkv", "pyramidkv", "ada-snapkv", "ada-pyramid"),
    *("lava", "lava-uniform", "lava-pyramid", "lava-uniform-head", "cake", "vatp-snapkv", "h2o", "tova"),
    *("knorm", "keydiff", "criticalkv", "ada-criticalkv", "defensivekv", "layer-defensivekv"),
    *("take", "kvzip", "compactor", "expected-attention", "dropkv"),
)
"""Policies that loads choose among for prompts."""
ANSWER_POLICIES = ("streaming-llm", "snapkv", "ada-snapkv", "knorm", "keydiff", "rkv")
"""Policies that loads choose among for answers."""

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

    Attributes:
        stops_at: tokens after which the model ends its answer; 0 for never.
        aborted_at: tokens of its answer after which the client leaves; 0 for never.
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
    stops_at: int = 0
    aborted_at: int = 0

    @property
    def tokens(self) -> int | list[int]:
        """Of the prompt, or how many they are."""
        if self.says:
            return [token for number, count in self.says for token in _text(number, count)]
        if self.document is None:
            return self.prompt
        return _text(self.document, self.prompt)

    def request(self) -> Request:
        """As the scheduler gets it."""
        return make_request(
            self.name,
            self.tokens,
            self.output,
            self.extra_args,
            self.priority,
            self.arrival,
            self.salt,
            self.adapter,
        )


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


def with_policy(load: Load, policy: str, **params: Any) -> Load:
    """The same load on a server with another policy."""
    options = {**(load.setup.options or {}), "policy": policy, **params}
    return dataclasses.replace(load, setup=dataclasses.replace(load.setup, options=options))


def repeated(load: Load, seed: int, **params: Any) -> Load:
    """The same load on a server that repeats prompts, in chunks and with sight that depend on the seed."""
    params = {"kvzip_chunk": 64 + 32 * (seed % 3), "kvzip_sees": ("all", "chunk")[seed % 2], **params}
    return with_policy(with_room_for_repeats(load), "kvzip", **params)


def with_room_for_repeats(load: Load) -> Load:
    """The same on a server whose requests may have as many tokens more as a chunk and what is before it."""
    setup = load.setup
    longest = setup.max_model_len + 64 + 128 + 1
    # What a repeat holds at most: 4 sinks and 128 tokens twice, 128 rows before them, in pages of their own.
    most = longest + 2 * 128 + 128 + 4 + 2 * PAGE
    pages = [pages * most // setup.max_model_len + 1 for pages in setup.pages]
    return dataclasses.replace(load, setup=dataclasses.replace(setup, max_model_len=longest, pages=pages))


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
                simulation.add(ask.request())
        for name in load.aborts.get(step, ()):
            simulation.abort(name)
        if step in load.resets:
            simulation.reset(load.resets[step])
        simulation.step()
    simulation.run(limit)
    return simulation
