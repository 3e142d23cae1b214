"""How long an eviction takes, as a share of a long prompt's prefill.

One engine serves the same prompt with every policy and with ``full``, in turn. The share is the time that the worker
spends on choosing and moving entries, over the time of the steps that computed the prompt. The table also has the ratio
of the whole prefill to the one without eviction, pair by pair.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.progress import track

from benchmarks.harness.measure import Estimate, estimate, paired_ratio
from benchmarks.harness.options import budget, policy_name, whole
from benchmarks.harness.scenarios import model, token_bytes
from benchmarks.harness.sides import Outcome, Side, Workload, running
from benchmarks.harness.tables import table
from benchmarks.micro.loop import Found
from vllm_kvevict.policies import available

OPTIONS = (
    ("lengths", whole, [2048, 8192], "prompt tokens"),
    ("policies", policy_name, [name for name in available() if name != "full"], "that evict"),
    ("budget", budget, 0.2, "--kv-budget"),
    ("rounds", whole, 7, "runs of each policy"),
    ("threads", whole, torch.get_num_threads(), "of the engine"),
)


def refuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    return "--policies must evict: full is always measured" if "full" in arguments.policies else None


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


def figures(runs: Sequence[Outcome], whole: Sequence[Outcome]) -> dict[str, Estimate]:
    """What a policy took, and its runs over those without eviction."""
    chosen, moved = (estimate([run.evictions[0][i] * 1e3 for run in runs]) for i in (0, 1))
    return {
        "share": estimate([sum(run.evictions[0]) / run.prefill_seconds for run in runs]),
        "prefill_ratio": paired_ratio(
            [run.prefill_seconds for run in runs], [run.prefill_seconds for run in whole]
        ),
        "cpu_ratio": paired_ratio([run.cpu for run in runs], [run.cpu for run in whole]),
        "choosing_ms": chosen,
        "moving_ms": moved,
    }


def of_length(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """What the record says of one length; ``full`` is among the policies."""
    whole = outcomes["full"]
    policies = {
        name: {key: asdict(value) for key, value in figures(runs, whole).items()}
        | {"runs": [run.summary() for run in runs]}
        for name, runs in outcomes.items()
        if name != "full"
    }
    return {"full_prefill_seconds": [run.prefill_seconds for run in whole], "policies": policies}


def measure(arguments: argparse.Namespace) -> Found:
    """All policies in turns, by length."""
    side, policies = make_side(arguments), ["full", *arguments.policies]
    outcomes: dict[int, dict[str, list[Outcome]]] = {}
    with running(side):
        for length in arguments.lengths:
            side.run(Workload(1, length, 2, seed=-1))
        for length in track(arguments.lengths, "lengths"):
            found = outcomes[length] = {name: [] for name in policies}
            for number in range(arguments.rounds):
                for name in policies:
                    outcome = side.run(Workload(1, length, 2, seed=number), extra_args={"kv_eviction": name})
                    found[name].append(outcome)
    lengths = {length: of_length(found) for length, found in outcomes.items()}
    title = f"eviction of a prompt in {arguments.dtype}, budget {arguments.budget:g}"
    columns = ("tokens", "choosing ms", "moving ms", "share [95 %]", "prefill / full", "CPU / full")
    shown = table(title, ["policy"], columns)
    for length, by_policy in outcomes.items():
        for name in arguments.policies:
            of = figures(by_policy[name], by_policy["full"])
            times = (f"{of[what].median:.1f}" for what in ("choosing_ms", "moving_ms"))
            ratios = (str(of[what]) for what in ("share", "prefill_ratio", "cpu_ratio"))
            shown.add_row(name, str(length), *times, *ratios)
    return Found({"lengths": lengths}, [shown])
