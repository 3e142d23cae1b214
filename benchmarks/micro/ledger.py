"""The page ledger's time in the scheduler, compared with vLLM's block manager.

Both managers let the same requests decode, in turn and in the same process. In every step both refuse one waiting
request, which is when admission takes longest. The ledger runs twice: once with requests that have read their prompts
themselves, once with a prefix cache that most requests use. Times are per running request and step.
"""

import argparse
from dataclasses import asdict, dataclass

from benchmarks.harness.measure import Estimate, estimate, paired_ratio
from benchmarks.harness.options import whole
from benchmarks.harness.tables import table
from benchmarks.micro import managers
from benchmarks.micro.loop import Found, in_turns
from benchmarks.micro.managers import (
    OUTPUT,
    PROMPT,
    STEPS,
    decode_round,
    make_ledger,
    make_requests,
    make_stock,
)

HAS_DTYPE = False
OPTIONS = (
    ("rounds", whole, 40, "rounds of each manager"),
    ("seed", int, 0, "seed of row lengths and bootstrap"),
)


def refuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    most = OUTPUT // STEPS - 1
    return f"--rounds must be at most {most}" if arguments.rounds > most else None


@dataclass
class Result:
    """Microseconds per running request and step: median of the rounds, and its 95 % interval."""

    ranks: int
    requests: int
    ledger: Estimate
    cached: Estimate
    """The ledger with a prefix cache."""
    stock: Estimate
    times_ledger: Estimate
    """``cached`` over ``ledger``, round by round."""
    report: float
    """Microseconds to take over one rank's report of one request."""


def compare(ranks: int, requests: int, rounds: int, seed: int) -> Result:
    """Time all managers, one round of each at a time."""
    # vLLM turns away what does not fit now, the ledger also what would not fit in the end.
    theirs = make_requests(requests, last=requests * (PROMPT + 1 + OUTPUT))
    ours, borrowing = (make_requests(requests, last=PROMPT) for _ in range(2))
    ledger, report = make_ledger(ours[:-1], ranks, seed)
    cached, _ = make_ledger(borrowing[:-1], ranks, seed, cached=True)
    sides = {
        "stock": (make_stock(theirs[:-1]), theirs),
        "ledger": (ledger, ours),
        "cached": (cached, borrowing),
    }
    calls = {
        name: lambda manager=manager, every=every: 1e6 * decode_round(manager, every[:-1], every[-1])
        for name, (manager, every) in sides.items()
    }
    times = in_turns(calls, rounds)
    over = paired_ratio(times["cached"], times["ledger"])
    medians = {name: estimate(series, seed) for name, series in times.items()}
    return Result(ranks, requests, times_ledger=over, report=report * 1e6, **medians)


def measure(arguments: argparse.Namespace) -> Found:
    """One rank and four, 64 requests and 256."""
    title = f"{managers.LAYERS} layers x {managers.KV_HEADS} KV heads; us per running request and step [95 %]"
    columns = (
        "ranks",
        "requests",
        "ledger",
        "with prefix cache",
        "over ledger",
        "vLLM blocks",
        "us per report",
    )
    shown, results = table(title, [], columns), []
    for ranks in (1, 4):
        for requests in (64, 256):
            one = compare(ranks, requests, arguments.rounds, arguments.seed)
            results.append(one)
            times = map(str, (one.ledger, one.cached, one.times_ledger, one.stock))
            shown.add_row(str(ranks), str(requests), *times, f"{one.report:.1f}")
    content = {
        "layers": managers.LAYERS,
        "kv_heads": managers.KV_HEADS,
        "page_size": managers.PAGE,
        "prompt": PROMPT,
        "rounds": arguments.rounds,
        "borrowers_of_each_prefix": managers.BORROWERS,
        "cells": [asdict(result) for result in results],
    }
    return Found(content, [shown])
