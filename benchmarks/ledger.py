"""What the page ledger costs the scheduler, beside vLLM's own block manager: ``python -m benchmarks.ledger``.

Both managers let the same requests decode, in turn and in the same process, and both turn away one waiting request
in every step, which is when admission counts most. Times are per running request and step.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from vllm_kvevict.engine.config import Options
from vllm_kvevict.engine.ledger import PageLedger
from vllm_kvevict.engine.messages import RankCapacity, Report

LAYERS, KV_HEADS, PAGE = 32, 8, 32
PROMPT, OUTPUT = 2048, 4096
STEPS = 32
"""Steps in a round: every row takes one page."""
RESULTS = Path(__file__).parent / "results" / "ledger.json"


@dataclass
class Result:
    """Microseconds per running request and step: median of the rounds, and its 95 % interval."""

    ranks: int
    requests: int
    ledger: float
    ledger_interval: tuple[float, float]
    stock: float
    stock_interval: tuple[float, float]
    report: float
    """Microseconds to take over one rank's report of one request."""


def make_requests(count: int, last: int) -> list[Request]:
    """Requests of ``PROMPT`` tokens that decode, and behind them one of ``last`` tokens that has to wait."""
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    lengths = [PROMPT] * count + [last]
    return [Request(f"r{index}", [7] * length, params, None) for index, length in enumerate(lengths)]


def make_stock(requests: Sequence[Request]) -> KVCacheManager:
    """vLLM's manager after these requests' prefills, with room for their outputs."""
    tokens = len(requests) * (PROMPT + OUTPUT)
    manager = KVCacheManager(_cache_config(tokens // PAGE + 1), tokens, PAGE, PAGE, enable_caching=False)
    for request in requests:
        manager.allocate_slots(request, PROMPT)
    return manager


def make_ledger(requests: Sequence[Request], ranks: int, seed: int) -> tuple[PageLedger, float]:
    """A ledger with these requests evicted to a fifth, every row to another length, and room for no further one.

    Returns:
        The ledger, and the seconds of one rank's report.
    """
    options = Options.parse({"policy": "ada-snapkv", "budget": 0.2, "decode_reserve": OUTPUT})
    ledger = PageLedger(
        _cache_config(2),
        PROMPT + OUTPUT,
        PAGE,
        PAGE,
        enable_caching=False,
        options=options,
        max_num_batched_tokens=8192,
    )
    rows = LAYERS * KV_HEADS // ranks
    plenty = RankCapacity(rows * len(requests) * (PROMPT + OUTPUT), rows)
    ledger.set_capacity(dict.fromkeys(range(ranks), plenty))
    choose = random.Random(seed)
    seconds = []
    for request in requests:
        ledger.allocate_slots(request, PROMPT)
        for rank in range(ranks):
            residues = [0] * PAGE
            pages = 0
            for _ in range(rows):
                length = choose.randrange(1, 2 * PROMPT // 5)
                residues[length % PAGE] += 1
                pages += -(-length // PAGE)
            report = Report("snapkv", 1, PROMPT, pages, 0, residues, 0, 0, [], 0.0, 0.0)
            started = time.perf_counter()
            ledger.on_report(rank, request.request_id, report)
            seconds.append(time.perf_counter() - started)
    # Only the last rank has no room, so admission looks at every rank before it says no.
    accounts = ledger.accounts.values()
    full = sum(ledger._held_finally(account, ranks - 1, PROMPT + OUTPUT) for account in accounts)
    ledger.capacity[-1] = RankCapacity(full, rows)
    return ledger, statistics.median(seconds)


def _cache_config(blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=128, dtype=torch.bfloat16)
    group = KVCacheGroupSpec([f"layers.{index}" for index in range(LAYERS)], spec)
    return KVCacheConfig(blocks, [], [group])


def decode_round(manager: KVCacheManager, running: Sequence[Request], waiting: Request) -> float:
    """Schedule ``STEPS`` decode steps.

    Returns:
        Seconds per running request and step.
    """
    plan: Callable[[Request], Any] | None = getattr(manager, "plan", None)
    started = time.perf_counter()
    for _ in range(STEPS):
        for request in running:
            if plan is not None:
                plan(request)  # our scheduler asks for the eviction position as well
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        assert manager.allocate_slots(waiting, PROMPT, full_sequence_must_fit=True) is None
    return (time.perf_counter() - started) / (STEPS * len(running))


def measure(ranks: int, requests: int, rounds: int, seed: int) -> Result:
    """Time both managers, one round of each at a time."""
    # vLLM turns away what does not fit now, the ledger also what would not fit in the end.
    theirs = make_requests(requests, last=requests * (PROMPT + OUTPUT))
    ours = make_requests(requests, last=PROMPT)
    manager, report = make_ledger(ours[:-1], ranks, seed)
    sides: list[tuple[KVCacheManager, list[Request], list[float]]] = [
        (make_stock(theirs[:-1]), theirs, []),
        (manager, ours, []),
    ]
    for request in theirs[:-1] + ours[:-1]:
        request.num_computed_tokens = PROMPT
    for number in range(rounds + 1):
        for manager, every, times in sides:
            seconds = decode_round(manager, every[:-1], every[-1])
            if number:  # the first round warms up
                times.append(seconds * 1e6)
    (stock, stock_interval), (ledger, ledger_interval) = (median(times, seed) for _, _, times in sides)
    return Result(ranks, requests, ledger, ledger_interval, stock, stock_interval, report * 1e6)


def median(values: Sequence[float], seed: int) -> tuple[float, tuple[float, float]]:
    """Median, and its 95 % interval from 2000 bootstrap samples."""
    choose = random.Random(seed)
    samples = sorted(statistics.median(choose.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), (samples[49], samples[1949])


def cpu_model() -> str:
    """The processor's name, as Linux gives it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=40, help="rounds of each manager (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of row lengths and bootstrap (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON to write (default: %(default)s)")
    args = parser.parse_args()
    if not 1 <= args.rounds < OUTPUT // STEPS:
        parser.error(f"--rounds must be from 1 to {OUTPUT // STEPS - 1}")
    print(f"{LAYERS} layers x {KV_HEADS} KV heads; us per running request and step, median [95 % interval]")
    print(f"{'ranks':>5} {'requests':>8}   {'ledger':24}{'vLLM blocks':24}us per report")
    results = []
    for ranks in (1, 4):
        for requests in (64, 256):
            result = measure(ranks, requests, args.rounds, args.seed)
            results.append(result)
            cells = [
                f"{value:6.2f} [{low:.2f}, {high:.2f}]"
                for value, (low, high) in (
                    (result.ledger, result.ledger_interval),
                    (result.stock, result.stock_interval),
                )
            ]
            print(f"{ranks:5} {requests:8}   {cells[0]:24}{cells[1]:24}{result.report:.1f}", flush=True)
    record = {
        "command": " ".join(["python -m benchmarks.ledger", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "vllm": vllm.__version__,
        },
        "settings": {
            "layers": LAYERS,
            "kv_heads": KV_HEADS,
            "page_size": PAGE,
            "prompt": PROMPT,
            "rounds": args.rounds,
        },
        "results": [asdict(result) for result in results],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
