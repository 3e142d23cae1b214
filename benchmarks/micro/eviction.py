"""How long an eviction takes, as a share of a long prompt's prefill.

One engine serves the same prompt with every policy and with ``full``, in turn. The share is the time that the worker
spends on choosing and moving entries, over the time of the steps that computed the prompt. The table also has the ratio
of the whole prefill to the one without eviction, pair by pair.
"""

import argparse
from collections.abc import Sequence
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
    prefills = [run.prefill_seconds for run in runs], [run.prefill_seconds for run in whole]
    return {
        "choosing_ms": estimate([1e3 * run.evictions[0][0] for run in runs]),
        "moving_ms": estimate([1e3 * run.evictions[0][1] for run in runs]),
        "share": estimate([sum(run.evictions[0]) / run.prefill_seconds for run in runs]),
        "prefill_ratio": paired_ratio(*prefills),
        "cpu_ratio": paired_ratio([run.cpu for run in runs], [run.cpu for run in whole]),
    }


def run_all(side: Side, length: int, policies: Sequence[str], rounds: int) -> dict[str, list[Outcome]]:
    """All policies in turns, on the same prompts."""
    found: dict[str, list[Outcome]] = {name: [] for name in policies}
    for number in range(rounds):
        for name, runs in found.items():
            prompt = Workload(1, length, 2, seed=number)
            runs.append(side.run(prompt, extra_args={"kv_eviction": name}))
    return found


def measure(arguments: argparse.Namespace) -> Found:
    """All policies, by length."""
    side = make_side(arguments)
    title = f"eviction of a prompt in {arguments.dtype}, budget {arguments.budget:g}"
    columns = ("tokens", "choosing ms", "moving ms", "share [95 %]", "prefill / full", "CPU / full")
    shown, lengths = table(title, ["policy"], columns), {}
    with running(side):
        for length in arguments.lengths:
            side.run(Workload(1, length, 2, seed=-1))
        for length in track(arguments.lengths, "lengths"):
            outcomes = run_all(side, length, ["full", *arguments.policies], arguments.rounds)
            whole = outcomes.pop("full")
            policies: dict[str, Any] = {}
            for name, runs in outcomes.items():
                of = figures(runs, whole)
                shown.add_row(name, str(length), *map(str, of.values()))
                recorded = {key: asdict(value) for key, value in of.items()}
                policies[name] = recorded | {"runs": [run.summary() for run in runs]}
            full = [run.prefill_seconds for run in whole]
            lengths[length] = {"full_prefill_seconds": full, "policies": policies}
    return Found({"lengths": lengths}, [shown])
