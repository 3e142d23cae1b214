"""What share of drafted tokens is accepted, by budget, and over what is accepted at budget 1.

Draft models keep all of their KV while the model loses some of its own, so they guess worse what it says. Here a real
model drafts for itself on real text. While nothing is evicted it is always right.
"""

import argparse
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import track
from transformers import AutoTokenizer

from benchmarks.harness.measure import paired_ratio
from benchmarks.harness.options import whole
from benchmarks.harness.scenarios import LEAST_ROUNDS, Target
from benchmarks.harness.sides import Engine, Side, running
from benchmarks.harness.tables import table
from benchmarks.micro.loop import Found
from vllm_kvevict.quality import checkpoint
from vllm_kvevict.quality.texts import sentences

SCOPES = {"ada-snapkv": "prompt", "snapkv": "prefix"}
"""Policies, and what each evicts: all of a prompt, or what lies before its question."""
BUDGETS = (1.0, 0.3, 0.2, 0.1)
JUDGED, TARGET = 0.2, 0.65
SENTENCES = 40
"""Of a text: about 1,000 tokens."""
ANSWER, DRAFTS = 48, 3
"""Most tokens of an answer; tokens that are drafted at once."""
OPTIONS = (
    ("rounds", whole, 9, "of requests, which every policy answers at every budget"),
    ("requests", whole, 4, "of a round"),
)
Prompt = tuple[list[int], int]
"""Tokens, and how many of them lie before the question."""
Counts = tuple[float, ...]
"""Tokens that were accepted, and that were drafted."""


def prompts(model: Path, count: int, seed: int) -> list[Prompt]:
    """Real texts, each with a question."""
    choose, found = random.Random(seed), []
    render = AutoTokenizer.from_pretrained(model).apply_chat_template
    for _ in range(count):
        start = choose.randrange(len(sentences()) - SENTENCES)
        text = {"role": "system", "content": " ".join(sentences()[start : start + SENTENCES])}
        question = {"role": "user", "content": "Summarise the text above in a few sentences."}
        tokens = render([text, question], add_generation_prompt=True, return_dict=False)
        found.append((tokens, len(render([text], return_dict=False))))
    return found


def accepted(engine: Engine, asked: Sequence[Prompt], policy: str, budget: float) -> Counts:
    """Let the engine's process answer."""
    from vllm import SamplingParams

    def counts() -> list[float]:
        found = {metric.name: metric for metric in engine.llm.get_metrics()}
        return [found[f"vllm:spec_decode_num_{name}_tokens"].value for name in ("accepted", "draft")]

    before, params = counts(), []
    for _, prefix in asked:
        fields: dict[str, Any] = {"kv_eviction": policy, "kv_budget": budget}
        if SCOPES[policy] == "prefix":
            fields["kv_prefix_len"] = prefix
        params.append(SamplingParams(max_tokens=ANSWER, temperature=0, extra_args=fields))
    engine.llm.generate([{"prompt_token_ids": tokens} for tokens, _ in asked], params, use_tqdm=False)
    return tuple(now - then for now, then in zip(counts(), before, strict=True))


def measure(arguments: argparse.Namespace) -> Found:
    """Every policy and budget in each round."""
    model = checkpoint.build()
    side = Side(
        "drafts",
        model,
        1,
        dtype=arguments.dtype,
        max_model_len=4096,
        kv_cache_memory_bytes=2 << 30,
        enforce_eager=True,
        disable_log_stats=False,
        kv_eviction="full",
        kv_eviction_config={"policies": "all", "min_prompt": 0},
        speculative_config={"method": "draft_model", "model": str(model), "num_speculative_tokens": DRAFTS},
    )
    rounds: dict[tuple[str, float], list[Counts]] = {kind: [] for kind in itertools.product(SCOPES, BUDGETS)}
    with running(side):
        for seed in track(range(arguments.rounds), "rounds"):
            asked = prompts(model, arguments.requests, seed)
            for kind, found in rounds.items():
                found.append(side.call(accepted, asked, *kind))
    return summary(rounds)


def summary(rounds: dict[tuple[str, float], list[Counts]]) -> Found:
    """What was found for each policy and budget, which is judged at one of them."""
    shown, cells, targets = (
        table("accepted", ["policy"], ["budget", "tokens", "over budget 1 [95 %]"]),
        [],
        [],
    )
    for (policy, budget), found in rounds.items():
        shares = ([right / drafted for right, drafted in one] for one in (found, rounds[policy, 1.0]))
        ratio = paired_ratio(*shares)
        right, drafted = map(sum, zip(*found, strict=True))
        shown.add_row(policy, f"{budget:g}", f"{right:g} of {drafted:g}", str(ratio))
        cells.append({"policy": policy, "budget": budget, "rounds": found, "over budget 1": ratio})
        if budget == JUDGED and len(found) >= LEAST_ROUNDS:
            targets.append(Target(f"{policy}: accepted over budget 1", ratio, TARGET))
    return Found({"cells": cells}, [shown], targets=targets)
