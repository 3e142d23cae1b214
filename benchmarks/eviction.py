"""Which share of a long prompt's prefill an eviction takes: ``python -m benchmarks.eviction``.

One engine serves the same prompt under every policy and under ``full``, in turn. The share is the time that the worker
spends on choosing and on moving, over the time of the steps that computed the prompt; beside it stands the whole
prefill against the one without eviction, pair by pair.
"""

import argparse
from dataclasses import asdict

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import estimate, paired_ratio, record, save
from benchmarks.sides import Outcome, Side, Workload, running
from benchmarks.throughput import TOKEN_BYTES, model
from vllm_kvevict.policies import available

TARGET = 0.03


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=0.2, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each policy (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    args = parser.parse_args()
    side = Side(
        "eviction",
        model(args.length + 64),
        args.threads,
        dtype="bfloat16",
        max_model_len=args.length + 64,
        kv_cache_memory_bytes=2 * (args.length + 256) * TOKEN_BYTES,
        kv_eviction="full",
        kv_budget=args.budget,
    )
    policies = available()
    outcomes: dict[str, list[Outcome]] = {policy: [] for policy in policies}
    with running(side):
        side.run(Workload(1, args.length, 2, seed=-1))
        for number in track(range(args.rounds), "rounds"):
            for policy in policies:
                workload = Workload(1, args.length, 2, seed=number)
                outcomes[policy].append(side.run(workload, extra_args={"kv_eviction": policy}))
    table = Table(title=f"eviction of a prompt of {args.length} tokens, budget {args.budget:g}")
    for column in (
        "policy",
        "choosing ms",
        "moving ms",
        "share [95 %]",
        "prefill / full",
        "CPU / full",
        "target",
    ):
        table.add_column(column, no_wrap=True, justify="left" if column == "policy" else "right")
    results = {}
    full = [outcome.prefill_seconds for outcome in outcomes["full"]]
    for policy in policies[1:]:
        runs = outcomes[policy]
        chosen, moved = (estimate([run.evictions[0][i] * 1e3 for run in runs]) for i in (0, 1))
        share = estimate([sum(run.evictions[0]) / run.prefill_seconds for run in runs])
        ratio = paired_ratio([run.prefill_seconds for run in runs], full)
        cpu = paired_ratio([run.cpu for run in runs], [run.cpu for run in outcomes["full"]])
        verdict = "met" if share.median <= TARGET else "MISSED"
        table.add_row(
            policy, f"{chosen.median:.1f}", f"{moved.median:.1f}", str(share), str(ratio), str(cpu), verdict
        )
        results[policy] = {
            "share": asdict(share),
            "prefill_ratio": asdict(ratio),
            "cpu_ratio": asdict(cpu),
            "choosing_ms": asdict(chosen),
            "moving_ms": asdict(moved),
            "runs": [run.summary() for run in runs],
        }
    Console(width=120).print(table)
    print(f"share: of the prefill; target: at most {TARGET:.0%}")
    content = {"settings": vars(args), "full_prefill_seconds": full, "policies": results}
    print(f"written to {save('eviction', record('eviction', content))}")


if __name__ == "__main__":
    main()
