"""Servers with as little memory as will start, requests of every kind, and choices that fill a rank before the others.

    python -m tests.engine.support.hostile_loads --steps 100000 --servers 500

Everything about a server follows from its seed, so that ``--only SEED`` plays it again.
"""

import argparse
import dataclasses
import json
import logging
import math
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from benchmarks.harness.measure import RESULTS, save
from benchmarks.harness.scenarios import Target, show_targets
from tests.engine.support.loads import ANSWER_POLICIES, PROMPT_POLICIES, Ask, Load
from tests.engine.support.overtaking import MOST_OVERTAKEN, Overtaking
from tests.engine.support.servers import (
    PAGE,
    Setup,
    deepest,
    make_config,
    make_scheduler,
    options_of,
    surroundings,
)
from tests.engine.support.simulation import Simulation
from vllm_kvevict import machine
from vllm_kvevict.engine.config import KVEvictionError
from vllm_kvevict.engine.decoding import LEAST_BUDGET
from vllm_kvevict.engine.frontend.checks import check_policy
from vllm_kvevict.engine.frontend.requests import check_length
from vllm_kvevict.engine.memory import check_fits
from vllm_kvevict.engine.request_options import plan_for
from vllm_kvevict.engine.spec import BoundedAttentionSpec
from vllm_kvevict.policies import parameters
from vllm_kvevict.policies.registry import lookup
from vllm_kvevict.schedules.registry import lookahead_policies

SMALL = 50
"""Tokens of a request, its answer included, that nobody should have to wait for long."""
LONGEST_STANDSTILL = 200
"""Steps in which nobody gets further than anybody was before, and a small request waits."""
MOST_PREEMPTIONS = 20
"""Of one request, without those of hard resets, which preempt all that run."""
GREEDS = ("none", "random", "rank", "rank", "layer", "head", "row")
"""What a request's choices fill first (see :mod:`tests.engine.support.choices`)."""

PAUSES = ("abort", "wait", "keep")
"""Modes of `/pause`: end all requests, let those that run end, or stop with all in place."""

RECORD = "hostile-loads"
"""Name of the file with the figures."""

WINDOW = {"window": 8}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "knorm": [{"skip_layers": 1}, {"skip_layers": 2, "window": 0}],
    "take": [
        {"take_chunk": 64, "take_probe": 8, "take_warmup_layers": 1},
        {"take_chunk": 128, "take_probe": 16, "take_warmup_layers": 0, "take_guide": "chunk"},
    ],
}
"""Parameters of a server's policy, beside its defaults and what every policy of its kind is given."""


class Stuck(AssertionError):
    """Something that no load may bring about; one sentence."""


@dataclass
class Outcome:
    """What became of a load.

    Attributes:
        reasons: why requests ended, and how many were refused.
        preemptions: requests by how often they were preempted.
        longest_wait: steps that a small request did not run, at most.
        standstill: steps in a row in which nobody got further than anybody was before, at most.
        overtaken: steps that admitted others before a request whose turn it was, at most.
        shortened: how many answers ended before what was asked for.
        failure: what went wrong, in one sentence.
    """

    seed: int
    steps: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    preemptions: Counter[int] = field(default_factory=Counter)
    longest_wait: int = 0
    standstill: int = 0
    overtaken: int = 0
    shortened: int = 0
    failure: str | None = None


# Loads.


def hostile(seed: int) -> Load:
    """A server that starts, with as little memory as will do or somewhat more, and what it is asked."""
    choose = random.Random(seed)
    setup, times = _server(choose), choose.choice((0.3, 0.3, 0.5, 0.8, 1.0, 1.3, 2.0, 3.0))
    while not starts(sized(setup, times)):
        times *= 1.1
        if times > 10:  # no memory is enough for a server whose flags are refused
            setup, times = _server(choose), 0.3
    setup = sized(setup, times)
    last = choose.choice((1, 60, 120))
    arrivals = sorted(choose.randrange(last) for _ in range(choose.randrange(3, 25)))
    crowd = choose.random() < 0.3
    asks = [_ask(choose, setup, f"s{seed}r{index}", step, crowd) for index, step in enumerate(arrivals)]
    asks = _with_least_answers(random.Random(f"least answers {seed}"), asks)
    load = Load(setup, asks)
    for ask in asks:
        if choose.random() < 0.1:
            load.aborts.setdefault(ask.arrival + choose.randrange(100), []).append(ask.name)
    return load


def with_drafts(load: Load, seed: int) -> Load:
    """The same load on a server with speculative decoding, which cannot be scheduled ahead.

    With as many drafts as a step may read of a prompt, or beyond an answer's first eviction, vLLM itself fails; such a
    server is refused.
    """
    drafts = random.Random(f"drafts {seed}").choice((1, 3, 5, 40))
    if load.setup.long_prefill:
        drafts = min(drafts, load.setup.long_prefill - 1)
    interval = (load.setup.options or {}).get("decode_interval")
    if interval is not None:
        drafts = min(drafts, LEAST_BUDGET + interval - 1)
    setup = dataclasses.replace(load.setup, drafts=drafts, asynchronous=False)
    return dataclasses.replace(load, setup=sized(setup, 1) if not starts(setup) else setup)


