"""Real engines on tiny models in fp32, with counted steps and arrivals: tokens, kept positions, log and metrics."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import LLM

from benchmarks.harness.models import make_model
from tests.engine.served.test_speculation import NGRAM
from tests.engine.support.answers import Rules
from tests.engine.support.conversations import conversation
from tests.engine.support.loads import PROMPT_POLICIES
from tests.engine.support.quick_starts import quick_starts
from tests.engine.support.running import Ask, evicting_engine
from vllm_kvevict.engine.worker import recording

EVICTING = sorted(set(PROMPT_POLICIES) - {"full"})
SMALL = {"max_num_seqs": 16, "max_model_len": 1024, "async_scheduling": False}
CHUNKED = {**SMALL, "max_num_batched_tokens": 128}
WHOLE = {**SMALL, "max_num_batched_tokens": 1024}
BLOCK = 128
"""Tokens of vLLM's blocks on CPUs."""


@dataclass(frozen=True)
class Scenario:
    """An engine and what it is asked.

    Attributes:
        asks: one arrives every third step.
        counts_steps: whether its steps are the same each time; with pipeline stages they depend on which is done first.
    """

    asks: Sequence[Ask]
    settings: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    counts_steps: bool = True


def every_policy(tokens: int = 12) -> list[Ask]:
    """A request of each policy, and some with a prefix of their own or kept whole."""
    asks = [Ask(230 + 9 * i, policy, 0.2, seed=i, max_tokens=tokens) for i, policy in enumerate(EVICTING)]
    asks += [Ask(170, "ada-snapkv", 0.3, prefix_len=140), Ask(410, "lava", 0.3, prefix_len=140)]
    return [
        *asks,
        Ask(90, "snapkv", 48.0),
        Ask(260, "full"),
        Ask(200, "ada-snapkv", 1.0),
        Ask(1, max_tokens=9),
    ]


def once_each(tokens: int = 4) -> list[Ask]:
    """Likewise, of the policies that compute no token twice, which other layers could not undo."""
    return [ask for ask in every_policy(tokens) if ask.policy not in ("kvzip", "take")]


def with_documents() -> list[Ask]:
    """Requests that begin alike, evicted behind that or behind all of their prompt."""
    policies = ("kvzip", "ada-snapkv", "lava", "compactor", "streaming-llm", "criticalkv")
    behind = [Ask(600, policy, 0.3, prefix_len=513, max_tokens=6) for policy in policies for _ in range(2)]
    whole = [Ask(600, policy, 0.3, max_tokens=6) for policy in (*policies, "full", "take")]
    return [*behind, *whole, *behind[::-2]]


def preempted() -> list[Ask]:
    """Answers that are longer than admission expects."""
    return [Ask(300, policy, 0.2, seed=i, max_tokens=150) for i, policy in enumerate(EVICTING)]


def with_conversations() -> list[Ask]:
    """Conversations that go on, branch and are edited, beside each other."""
    chats = [
        conversation(policy, seed) for seed, policy in enumerate(("ada-snapkv", "kvzip", "streaming-llm"))
    ]
    return [ask for turns in zip(*chats, strict=True) for ask in turns]


def long_answers() -> list[Ask]:
    """Answers that are far longer than what is kept of them, behind prompts of some policies."""
    policies = ("ada-snapkv", "lava", "kvzip", "streaming-llm", "full")
    asks = [Ask(90 + 31 * i, policy, 0.3, max_tokens=90, seed=i) for i, policy in enumerate(policies)]
    return [*asks, Ask(200, "ada-snapkv", 0.3, max_tokens=60, decode_budget=0)]


