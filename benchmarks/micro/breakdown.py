"""Where the time of an engine step goes, with stock vLLM and with eviction.

Two kinds of steps, of models with few and with many layers: one that decodes a batch, and one that reads the whole
prompt of a request and evicts it. Functions are timed from outside, each without the timed functions that it calls, so
the parts add up to the step. The timers take about a microsecond per call, which is included.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.progress import track
from rich.table import Table

from benchmarks.harness.options import budget, policy_name, whole
from benchmarks.harness.scenarios import BLOCK, STOCK, model, token_bytes
from benchmarks.harness.sides import Engine, Side, Workload, running
from benchmarks.harness.tables import table
from benchmarks.micro.engines import admit, drop, prefill
from benchmarks.micro.loop import Found

DECODE, PREFILL = "decode step", "prefill with eviction"
REST, TOTAL = "engine, API and the rest", "whole step"
Parts = dict[str, float]
"""Seconds of a step by part."""
OPTIONS = (
    ("batch", whole, 8, "requests in a decode step"),
    ("context", whole, 2048, "tokens of each prompt"),
    ("steps", whole, 64, "decode steps"),
    ("prompts", whole, 7, "prompts of the other kind"),
    ("threads", whole, 1, "of each engine"),
    ("policy", policy_name, "ada-snapkv", "of the evicting engines"),
    ("budget", budget, 0.2, "--kv-budget"),
    ("model-layers", whole, [4, 16], "layers of the models"),
)


def refuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments."""
    return (
        "--context must be at least 256: shorter prompts are kept whole" if arguments.context < 256 else None
    )


# What the engines' processes do.


@dataclass
class Stopwatch:
    """Times functions exclusively: while one that it calls is at work, the caller's time stands still."""

    parts: Parts = field(default_factory=lambda: defaultdict(float))
    _open: list[str] = field(default_factory=lambda: [REST])
    _since: float = 0.0

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count a function's time for a part."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._open.pop()

        setattr(owner, name, timed)

    def _switch(self) -> None:
        now = time.perf_counter()
        self.parts[self._open[-1]] += now - self._since
        self._since = now

    def run(self, work: Callable[[], Any]) -> Parts:
        """Run something and say where its time went."""
        self.parts.clear()
        self._since = time.perf_counter()
        work()
        self._switch()
        return dict(self.parts)


stopwatch = Stopwatch()


def of_eviction() -> list[tuple[Any, str, str]]:
    """What eviction adds to an engine: where a function is, its name, and the part that it counts for."""
    from vllm_kvevict.cache import PagedKVCache
    from vllm_kvevict.engine.worker import runtime
    from vllm_kvevict.engine.worker.attention import RaggedImpl
    from vllm_kvevict.schedules import eviction, selection

    return [
        (RaggedImpl, "forward", "attention"),
        (runtime.Runtime, "build", "pages and metadata"),
        (eviction.Eviction, "after_attention", "eviction: the rest"),
        (selection, "score_layer", "eviction: scoring"),
        (selection, "select", "eviction: selection"),
        (PagedKVCache, "compact", "eviction: compaction"),
        (PagedKVCache, "store", "eviction: compaction"),
    ]


def install(engine: Engine) -> None:
    """Watch the functions of both sides that take time."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    core = engine.llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    runner = worker.model_runner
    watch = stopwatch.watch
    watch(core.scheduler, "schedule", "scheduler")
    watch(core.scheduler, "update_from_output", "scheduler")
    watch(worker, "execute_model", "vLLM's runner")
    watch(worker, "sample_tokens", "sampling")
    watch(runner, "_model_forward", "model without attention")
    if runner.vllm_config.kv_transfer_config is None:
        watch(CPUAttentionBackendImpl, "forward", "attention")
        return
    for owner, name, part in of_eviction():
        watch(owner, name, part)


def decode_steps(engine: Engine, workload: Workload, steps: int) -> list[Parts]:
    """Decode steps of a batch that has read its prompts."""
    admit(engine, workload)
    prefill(engine)
    engine.llm.llm_engine.step()
    seen = [stopwatch.run(engine.llm.llm_engine.step) for _ in range(steps)]
    drop(engine)
    engine.llm.llm_engine.step()  # the workers hear of it
    return seen


def prefill_steps(engine: Engine, workload: Workload, steps: int) -> list[Parts]:
    """Steps that read one whole prompt each; the first does not count."""
    seen = []
    for number in range(steps + 1):
        admit(engine, Workload(1, workload.input_len, 2, seed=workload.seed + number + 1))
        seen.append(stopwatch.run(engine.llm.llm_engine.step))
        drop(engine)
        engine.llm.llm_engine.step()
    return seen[1:]


# What the parent does.


def milliseconds(steps: Sequence[Parts]) -> Parts:
    """Median of each part, and of whole steps; a part that a step does not have took no time in it."""
    names = dict.fromkeys(part for step in steps for part in step)
    found = {part: 1e3 * median(step.get(part, 0.0) for step in steps) for part in names}
    return found | {TOTAL: 1e3 * median(sum(step.values()) for step in steps)}


def measure(arguments: argparse.Namespace) -> Found:
    """Both kinds of steps, one engine after another, so that none disturbs the one that is timed."""
    longest = arguments.context + arguments.steps + 8
    blocks = arguments.batch * -(-longest // BLOCK) + 1
    eviction = {"kv_eviction": arguments.policy, "kv_budget": arguments.budget}
    workload = Workload(arguments.batch, arguments.context, arguments.steps + 8, seed=1)
    cells: list[dict[str, Any]] = []
    todo = [(layers, side) for layers in arguments.model_layers for side in (STOCK, arguments.policy)]
    for layers, name in track(todo, "engines"):
        side = Side(
            f"breakdown {name}",
            model(longest, layers),
            arguments.threads,
            dtype=arguments.dtype,
            max_model_len=longest,
            max_num_batched_tokens=arguments.context,
            kv_cache_memory_bytes=blocks * BLOCK * token_bytes(arguments.dtype, layers),
            **({} if name == STOCK else eviction),
        )
        with running(side):
            side.call(install)
            for kind, work, count in (
                (DECODE, decode_steps, arguments.steps),
                (PREFILL, prefill_steps, arguments.prompts),
            ):
                parts = milliseconds(side.call(work, workload, count))
                cells.append({"layers": layers, "side": name, "kind": kind, "milliseconds": parts})
    return Found({"cells": cells}, [show(kind, cells) for kind in (DECODE, PREFILL)])


def show(kind: str, cells: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds of each part, one column for each model and side."""
    chosen = [cell for cell in cells if cell["kind"] == kind]
    shown = table(f"{kind}: ms, median", ["part"], [f"{of['layers']} layers, {of['side']}" for of in chosen])
    columns = [cell["milliseconds"] for cell in chosen]
    for part in dict.fromkeys(part for column in reversed(columns) for part in column):
        shown.add_row(part, *(f"{column[part]:.2f}" if part in column else "-" for column in columns))
    return shown