def with_drafter(load: Load, seed: int) -> Load:
    """The same load where drafts come from a draft model with KV of its own, beside no states."""
    load = load if load.setup.drafts else with_drafts(load, seed)
    method = random.Random(f"drafter {seed}").choice(("draft_model", "eagle3"))
    return dataclasses.replace(load, setup=dataclasses.replace(load.setup, drafter=method, states=False))


def with_pauses(load: Load, seed: int) -> Load:
    """The same load on a server with fewer seats than requests, which is paused now and then."""
    choose = random.Random(f"pauses {seed}")
    seats = choose.randrange(1, max(2, len(load.asks) // 2))
    setup = dataclasses.replace(load.setup, max_num_seqs=seats)
    return dataclasses.replace(load, setup=setup, pauses=_pauses(choose, load.asks))


def _pauses(choose: random.Random, asks: Sequence[Ask]) -> dict[int, str]:
    """When the server is paused, and how."""
    last = max(ask.arrival for ask in asks) + 40
    return {choose.randrange(last): choose.choice(PAUSES) for _ in range(choose.randrange(1, 5))}


def with_resets(load: Load, seed: int) -> Load:
    """The same load on a server with both prefix caches, which are reset now and then."""
    choose = random.Random(f"resets {seed}")
    load = _sharing(load, choose)
    # While they are read, and later.
    resets = {
        ask.arrival + choose.randrange(60): choose.random() < 0.3
        for ask in load.asks
        if choose.random() < 0.3
    }
    return dataclasses.replace(load, resets=resets)


def _sharing(load: Load, choose: random.Random) -> Load:
    """The same load on a server with both prefix caches. Prompts begin like others; two servers of three have room for
    what they leave, and read them in several steps."""
    setup, times = dataclasses.replace(load.setup, prefix_caching=True), choose.choice((None, 3, 6))
    if times:
        chunk = choose.choice((64, 128, 300))
        setup = dataclasses.replace(sized(setup, times), max_num_batched_tokens=chunk)
    asks = []
    for ask in load.asks:
        document, extra = choose.randrange(3), dict(ask.extra_args)
        if choose.random() < 0.4:
            # Only who asks for the same shares it compressed.
            extra = {"kv_prefix_len": max(1, min(ask.prompt - 1, 40 * (document + 1)))}
        asks.append(dataclasses.replace(ask, document=document, extra_args=extra))
    return dataclasses.replace(load, setup=setup, asks=asks)


def with_salts(load: Load, seed: int) -> Load:
    """The same load on a server with both prefix caches, where some who begin alike do not share."""
    choose = random.Random(f"salts {seed}")
    if not load.setup.prefix_caching:
        load = _sharing(load, choose)
    asks = [dataclasses.replace(ask, salt=choose.choice((None, "a", "b"))) for ask in load.asks]
    return dataclasses.replace(load, asks=asks)


def with_adapters(load: Load, seed: int) -> Load:
    """The same load on a server with LoRA, with more adapters than a step may use."""
    choose = random.Random(f"adapters {seed}")
    setup = dataclasses.replace(load.setup, adapters=choose.choice((1, 1, 2)))
    asks = [dataclasses.replace(ask, adapter=choose.choice((0, 1, 2, 3))) for ask in load.asks]
    load = dataclasses.replace(load, setup=setup, asks=asks)
    if not starts(setup):  # such a policy cannot be served with LoRA
        options = setup.options or {}
        own = {*parameters(options["policy"]), "lookahead"}
        options = {name: value for name, value in options.items() if name not in own} | {"policy": "full"}
        load = dataclasses.replace(load, setup=sized(dataclasses.replace(setup, options=options), 1))
    return load


def with_layers(load: Load, seed: int) -> Load:
    """The same load with a model that has windows, or states, beside the layers that are evicted; on one server of
    three with many prompts that are repeated."""
    choose = random.Random(f"layers {seed}")
    window = choose.choice((0, 20, 100, 100, 300))
    states = not window or choose.random() < 0.2
    # Not windows and states in one model, nor states that drafts would change.
    is_cached = load.setup.prefix_caching and not (states and (window or load.setup.drafts))
    setup = dataclasses.replace(load.setup, window=window, states=states, prefix_caching=is_cached)
    load = dataclasses.replace(load, setup=setup)
    return _repeating(load, choose) if choose.random() < 0.3 and not setup.adapters else load


def _repeating(load: Load, choose: random.Random) -> Load:
    """The same load where half of the requests have their prompts repeated, in chunks; with memory for one or more."""
    options, chunk = dict(load.setup.options or {}), {"kvzip_chunk": choose.choice((64, 64, 200))}
    options |= chunk if options["policy"] == "kvzip" else {"policy_params": {"kvzip": chunk}}
    longest, times = max(load.setup.max_model_len, 500), choose.choice((1, 1, 1.5, 2, 4))
    setup = dataclasses.replace(load.setup, max_model_len=longest, options=options)
    while not starts(sized(setup, times)) and times < 10:
        times *= 1.1
    asks = []
    for ask in load.asks:
        extra, prompt = dict(ask.extra_args), ask.prompt
        if choose.random() < 0.5:
            extra["kv_eviction"] = "kvzip"
            prompt = min(prompt, longest - 200)
        least = min(ask.min_tokens, ask.output)
        asks.append(dataclasses.replace(ask, extra_args=extra, prompt=prompt, min_tokens=least))
    return dataclasses.replace(load, setup=sized(setup, times), asks=asks)


def with_answers(load: Load, seed: int) -> Load:
    """The same load on a server that evicts answers, some of them far longer than what is kept of them."""
    choose = random.Random(f"answers {seed}")
    policy, window = choose.choice(ANSWER_POLICIES), choose.choice((1, 4, 16))
    least = max(LEAST_BUDGET, window + 1)
    budget = least + choose.choice((0, 3, 20, 60))
    options = {
        **(load.setup.options or {}),
        "decode_policy": policy,
        "decode_budget": budget,
        "decode_interval": max(choose.choice((1, 2, 7, 32, 50)), window),
        "decode_window": window,
    }
    if policy != "rkv" and choose.random() < 0.3:
        options["decode_interval"] = 1
    # Prompts are evicted before their answers are; requests whose own budget is too small for that are refused.
    options["decode_budget"] = max(budget, options.get("lookahead", 0) + window - options["decode_interval"])
    setup = dataclasses.replace(load.setup, options=options, ring_parts=choose.choice((1, 3, 64)))
    asks = []
    for ask in load.asks:
        extra, output = dict(ask.extra_args), ask.output
        if choose.random() < 0.3:
            extra["kv_decode_budget"] = choose.choice((0, least, least + 40))
        if choose.random() < 0.5:
            output = min(max(output, choose.choice((50, 200, 400))), setup.max_model_len - ask.prompt)
        asks.append(dataclasses.replace(ask, extra_args=extra, output=max(1, output)))
    return dataclasses.replace(load, setup=setup, asks=asks)


def with_lookahead(load: Load, seed: int) -> Load:
    """The same load on a server that evicts prompts once their answers have begun; many of these end about then."""
    choose = random.Random(f"lookahead {seed}")
    ahead = choose.choice((0, 1, 8, 8, 32, 32, choose.randrange(1, 65)))
    able = [policy for policy in PROMPT_POLICIES if policy in lookahead_policies()]
    options = dict(load.setup.options or {})
    for name in parameters(options["policy"]):
        options.pop(name, None)
    policy = choose.choice(able)
    options |= {"policy": policy, "lookahead": ahead, "min_prompt": choose.choice((0, 0, 64))}
    options["decode_reserve"] = choose.choice((1, 1, 8))
    if "window" in parameters(policy):
        options |= choose.choice(({}, WINDOW))
    setup = dataclasses.replace(load.setup, options=options, ring_parts=choose.choice((1, 3, 64)))
    times = choose.choice((1, 1, 1.2, 1.5, 2))
    while not starts(sized(setup, times)) and times < 10:  # a repeat of the prompt needs more than the prompt
        times *= 1.1
    setup = sized(setup, times)
    return dataclasses.replace(
        load, setup=setup, asks=[_ahead(choose, ask, setup, able) for ask in load.asks]
    )


def _ahead(choose: random.Random, ask: Ask, setup: Setup, able: Sequence[str]) -> Ask:
    """A request that asks for a lookahead of its own, or whose answer ends about where its prompt is evicted."""
    assert setup.options is not None
    extra, ahead, room = dict(ask.extra_args), setup.options["lookahead"], setup.max_model_len - ask.prompt
    if choose.random() < 0.7:
        extra |= {"kv_eviction": choose.choice(able), "kv_budget": choose.choice((0.02, 0.1, 0.3, 40))}
        extra.pop("kv_prefix_len", None)
    policy = extra.get("kv_eviction", setup.options["policy"])
    if policy in able and "kv_prefix_len" not in extra and choose.random() < 0.3:
        ahead = choose.choice((0, ahead, choose.randrange(ahead + 1)))
        extra["kv_lookahead"] = ahead
        if ahead and choose.random() < 0.3:
            extra["kv_answer_from"] = max(
                1, ask.prompt - choose.choice((0, 1, ahead - 1, ahead, ahead + 1, 40))
            )
    if policy not in able:
        ahead = extra["kv_lookahead"] = 0
    about = max(1, ahead + choose.randrange(-1, 4))
    changes: dict[str, int] = {}
    how = choose.choice(("as it was", "max_tokens", "stops", "aborted", "long"))
    if how == "max_tokens":
        changes["output"] = min(about, room)
    elif how != "as it was":
        changes["output"] = min(about + choose.choice((20, 40, 200)), room)
    if how in ("stops", "aborted"):
        changes["stops_at" if how == "stops" else "aborted_at"] = about
    changed: Ask = dataclasses.replace(ask, extra_args=extra, **changes)
    return dataclasses.replace(changed, min_tokens=min(changed.min_tokens, changed.output))


def with_streams(load: Load, seed: int) -> Load:
    """The same load, and on one server of four many small requests that come one after the other, and could keep those
    waiting that came first."""
    choose = random.Random(f"streams {seed}")
    if choose.random() < 0.75:
        return load
    every, asks = choose.choice((0.5, 1, 2)), list(load.asks)
    for index in range(choose.choice((200, 300))):
        extra = {} if choose.random() < 0.7 else {"kv_eviction": choose.choice(PROMPT_POLICIES)}
        prompt, answer = choose.randrange(1, SMALL - 10), choose.randrange(1, 6)
        step, name = int(index * every), f"s{seed}stream{index}"
        asks.append(Ask(step, name, prompt, answer, extra, choose.randrange(3)))
    return dataclasses.replace(load, asks=sorted(asks, key=lambda ask: ask.arrival))


def crowded(seed: int) -> Load:
    """A server whose memory holds a long prompt only if one step reads all of it, which answers leave no room for. Its
    few seats are taken by requests with long answers."""
    choose = random.Random(f"crowd {seed}")
    longest, depth = choose.choice((512, 1024)), choose.choice((1, 1, 2))
    shape = (choose.choice((8, 16)), 2)
    setup = Setup(
        [shape],
        [math.prod(shape) * longest // PAGE // 2],
        max_model_len=longest,
        max_num_batched_tokens=longest,
        max_num_seqs=choose.choice((2, 3, 4, 8)),
        depth=depth,
        asynchronous=depth > 1 and choose.random() < 0.5,
        options={"policy": choose.choice(("snapkv", "ada-snapkv")), "budget": 0.1, "check": True},
    )
    assert starts(setup)
    asks = []
    for index in range(choose.randrange(8, 16)):
        is_long = choose.random() < 0.4
        prompt = longest - choose.randrange(1, 4) if is_long else choose.randrange(20, longest // 8)
        output = 2 if is_long else choose.randrange(30, 120)
        asks.append(Ask(choose.randrange(60), f"s{seed}r{index}", prompt, output, {}, 0))
    return Load(setup, sorted(asks, key=lambda ask: ask.arrival), pauses=_pauses(choose, asks))


def sized(setup: Setup, times: float) -> Setup:
    """The server with memory for so many of the longest requests, whole."""
    per_row = max(1, int(times * -(-setup.max_model_len // PAGE)))
    return dataclasses.replace(setup, pages=[per_row * layers * heads for layers, heads in setup.shapes])


def _server(choose: random.Random) -> Setup:
    """A server whose memory is still to be found."""
    # Less memory than one whole prompt needs will do where it is read in one step, layer by layer, or by take.
    tight = choose.random() < 0.7
    longest, depth = (
        choose.choice((300, 600, 900) if tight else (100, 200, 300, 600)),
        choose.choice((1, 1, 2, 3)),
    )
    stages, tensor, heads = choose.choice((1, 1, 2, 3)), choose.choice((1, 1, 2, 4)), choose.choice((1, 2, 4))
    layers = [choose.randrange(3 if tight else 1, 9 if tight else 4) for _ in range(stages)]
    shapes = [(count, max(1, heads // tensor)) for count in layers for _ in range(tensor)]
    return Setup(
        shapes,
        [0] * len(shapes),
        max_model_len=longest,
        max_num_batched_tokens=2048 if tight else choose.choice((64, 128, 300)),
        max_num_seqs=choose.choice((2, 8, 64)),
        depth=depth,
        pipeline=stages > 1,
        tensor=tensor if stages > 1 else 1,
        replicas=max(1, tensor // heads),
        asynchronous=depth > 1 and choose.random() < 0.6,
        priority=choose.random() < 0.3,
        long_prefill=choose.choice((0, 0, 0, 100)) if tight else choose.choice((0, 32, 100)),
        has_w_o=choose.random() < 0.93,
        gpu=choose.random() < 0.2,
        options=_options(choose, tight, stages),
    )


def _options(choose: random.Random, tight: bool, stages: int) -> dict[str, Any]:
    """Options of a server, the policy any, or any that needs less memory than the whole prompt."""
    policy = choose.choice(PROMPT_POLICIES)
    while tight and (lookup(policy).schedule == "by score" or policy == "full"):
        policy = choose.choice(PROMPT_POLICIES)
    while tight and stages > 1 and lookup(policy).schedule != "whole":
        policy = choose.choice(PROMPT_POLICIES)
    known = parameters(policy)
    params = dict(choose.choice([{}, *SETTINGS.get(policy, [])]))
    if "window" in known:
        params = choose.choice(({}, WINDOW)) | params
    for name, values in {
        "alpha": (0.0, 0.2, 0.7),
        "ada_safeguard": ("interp", "guarantee"),
        "beta": (5, 20),
    }.items():
        if name in known and choose.random() < 0.5:
            params[name] = choose.choice(values)
    return {
        "policy": policy,
        "budget": choose.choice((0.05, 0.1, 0.2, 0.3, 96) if tight else (0.05, 0.3, 0.6, 1.0, 64)),
        "min_prompt": choose.choice((0, 0, 64, 256)),
        "decode_reserve": choose.choice((1, 8, 8, 64, 512)),
        "check": True,
        "policies": "all",
        **params,
    }


def _ask(choose: random.Random, setup: Setup, name: str, step: int, crowd: bool) -> Ask:
    """One request: a third are small and a third as long as can be; of a crowd most are long and want long answers."""
    longest, kind = setup.max_model_len - 1, choose.choice((0, 1, 1, 2, 2, 2) if crowd else (0, 1, 2))
    if kind == 0:
        prompt = choose.randrange(1, SMALL - 10)
        output = choose.randrange(1, SMALL - prompt + 1)
    else:
        prompt = choose.randrange(longest // 3 * kind, longest + 1)
        output = choose.choice(
            (choose.randrange(1, 11), longest if crowd else choose.randrange(1, 60), longest)
        )
    extra: dict[str, Any] = {}
    if choose.random() < (0.1 if crowd else 0.5):
        extra["kv_eviction"] = choose.choice(PROMPT_POLICIES)
    if choose.random() < 0.5:
        extra["kv_budget"] = choose.choice((0.02, 0.1, 0.3, 0.6, 1.0, 40, 64, 130))
    if choose.random() < 0.2:
        extra["kv_prefix_len"] = choose.randrange(1, prompt + 1)
    return Ask(step, name, prompt, output, extra, choose.randrange(3))


def _with_least_answers(choose: random.Random, asks: Sequence[Ask]) -> list[Ask]:
    """Some of the requests get ``min_tokens``, up to all that they ask for."""
    least = [choose.randrange(1, ask.output + 1) if choose.random() < 0.15 else 0 for ask in asks]
    return [dataclasses.replace(ask, min_tokens=tokens) for ask, tokens in zip(asks, least, strict=True)]


# What stands before the scheduler.


def starts(setup: Setup) -> bool:
    """Whether such a server starts: its policy can be served, and vLLM's check of memory and ours pass."""
    with surroundings(setup):
        try:
            config = make_config(setup)
            check_policy(config, options_of(setup).config)
            heads = setup.shapes[0][1]
            spec = BoundedAttentionSpec(
                block_size=PAGE, num_kv_heads=heads, head_size=32, dtype=torch.float32
            )
            blocks = config.cache_config.num_gpu_blocks
            if spec.max_memory_usage_bytes(config) > blocks * spec.page_size_bytes:
                return False
            make_scheduler(setup)
        except ValueError:
            return False
    return True


def check(setup: Setup, ask: Ask) -> Request:
    """The request as the front-end lets it through.

    Raises:
        KVEvictionError: as the front-end refuses it.
    """
    config, options = make_config(setup), options_of(setup)
    most_output = min(ask.output, setup.max_model_len - ask.prompt)
    plan = plan_for(options, ask.prompt, ask.extra_args, most_output)
    check_policy(config, plan.config, "kv_eviction")
    check_length(plan, setup.max_model_len)
    check_fits(config, options, plan, ask.prompt, ask.min_tokens)
    return ask.request()


# Invariants.


class Watch:
    """Steps a server and looks after each step whether everybody can still get to an end."""

    def __init__(self, load: Load, seed: int, greeds: Sequence[str] = GREEDS):
        self.load = load
        self.simulation = Simulation(load.setup, seed, greeds)
        self.free_blocks = self.simulation.ledger.block_pool.get_num_free_blocks()
        self.overtaking = Overtaking(load.setup, self.simulation.scheduler)
        self.outcome = Outcome(seed)
        self.requests: dict[str, Request] = {}
        self.limits: dict[str, int] = {}
        longest = load.setup.max_model_len
        self.wanted = {ask.name: min(ask.output, longest - ask.prompt) for ask in load.asks}
        self.least = {ask.name: min(ask.min_tokens, longest - ask.prompt) for ask in load.asks}
        self.furthest: dict[str, int] = {}
        self.progressed = 0
        self.ran: dict[str, int] = {}
        self.aborted = set(load.aborted)
        self.leavers = {ask.name: ask.aborted_at for ask in load.asks if ask.aborted_at}
        self.reset_while_running: Counter[str] = Counter()

    def preemptions(self, name: str) -> int:
        """How often a request was preempted for others."""
        return self.simulation.preemptions[name] - self.reset_while_running[name]

    def add(self, ask: Ask) -> None:
        """Let the front-end check a request and pass it on."""
        try:
            request = check(self.load.setup, ask)
        except KVEvictionError:
            self.outcome.reasons["refused"] += 1
            return
        if ask.stops_at:
            self.simulation.stops[ask.name] = ask.stops_at
        self.requests[ask.name], self.limits[ask.name] = request, request.max_tokens
        self.ran[ask.name] = self.simulation.steps
        self.simulation.add(request)

    def step(self) -> None:
        """One step; raises Stuck where somebody stands still, is overtaken for long, or computed again and again."""
        self.overtaking.before_step()
        self.overtaking.after_step(self.simulation.step())
        self._leave()
        self._follow()
        self._check_turns()
        steps = self.simulation.steps
        standing = steps - self.progressed
        for name in self.simulation.scheduler.requests:
            waited = steps - self.ran[name]
            if self.limits[name] + self.requests[name].num_prompt_tokens > SMALL:
                continue
            self.outcome.longest_wait = max(self.outcome.longest_wait, waited)
            if min(waited, standing) > LONGEST_STANDSTILL:
                again = max(self.ran, key=self.simulation.preemptions.__getitem__)
                raise Stuck(
                    f"{self._describe(name)} waits for {waited} steps, in {standing} of which nobody got further; "
                    f"most often preempted: {self._describe(again)}"
                )
        if standing > 3 * LONGEST_STANDSTILL:
            raise Stuck(f"nobody got further in {standing} steps: {', '.join(map(self._describe, self.ran))}")

    def _leave(self) -> None:
        """Clients go that have what they came for."""
        for name, tokens in self.leavers.items():
            if self.simulation.outputs.get(name, 0) >= tokens and name in self.simulation.scheduler.requests:
                self.aborted.add(name)
                self.simulation.abort(name)

    def _check_turns(self) -> None:
        """Nobody is put back again and again, by preemptions or by those who come later."""
        for name in self.simulation.scheduler.requests:
            if self.preemptions(name) > MOST_PREEMPTIONS:
                raise Stuck(f"{self._describe(name)} was preempted more than {MOST_PREEMPTIONS} times")
        self.outcome.overtaken = self.overtaking.most
        if self.overtaking.most > MOST_OVERTAKEN:
            name = max(self.overtaking.steps, key=self.overtaking.steps.__getitem__)
            raise Stuck(
                f"{self._describe(name)} waits, and {self.overtaking.most} steps admitted others behind it in the queue"
            )

    def pause(self, mode: str) -> None:
        """Pause the server as the engine core does, wait until it is, and let it go on."""
        simulation, limit = self.simulation, self.simulation.steps + self._enough_steps()
        scheduler = simulation.scheduler
        if mode == "abort":
            self.aborted |= set(scheduler.requests)
            scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        while simulation.in_flight or scheduler.has_requests():
            if simulation.steps > limit:
                raise Stuck(f"a pause ({mode}) has not ended in {self._enough_steps()} steps")
            if scheduler.has_requests():
                self.step()
            else:
                simulation.deliver()
        if self.load.resets:
            self.reset(hard=True)
        scheduler.set_pause_state(PauseState.UNPAUSED)
        # Nobody is to be blamed for having waited.
        self._follow()
        self.progressed = simulation.steps
        self.ran = dict.fromkeys(self.ran, simulation.steps)

    def reset(self, hard: bool) -> None:
        """Reset the cache, and if this is hard, let all that run begin anew."""
        if hard:
            self.reset_while_running.update(x.request_id for x in self.simulation.scheduler.running)
        if not self.simulation.reset(hard) and hard:
            raise Stuck("a hard reset said that cached pages are in use")
        if hard:
            self.furthest.clear()
            self.progressed = self.simulation.steps

    def _enough_steps(self) -> int:
        """Steps in which all that was asked for so far is done."""
        setup = self.load.setup
        chunk = min(setup.max_num_batched_tokens, setup.long_prefill or setup.max_num_batched_tokens)
        return 600 + 4 * sum(
            setup.depth * (self.limits[name] + 2 + request.num_prompt_tokens // chunk)
            for name, request in self.requests.items()
        )

    def _follow(self) -> None:
        """Note who ran and who got further than before; who left made room."""
        scheduler, steps = self.simulation.scheduler, self.simulation.steps
        running = {request.request_id for request in scheduler.running}
        if gone := self.ran.keys() - scheduler.requests.keys():
            self.progressed = steps
        for name in gone:
            del self.ran[name]
        for name in scheduler.requests:
            if name in running:
                self.ran[name] = steps
            if self.requests[name].num_computed_tokens > self.furthest.get(name, 0):
                self.furthest[name] = self.requests[name].num_computed_tokens
                self.progressed = steps
        self.outcome.standstill = max(self.outcome.standstill, steps - self.progressed)

    def finish(self) -> None:
        """Step until everybody has left, then count."""
        setup, simulation = self.load.setup, self.simulation
        # Counted from the beginning: what is left is less than all.
        goes_back = self.load.pauses or self.load.resets
        limit = simulation.steps + self._enough_steps() if goes_back else self._enough_steps()
        while simulation.scheduler.has_requests():
            if simulation.steps > limit:
                raise Stuck(f"after {limit} steps: {', '.join(map(self._describe, self.ran))}")
            self.step()
        while simulation.in_flight:
            simulation.deliver()
        for name in self.requests:
            self._check_end(name)
        if not simulation.reset():
            raise Stuck("when all requests are gone cached pages are in use")
        while simulation.scheduler.has_requests():
            self.step()
        held = [simulation.workers.held(rank) for rank in range(len(setup.shapes))]
        blocks = simulation.ledger.blocks
        if (
            blocks is not None
            and simulation.ledger.block_pool.get_num_free_blocks() + len(blocks.as_pages) != self.free_blocks
        ):
            raise Stuck("when all requests are gone other layers hold blocks")
        if simulation.workers.ring:
            raise Stuck(f"when all requests are gone {simulation.workers.ring} have parts of the ring")
        if any(held) or any(simulation.ledger.books.used) or simulation.ledger.accounts:
            says = simulation.ledger.books.used
            raise Stuck(f"when all requests are gone {held} pages are held, and the ledger says {says}")

    def _check_end(self, name: str) -> None:
        """A request ended, with an answer no longer than it was promised."""
        delivered, limit, reason = self.simulation.outputs[name], self.limits[name], self._reason(name)
        if delivered > limit:
            raise Stuck(f"{self._describe(name)} got {delivered} tokens of {limit}")
        if reason == "stop" and delivered != self.simulation.stops.get(name):
            raise Stuck(f"{self._describe(name)} ended with {delivered} tokens")
        if reason == "length" and not delivered:
            raise Stuck(f"{self._describe(name)} ended without a token")
        if reason == "length" and delivered < self.least[name] and self.load.setup.has_w_o:
            raise Stuck(f"{self._describe(name)} got {delivered} tokens and was promised {self.least[name]}")
        # Only workers without output projections make the scheduler keep more than the front-end counted on.
        if reason not in ("length", "aborted", "stop") and (reason != "error" or self.load.setup.has_w_o):
            raise Stuck(f"{self._describe(name)} ended: {reason}")

    def _reason(self, name: str) -> str:
        gone = "aborted" if name in self.aborted else "without a word"
        here = name in self.simulation.scheduler.requests
        return self.simulation.reasons.get(name, "not ended" if here else gone)

    def count(self) -> Outcome:
        """Sum up what became of the requests."""
        outcome, simulation = self.outcome, self.simulation
        outcome.steps = simulation.steps
        for name in self.requests:
            reason = self._reason(name)
            outcome.reasons[reason] += 1
            outcome.preemptions[self.preemptions(name)] += 1
            outcome.shortened += reason == "length" and simulation.outputs[name] < self.wanted[name]
        return outcome

    def _describe(self, name: str) -> str:
        """A request in a few words."""
        request, ledger = self.requests[name], self.simulation.ledger
        plan = ledger.plan(request)
        account = ledger.accounts.get(name)
        held = f", holds {account.held}" if account else ""
        end = plan.prompt.end if plan.prompt else None
        return (
            f"{name} ({plan.config.policy}, prompt {request.num_prompt_tokens}, evicted at {end}, keeps "
            f"{plan.config.budget_for(end or request.num_prompt_tokens)}, {request.num_output_tokens} of "
            f"{self.limits[name]} tokens, preempted {self.simulation.preemptions[name]} times{held})"
        )


def play(load: Load, seed: int = 0, greeds: Sequence[str] = GREEDS) -> Outcome:
    """Play a load until everybody has left, or until something is wrong."""
    with surroundings(load.setup):
        watch = Watch(load, seed, greeds)
        try:
            last = max([*(ask.arrival for ask in load.asks), *load.aborts, *load.pauses, *load.resets])
            for step in range(last + 1):
                for ask in load.asks:
                    if ask.arrival == step:
                        watch.add(ask)
                for name in load.aborts.get(step, ()):
                    watch.simulation.abort(name)
                if step in load.pauses:
                    watch.pause(load.pauses[step])
                if step in load.resets:
                    watch.reset(load.resets[step])
                watch.step()
            watch.finish()
        except Exception as error:  # whatever vLLM's scheduler or the simulated workers stumble over
            where = traceback.extract_tb(error.__traceback__)[-1].name
            kind = "" if isinstance(error, Stuck) else f"{type(error).__name__} of {where} "
            watch.outcome.failure = f"{kind}in step {watch.simulation.steps}: {error}"
        return watch.count()


# The command.


KINDS = {
    "lookahead": with_lookahead,
    "answers": with_answers,
    "streams": with_streams,
    "drafts": with_drafts,
    "pauses": with_pauses,
    "resets": with_resets,
    "salts": with_salts,
    "adapters": with_adapters,
    "layers": with_layers,
    "drafter": with_drafter,
}
"""What may be added to a hostile load, in this order."""


def load_of(seed: int, kinds: Sequence[str] = (), crowd: bool = False) -> Load:
    """The load of a seed, hostile or crowded, with what these kinds add."""
    load = crowded(seed) if crowd else hostile(seed)
    for kind, change in KINDS.items():
        load = change(load, seed) if kind in kinds else load
    depth = deepest(load.setup)
    if load.setup.has_other_layers:  # with as many steps in flight as vLLM's windows have blocks for
        depth = make_config(load.setup).max_concurrent_batches
    return dataclasses.replace(load, setup=dataclasses.replace(load.setup, depth=depth))


def play_many(
    first: int, steps: int, servers: int, kinds: Sequence[str] = (), crowd: bool = False
) -> list[Outcome]:
    """Play servers of ascending seeds, so many or until so many steps are played."""
    outcomes: list[Outcome] = []
    while len(outcomes) < servers and sum(outcome.steps for outcome in outcomes) < steps:
        seed = first + len(outcomes)
        outcomes.append(play(load_of(seed, kinds, crowd), seed))
    return outcomes


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    """What became of all servers, and the seeds of those that failed."""
    found = figures(outcomes, seconds)
    failures = found.pop("failures")
    lines = [
        f"{found.pop('servers')} servers, {found.pop('steps')} steps in {found.pop('seconds')} s",
        *(f"{name.replace('_', ' ')}: {value}" for name, value in found.items()),
        f"{len(failures)} servers failed",
        *(f"  --only {seed}: {failure}" for seed, failure in failures.items()),
    ]
    return "\n".join(lines)


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """What became of all servers, for the record."""
    return {
        "servers": len(outcomes),
        "steps": sum(outcome.steps for outcome in outcomes),
        "seconds": round(seconds, 1),
        "requests": dict(sum((outcome.reasons for outcome in outcomes), Counter())),
        "most_preemptions": max(max(outcome.preemptions, default=0) for outcome in outcomes),
        "most_overtaken": max(outcome.overtaken for outcome in outcomes),
        "longest_wait_of_small": max(outcome.longest_wait for outcome in outcomes),
        "longest_standstill": max(outcome.standstill for outcome in outcomes),
        "failures": {outcome.seed: outcome.failure for outcome in outcomes if outcome.failure},
    }


def save_figures(name: str, found: dict[str, Any]) -> None:
    """Put the figures of some kind of loads into the record, beside those of the other kinds."""
    path = RESULTS / f"{RECORD}.json"
    kinds = json.loads(path.read_text())["results"]["kinds"] if path.exists() else {}
    kinds = dict(sorted((kinds | {name: found}).items()))
    failures = sum(len(x["failures"]) for x in kinds.values())
    worst = [
        Target("servers on which a request did not end, or broke a rule", failures, 0, at_most=True),
        *(
            Target(what, max(x[figure] for x in kinds.values()), bound, at_most=True)
            for what, figure, bound in (
                ("most preemptions of one request", "most_preemptions", MOST_PREEMPTIONS),
                ("most steps that admitted others before a request", "most_overtaken", MOST_OVERTAKEN),
            )
        ),
    ]
    targets = show_targets(Console(), worst)
    command = ["python", "-m", "tests.engine.support.hostile_loads", *sys.argv[1:]]
    save(RECORD, machine.record(command, {"targets": targets, "kinds": kinds}))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000, help="stop after so many")
    parser.add_argument("--servers", type=int, default=500, help="or after so many servers")
    parser.add_argument("--seed", type=int, default=0, help="of the first server; the next ones count on")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", action="store_true", help=KINDS[kind].__doc__)
    parser.add_argument("--crowd", action="store_true", help="long prompts behind long answers, with pauses")
    parser.add_argument(
        "--record", action="store_true", help=f"add the figures to benchmarks/results/{RECORD}.json"
    )
    parser.add_argument("--only", type=int, metavar="SEED", help="play one server and say what it is")
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    kinds, started = [kind for kind in KINDS if getattr(args, kind)], time.perf_counter()
    if args.only is None:
        outcomes = play_many(args.seed, args.steps, args.servers, kinds, args.crowd)
    else:
        load = load_of(args.only, kinds, args.crowd)
        print(load.setup, *load.asks, load.aborts, load.pauses, load.resets, sep="\n")
        outcomes = [play(load, args.only)]
    seconds = time.perf_counter() - started
    print(summary(outcomes, seconds))
    if args.record:
        name = " ".join([*kinds, *(["crowd"] if args.crowd else [])])
        save_figures(name or "plain", figures(outcomes, seconds))
    return int(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
