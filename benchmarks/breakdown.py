"""Where the time of an engine step goes, with stock vLLM and with eviction: ``python -m benchmarks.breakdown``.

Two kinds of steps, of models with few and with many layers: one that decodes a batch, and one that reads the whole
prompt of a request and evicts it. Functions are timed from outside, each without the timed functions that it calls, so
the parts add up to the step. The timers take about a microsecond per call, which is included. From the parts on one
thread follows what more cores could make of a step, since threads divide some parts and not the others.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness.measure import RESULTS, record, record_name, save, warn_if_busy
from benchmarks.harness.more_cores import cores_table
from benchmarks.harness.options import add_counts, add_dtype, budget, whole
from benchmarks.harness.scenarios import BLOCK, STOCK, model, token_bytes
from benchmarks.harness.sides import Engine, Side, Workload, running
from benchmarks.harness.steps import Parts, admit, drop, prefill, stopwatch
from vllm_kvevict.policies import available

DECODE, PREFILL = "decode step", "prefill with eviction"


# What the engines' processes do.


def install(engine: Engine) -> None:
    """Watch the functions of both sides that take time."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from vllm_kvevict.engine.worker import runtime
    from vllm_kvevict.engine.worker.attention import RaggedImpl
    from vllm_kvevict.schedules import eviction

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
    watch(RaggedImpl, "forward", "attention")
    watch(runtime.Runtime, "build", "pages and metadata")
    watch(eviction.Eviction, "after_attention", "eviction: the rest")
    watch(eviction, "score_layer", "eviction: scoring")
    watch(eviction, "select", "eviction: selection")
    watch(type(runtime.get_runtime().rank.cache), "compact", "eviction: compaction")


def decode_steps(engine: Engine, workload: Workload, steps: int) -> list[Parts]:
    """Decode steps of a batch that has read its prompts."""
    admit(engine, workload)
    prefill(engine, float("inf"))
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


@dataclass
class Cell:
    """Steps of one kind on one side.

    Attributes:
        layers: of the model.
        side: stock or the policy.
        kind: DECODE or PREFILL.
        steps: of each step, seconds by part.
    """

    layers: int
    side: str
    kind: str
    steps: list[Parts]

    @property
    def milliseconds(self) -> Parts:
        """Median of each part."""
        parts = dict.fromkeys(part for step in self.steps for part in step)
        return {part: 1e3 * median(step.get(part, 0.0) for step in self.steps) for part in parts}

    @property
    def total(self) -> float:
        """Median of whole steps, in milliseconds."""
        return 1e3 * median(sum(step.values()) for step in self.steps)


def measure(arguments: argparse.Namespace) -> list[Cell]:
    """One engine after another, so that none disturbs the one that is timed."""
    longest = arguments.context + arguments.steps + 8
    blocks = arguments.batch * -(-longest // BLOCK) + 1
    eviction = {"kv_eviction": arguments.policy, "kv_budget": arguments.budget}
    workload = Workload(arguments.batch, arguments.context, arguments.steps + 8, seed=1)
    cells = []
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
            cells.append(Cell(layers, name, DECODE, side.call(decode_steps, workload, arguments.steps)))
            cells.append(Cell(layers, name, PREFILL, side.call(prefill_steps, workload, arguments.prompts)))
    return cells


def show(arguments: argparse.Namespace, kind: str, cells: Sequence[Cell]) -> Table:
    """Milliseconds of each part, one column for each model and side."""
    what = f"{arguments.batch} x {arguments.context}" if kind == DECODE else f"{arguments.context} tokens"
    table = Table(title=f"{kind}, {what}, {arguments.dtype}, {arguments.threads} thread(s): ms, median")
    table.add_column("part")
    for cell in cells:
        table.add_column(f"{cell.layers} layers, {cell.side}", justify="right")
    columns = [cell.milliseconds for cell in cells]
    for part in dict.fromkeys(part for column in reversed(columns) for part in column):
        table.add_row(part, *(f"{column[part]:.2f}" if part in column else "-" for column in columns))
    table.add_row("whole step", *(f"{cell.total:.2f}" for cell in cells))
    return table


def plot(cells: Sequence[Cell], name: str) -> str:
    """Stacked bars of the parts, in a file of this name."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 1, figsize=(9, 6))
    names = list(dict.fromkeys(part for cell in cells for part in cell.milliseconds))
    for panel, kind in zip(panels, (DECODE, PREFILL), strict=True):
        bars = [cell for cell in reversed(cells) if cell.kind == kind]
        labels = [f"{cell.layers} layers, {cell.side}" for cell in bars]
        left = [0.0] * len(bars)
        for number, part in enumerate(names):
            widths = [cell.milliseconds.get(part, 0.0) for cell in bars]
            panel.barh(labels, widths, left=left, label=part, color=f"C{number}")
            left = [one + width for one, width in zip(left, widths, strict=True)]
        panel.set(title=kind, xlabel="milliseconds")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.tight_layout()
    path = RESULTS / f"{name}.png"
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)
    return str(path)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.breakdown",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_counts(
        parser,
        ("batch", 8, "requests in a decode step"),
        ("context", 2048, "tokens of each prompt"),
        ("steps", 64, "decode steps"),
        ("prompts", 7, "prompts of the other kind"),
        ("threads", 1, "of each engine"),
    )
    parser.add_argument("--policy", choices=available(), default="ada-snapkv", help="default: %(default)s")
    parser.add_argument(
        "--budget", type=budget, default=0.2, metavar="X", help="--kv-budget (default: %(default)s)"
    )
    parser.add_argument(
        "--model-layers", type=whole, nargs="+", default=[4, 16], metavar="N", help="default: %(default)s"
    )
    add_dtype(parser)
    arguments = parser.parse_args(argv)
    if arguments.context < 256:
        parser.error("--context must be at least 256: shorter prompts are kept whole")
    if (cores := len(os.sched_getaffinity(0))) < arguments.threads:
        parser.error(f"--threads must be at most {cores}, the number of cores")
    return arguments


def main() -> int:
    """Measure; the exit code."""
    arguments, console = parse_arguments(), Console(width=130)
    load = warn_if_busy(console)
    cells = measure(arguments)
    for kind in (DECODE, PREFILL):
        of_kind = [cell for cell in cells if cell.kind == kind]
        console.print(show(arguments, kind, of_kind))
        if arguments.threads == 1:
            columns = [(f"{cell.layers} layers, {cell.side}", cell.milliseconds) for cell in of_kind]
            console.print(cores_table(f"{kind}: at best, by Amdahl's law, ms", columns))
    content = {
        "settings": vars(arguments),
        "load_average_at_start": load,
        "cells": [
            {
                "layers": cell.layers,
                "side": cell.side,
                "kind": cell.kind,
                "milliseconds": cell.milliseconds,
                "total": cell.total,
            }
            for cell in cells
        ],
    }
    name = record_name("breakdown", arguments.dtype)
    console.print(f"written to {save(name, record('breakdown', content))} and {plot(cells, name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
