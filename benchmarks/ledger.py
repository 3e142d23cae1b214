"""The page ledger's time in the scheduler, compared with vLLM's block manager: ``python -m benchmarks.ledger``.

Both managers let the same requests decode, in turn and in the same process. In every step both refuse one waiting
request, which is when admission takes longest. The ledger runs twice: once with requests that have read their prompts
themselves, once with a prefix cache that most requests use. Times are per running request and step.
"""

import argparse
from dataclasses import asdict, dataclass

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from benchmarks.harness.managers import (
    BORROWERS,
    KV_HEADS,
    LAYERS,
    OUTPUT,
    PAGE,
    PROMPT,
    STEPS,
    decode_round,
    make_ledger,
    make_requests,
    make_stock,
)
from benchmarks.harness.measure import Estimate, estimate, paired_ratio, record, save


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


Side = tuple[KVCacheManager, list[Request], list[float]]


def measure(ranks: int, requests: int, rounds: int, seed: int) -> Result:
    """Time all managers, one round of each at a time."""
    # vLLM turns away what does not fit now, the ledger also what would not fit in the end.
    theirs = make_requests(requests, last=requests * (PROMPT + 1 + OUTPUT))
    ours, borrowing = (make_requests(requests, last=PROMPT) for _ in range(2))
    ledger, report = make_ledger(ours[:-1], ranks, seed)
    cached, _ = make_ledger(borrowing[:-1], ranks, seed, cached=True)
    sides: list[Side] = [(make_stock(theirs[:-1]), theirs, []), (ledger, ours, []), (cached, borrowing, [])]
    for number in range(rounds + 1):
        for manager, every, times in sides:
            seconds = decode_round(manager, every[:-1], every[-1])
            if number:  # the first round warms up
                times.append(seconds * 1e6)
    of_stock, of_ledger, of_cached = (times for _, _, times in sides)
    return Result(
        ranks,
        requests,
        ledger=estimate(of_ledger, seed),
        cached=estimate(of_cached, seed),
        stock=estimate(of_stock, seed),
        times_ledger=paired_ratio(of_cached, of_ledger),
        report=report * 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=40, help="rounds of each manager (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of row lengths and bootstrap (default: %(default)s)"
    )
    args = parser.parse_args()
    if not 1 <= args.rounds < OUTPUT // STEPS:
        parser.error(f"--rounds must be from 1 to {OUTPUT // STEPS - 1}")
    print(f"{LAYERS} layers x {KV_HEADS} KV heads; us per running request and step, median [95 % interval]")
    print(
        f"{'ranks':>5} {'requests':>8}   {'ledger':24}{'with prefix cache':24}{'over ledger':24}{'vLLM blocks':24}"
        "us per report"
    )
    results = []
    for ranks in (1, 4):
        for requests in (64, 256):
            result = measure(ranks, requests, args.rounds, args.seed)
            results.append(result)
            print(
                f"{ranks:5} {requests:8}   {result.ledger!s:24}{result.cached!s:24}{result.times_ledger!s:24}"
                f"{result.stock!s:24}{result.report:.1f}",
                flush=True,
            )
    content = {
        "layers": LAYERS,
        "kv_heads": KV_HEADS,
        "page_size": PAGE,
        "prompt": PROMPT,
        "rounds": args.rounds,
        "borrowers_of_each_prefix": BORROWERS,
        "cells": [asdict(result) for result in results],
    }
    print(f"written to {save('ledger', record('ledger', content))}")


if __name__ == "__main__":
    main()