RULES = Rules(20, 12, 8)
BASE = {"heads": 8, "kv_heads": 4, "layers": 4}
SCENARIOS: dict[str, Scenario] = {
    "whole": Scenario(every_policy(), WHOLE, BASE),
    "chunked": Scenario(every_policy(), CHUNKED, BASE),
    "tensor 2": Scenario(every_policy(4), {**CHUNKED, "tensor_parallel_size": 2}, BASE),
    "pipeline 2": Scenario(
        every_policy(4), {**CHUNKED, "pipeline_parallel_size": 2}, BASE, counts_steps=False
    ),
    "windows": Scenario(once_each(), CHUNKED, {"architecture": "gemma2"}),
    "states": Scenario(once_each(), CHUNKED, {"architecture": "granitemoehybrid"}),
    "prefixes": Scenario(with_documents(), {**CHUNKED, "enable_prefix_caching": True}, BASE),
    "dropped prefixes": Scenario(
        with_documents(),
        {**CHUNKED, "enable_prefix_caching": True, "num_gpu_blocks_override": 1024 // BLOCK + 3},
        BASE,
    ),
    "preempted": Scenario(
        preempted(),
        {**CHUNKED, "num_gpu_blocks_override": 1024 // BLOCK + 1, "eviction": {"decode_reserve": 8}},
        BASE,
    ),
    "conversations": Scenario(
        with_conversations(), {**CHUNKED, "enable_prefix_caching": True, "eviction": {"min_turn": 16}}, BASE
    ),
    "answers": Scenario(long_answers(), {**CHUNKED, "eviction": RULES.options("ada-snapkv")}, BASE),
    "answers by redundancy": Scenario(long_answers(), {**CHUNKED, "eviction": RULES.options("rkv")}, BASE),
    # Last: no engine starts in a process after the library that drafts are made with.
    "drafts": Scenario(every_policy(24), {**CHUNKED, "speculative_config": NGRAM}),
}


def run(scenario: Scenario, folder: Path) -> list[str]:
    """A line for each request, for each line of the log, and for the metrics.

    Args:
        folder: for the model and the log.
    """
    log = folder / "evictions.jsonl"
    log.unlink(missing_ok=True)
    settings = dict(scenario.settings)
    options = {"eviction_log": str(log), **settings.pop("eviction", {})}
    model = _model(folder, scenario.model)
    with quick_starts(), evicting_engine(model, eviction=options, **settings) as llm:
        tokens = _serve(llm, scenario.asks)
        ranks = recording.evictions(llm.collective_rpc(recording.take_decisions))
        metrics = _metrics(llm, scenario.counts_steps)
    lines = []
    for name in tokens:
        kept = [_digest(_positions(eviction)) for eviction in recording.of_request(ranks, name)]
        lines.append(json.dumps([name, tokens[name], kept]))
    evictions = [_without_seconds(line) for line in log.read_text().splitlines()]
    lines += evictions if scenario.counts_steps else sorted(evictions)
    return [*lines, *metrics]


def _model(folder: Path, settings: dict[str, Any]) -> Path:
    name = "-".join(str(value) for value in settings.values()) or "llama"
    path = folder / name
    if not path.exists():
        make_model(path, **settings)
    return path


def _serve(llm: LLM, asks: Sequence[Ask]) -> dict[str, list[int]]:
    """Tokens of all requests by name; one arrives every third step."""
    engine, waiting = llm.llm_engine, {f"r{index}": ask for index, ask in enumerate(asks)}
    tokens: dict[str, list[int]] = {}
    steps = 0
    while waiting or engine.has_unfinished_requests():
        if waiting and steps % 3 == 0:
            name = next(iter(waiting))
            ask = waiting.pop(name)
            engine.add_request(name, ask.request, ask.sampling(logits=False))
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
    return {f"r{index}": tokens[f"r{index}"] for index in range(len(asks))}


def _positions(eviction: recording.KeptByLayer) -> list[Any]:
    return [[layer, [head.tolist() for head in heads]] for layer, heads in sorted(eviction.kept.items())]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _without_seconds(line: str) -> str:
    """A line of the log without what differs each time."""
    fields = json.loads(line)
    kept = {name: value for name, value in fields.items() if not name.endswith("_seconds")}
    kept["request"] = kept["request"].partition("-")[0]
    return json.dumps(kept)


def _metrics(llm: LLM, counts_steps: bool) -> list[str]:
    """Our metrics; those of single steps only where steps are the same each time."""
    lines = []
    for metric in llm.get_metrics():
        is_ours = metric.name.startswith("vllm:kv_eviction_") or metric.name == "vllm:num_preemptions"
        varies = "_seconds" in metric.name or (type(metric).__name__ == "Gauge" and not counts_steps)
        if is_ours and not varies:
            labels = {name: value for name, value in sorted(metric.labels.items()) if name != "model_name"}
            lines.append(str(dataclasses.replace(metric, labels=labels)))
    return lines


def everything(folder: Path) -> dict[str, list[str]]:
    """All scenarios."""
    return {name: run(scenario, folder) for name, scenario in SCENARIOS.items()}
