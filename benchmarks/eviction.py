"""How long an eviction takes, as a share of a long prompt's prefill: ``python -m benchmarks.eviction``.

One engine serves the same prompt with every policy and with ``full``, in turn. The share is the time that the worker
spends on choosing and moving entries, over the time of the steps that computed the prompt. The table also has the ratio
of the whole prefill to the one without eviction, pair by pair.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.measure import (
    USUAL,
    Estimate,
    estimate,
    kind,
    paired_ratio,
    record,
    record_name,
    save,
)
from benchmarks.harness.options import add_dtype
from benchmarks.harness.scenarios import Target, model, token_bytes
from benchmarks.harness.sides import Outcome, Side, Workload, running
from vllm_kvevict.policies import available

TARGETS, TARGET_LENGTH = {USUAL: 0.03}, 8192
"""The largest share of the prefill that is acceptable, by level and dtype, at this length."""

COSTLY = ("h2o", "criticalkv", "ada-criticalkv", "defensivekv", "layer-defensivekv", "dropkv")
"""Policies that by their definition do as much work as a part of the model: they have no target."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eviction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2048, 8192], help="prompt tokens (default: %(default)s)"
    )
    parser.add_argument("--policies", nargs="+", choices=available()[1:], default=available()[1:])
    parser.add_argument("--budget", type=float, default=0.2, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each policy (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    add_dtype(parser)
    return parser.parse_args(argv)


def make_side(args: argparse.Namespace) -> Side:
    """The engine, with room for two of the longest prompts."""
    longest = max(args.lengths)
    return Side(
        "eviction",
        model(longest + 64),
        args.threads,
        dtype=args.dtype,
        max_model_len=longest + 64,
        kv_cache_memory_bytes=2 * (longest + 256) * token_bytes(args.dtype),
        enable_prefix_caching=False,  # all policies are given the same prompts
        kv_eviction="full",
        kv_budget=args.budget,
        kv_eviction_config={"policies": ["all"]},
    )


def main() -> None:
    args = parse_arguments()
    side = make_side(args)
    policies = ["full", *args.policies]
    runs = [(length, number) for length in args.lengths for number in range(args.rounds)]
    outcomes: dict[tuple[int, str], list[Outcome]] = {}
    with running(side):
        for length in args.lengths:
            side.run(Workload(1, length, 2, seed=-1))
        for length, number in track(runs, "rounds"):
            for policy in policies:
                workload = Workload(1, length, 2, seed=number)
                outcome = side.run(workload, extra_args={"kv_eviction": policy})
                outcomes.setdefault((length, policy), []).append(outcome)
    lengths = {
        length: report(args, length, {policy: outcomes[length, policy] for policy in policies})
        for length in args.lengths
    }
    target = TARGETS.get(kind(args.dtype))
    wanted = "none" if target is None else f"at most {target:.0%}"
    print(f"share: of the prefill; target at {TARGET_LENGTH} tokens: {wanted}")
    judged = [found["target"] for found in lengths.get(TARGET_LENGTH, {}).values() if "target" in found]
    content = {"settings": vars(args), "lengths": lengths, "targets": judged}
    print(f"written to {save(record_name('eviction', args.dtype), record('eviction', content))}")


def target_of(policy: str, length: int, share: Estimate, dtype: str) -> Target | None:
    """What the share should be at most, and is; None if nothing is asked of it."""
    bound = TARGETS.get(kind(dtype))
    if bound is None or length != TARGET_LENGTH or policy in COSTLY:
        return None
    return Target(f"{policy}, {length} tokens: share of the prefill", share, bound, at_most=True)


def report(args: argparse.Namespace, length: int, outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    """Print the table of one length and return its figures; ``full`` is among the policies."""
    table = Table(title=f"eviction of a prompt of {length} tokens in {args.dtype}, budget {args.budget:g}")
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
    whole = outcomes["full"]
    for policy, runs in outcomes.items():
        if policy == "full":
            continue
        chosen, moved = (estimate([run.evictions[0][i] * 1e3 for run in runs]) for i in (0, 1))
        share = estimate([sum(run.evictions[0]) / run.prefill_seconds for run in runs])
        ratio = paired_ratio([run.prefill_seconds for run in runs], [run.prefill_seconds for run in whole])
        cpu = paired_ratio([run.cpu for run in runs], [run.cpu for run in whole])
        target = target_of(policy, length, share, args.dtype)
        verdict = "-" if target is None else "met" if target.met else "MISSED"
        table.add_row(
            policy, f"{chosen.median:.1f}", f"{moved.median:.1f}", str(share), str(ratio), str(cpu), verdict
        )
        results[policy] = {
            "share": asdict(share),
            "prefill_ratio": asdict(ratio),
            "cpu_ratio": asdict(cpu),
            "choosing_ms": asdict(chosen),
            "moving_ms": asdict(moved),
            **({} if target is None else {"target": asdict(target) | {"met": target.met}}),
            "runs": [run.summary() for run in runs],
        }
    Console(width=120).print(table)
    return {"full_prefill_seconds": [run.prefill_seconds for run in whole], "policies": results}


if __name__ == "__main__":
    main()
