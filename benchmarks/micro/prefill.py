"""Reading long prompts in bounded memory.

``take`` (the default): prompts of several lengths, read by stock vLLM and by take in turns. Time to the first token,
time in attention, the most KV held, and the share of attention's work by the paper's formula.

``recycle``: a prompt that is evicted at its end, read in several steps (every layer is held whole until then) and in
one step (each layer reuses the pages of the one before).

``repeat``: a document followed by a question, kept whole, and evicted by kvzip, which first repeats the document: once
attending to all of it, once only to the chunk that is repeated.

``online``: the same document and question, kept whole, and evicted by the policies that score a document without its
question while they read it: compactor and expected-attention.

Each engine runs in its own process; while one works, the others wait.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.progress import track
from rich.table import Table

from benchmarks.harness.load import page_bytes
from benchmarks.harness.measure import USUAL, estimate, kind, paired_ratio
from benchmarks.harness.options import Option, budget, policy_name, whole
from benchmarks.harness.plots import Panel
from benchmarks.harness.scenarios import BLOCK, LAYERS, STOCK, Target, model, token_bytes
from benchmarks.harness.sides import Engine, Side, Workload, running
from benchmarks.harness.tables import table
from benchmarks.micro.engines import admit, drop, requests, stopwatch
from benchmarks.micro.loop import Found

CHUNK, BUDGET, WARMUP = 2048, 512, 2048
TAKE = {
    "kv_eviction": "take",
    "kv_budget": BUDGET,
    "kv_eviction_config": {"take_chunk": CHUNK, "take_warmup_budget": WARMUP},
}
WHAT = ("take", "recycle", "repeat", "online")
CONTEXTS = {
    "take": [8192, 16384, 32768],
    "recycle": [2048, 8192],
    "repeat": [2048, 8192],
    "online": [2048, 8192],
}
MODEL_LAYERS = {"take": LAYERS, "recycle": 16, "repeat": LAYERS, "online": LAYERS}
WITH_QUESTION = ("repeat", "online")
"""Those whose prompts are a document and a question that is not in view of the eviction."""
QUESTION = 64
"""Tokens behind a document."""
ROOM = 1024
"""Tokens that a repeat may have beside its prompt, and a page."""
KEPT, ALL, OWN_CHUNK = "not evicted", "kvzip", "kvzip, sees a chunk"
ONLINE = ("compactor", "expected-attention")
FIRST_TOKEN = {ALL: 3.4, OWN_CHUNK: 1.6} | dict.fromkeys(ONLINE, 1.03)
"""Time to the first token over that without eviction at most."""
IN_STEPS, IN_ONE_STEP = "in steps", "in one step"
HELD = {"take": 0.12, "recycle": 0.25}
"""The most KV held over the other side's, at most. Pages are counted, so it holds for every level and dtype."""
ATTENTION = {USUAL: 0.25}
"""take's time in attention over stock's at most, by level and dtype."""


OPTIONS: tuple[Option, ...] = (
    ("contexts", whole, [], "tokens of the prompts"),
    ("model-layers", whole, None, "layers of the model"),
    ("policy", policy_name, "ada-snapkv", "policy of recycle"),
    ("budget", budget, 0.1, "budget of recycle, repeat and online"),
    ("rounds", whole, 3, "readings of each prompt by each side"),
    ("threads", whole, 1, "of each engine"),
)


def refuse(arguments: argparse.Namespace) -> str | None:
    """Fill in the sizes of what is read; what is wrong with the arguments."""
    arguments.contexts = sorted(arguments.contexts or CONTEXTS[arguments.what])
    arguments.model_layers = arguments.model_layers or MODEL_LAYERS[arguments.what]
    return "--contexts must be at least 512" if arguments.contexts[0] < 512 else None


@dataclass
class Reading:
    """One prompt, read.

    Attributes:
        wall, cpu: seconds until its first token.
        attention: of the wall seconds, in attention and eviction.
        kv_bytes: the most KV held.
    """

    wall: float
    cpu: float
    attention: float
    kv_bytes: int


# What the engines' processes do.

_peaks: dict[str, int] = {}


def install(engine: Engine) -> None:
    """Time attention, and learn what each request held at most until its eviction."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from vllm_kvevict.engine.worker.attention import RaggedImpl
    from vllm_kvevict.schedules.eviction import Eviction
    from vllm_kvevict.schedules.reports import PartOfEviction

    for backend in (CPUAttentionBackendImpl, RaggedImpl):
        stopwatch.watch(backend, "forward", "attention")
    part_of = Eviction._part

    def watched(self: Eviction, kept: list[list[int]]) -> PartOfEviction:
        part = part_of(self, kept)
        _peaks[self.resident.admission.request_id.rpartition("-")[0]] = part.peak_pages
        return part

    Eviction._part = watched  # type: ignore[method-assign]


def read(engine: Engine, workload: Workload, dtype: str, question: int = 0) -> Reading:
    """Read one prompt, up to its first token; the engine's KV has this dtype.

    Args:
        question: last tokens that are not in view of the eviction.
    """
    admit(engine, workload, prefix_len=workload.input_len - question if question else None)
    (request,) = requests(engine)

    def work() -> None:
        while not request.num_output_tokens:
            engine.llm.llm_engine.step()

    _peaks.clear()
    wall, cpu = time.perf_counter(), time.process_time()
    parts = stopwatch.run(work)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    held = sum(_peaks.values()) * page_bytes(dtype)
    if not held:
        layers = engine.probe.scheduler.vllm_config.model_config.get_total_num_hidden_layers()
        held = -(-workload.input_len // BLOCK) * BLOCK * token_bytes(dtype, layers)
    drop(engine)
    engine.llm.llm_engine.step()
    return Reading(wall, cpu, parts.get("attention", 0.0), held)


# What the parent does.


@dataclass
class Cell:
    """Prompts of one length; readings by side, first the one that the others are compared with."""

    context: int
    readings: dict[str, list[Reading]] = field(default_factory=lambda: defaultdict(list))

    def ratio(self, side: str, what: str) -> Any:
        """A side's figure over that of the first side."""
        base = next(iter(self.readings.values()))
        ours = self.readings[side]
        return paired_ratio([getattr(one, what) for one in ours], [getattr(one, what) for one in base])

    def summary(self) -> dict[str, Any]:
        """For the record."""
        others = list(self.readings)[1:]
        ratios = {
            side: {what: asdict(self.ratio(side, what)) for what in ("wall", "cpu", "attention", "kv_bytes")}
            for side in others
        }
        readings = {side: [asdict(one) for one in seen] for side, seen in self.readings.items()}
        return {"context": self.context, "readings": readings, "ratios": ratios}


def paper_share(n: int) -> float:
    """take's share of attention's work on a prompt of n tokens, by the paper's appendix B, simplified."""
    both = BUDGET + WARMUP
    return (2 * CHUNK + both) / (2 * n) - CHUNK * both / (2 * n**2)


def make_sides(arguments: argparse.Namespace) -> list[Side]:
    """The engines to compare."""
    longest = max(arguments.contexts) + BLOCK
    layers = arguments.model_layers
    settings: dict[str, Any] = {
        "max_model_len": longest,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 2,
        "kv_cache_memory_bytes": (-(-longest // BLOCK) + 2) * BLOCK * token_bytes(arguments.dtype, layers),
        "dtype": arguments.dtype,
    }
    path = model(longest + (ROOM if arguments.what in WITH_QUESTION else 0), layers)
    if arguments.what == "take":
        return [
            Side(STOCK, path, arguments.threads, **settings),
            Side("take", path, arguments.threads, **settings, **TAKE),
        ]
    if arguments.what in WITH_QUESTION:
        return _with_question(arguments, path, settings)
    eviction = {"kv_eviction": arguments.policy, "kv_budget": arguments.budget}
    steps = {**settings, **eviction, "max_num_batched_tokens": min(arguments.contexts) // 2}
    at_once = {**settings, **eviction, "max_num_batched_tokens": longest}
    return [
        Side(IN_STEPS, path, arguments.threads, **steps),
        Side(IN_ONE_STEP, path, arguments.threads, **at_once),
    ]


def _with_question(arguments: argparse.Namespace, path: Any, settings: dict[str, Any]) -> list[Side]:
    """The same prompt without eviction and with every policy, in engines that are alike."""
    longest = settings["max_model_len"] + ROOM
    room = (
        (-(-longest // BLOCK) + 2 * ROOM // BLOCK)
        * BLOCK
        * token_bytes(arguments.dtype, arguments.model_layers)
    )
    alike = {
        **settings,
        "max_model_len": longest,
        "kv_cache_memory_bytes": room,
        "kv_budget": arguments.budget,
    }
    evictions: dict[str, dict[str, Any]] = {KEPT: {"kv_eviction": "full"}}
    if arguments.what == "repeat":
        evictions[ALL] = {"kv_eviction": "kvzip"}
        evictions[OWN_CHUNK] = {"kv_eviction": "kvzip", "kv_eviction_config": {"kvzip_sees": "chunk"}}
    else:
        evictions |= {policy: {"kv_eviction": policy} for policy in ONLINE}
    return [Side(name, path, arguments.threads, **alike, **eviction) for name, eviction in evictions.items()]


def read_all(arguments: argparse.Namespace, sides: Sequence[Side]) -> list[Cell]:
    """Every prompt is read by every side, in turns."""
    cells = [Cell(context) for context in arguments.contexts]
    question = QUESTION if arguments.what in WITH_QUESTION else 0
    for side in sides:
        side.call(install)
        side.call(read, Workload(1, 512, 2), arguments.dtype, question)
    for number in track(range(arguments.rounds), "rounds"):
        for cell in cells:
            for side in sides if number % 2 == 0 else sides[::-1]:
                workload = Workload(1, cell.context + question, 2, seed=number)
                cell.readings[side.name].append(side.call(read, workload, arguments.dtype, question))
    for cell in cells:
        cell.readings = {side.name: cell.readings[side.name] for side in sides}
    return cells


def targets(arguments: argparse.Namespace, cells: Sequence[Cell]) -> list[Target]:
    """What the longest prompt should reach."""
    cell = cells[-1]
    if arguments.what in WITH_QUESTION:
        usual = cell.context == CONTEXTS[arguments.what][-1] and arguments.model_layers == LAYERS
        name = f"{{}} at {cell.context}: time to the first token over that without eviction"
        sides = list(cell.readings)[1:] if usual else []
        return [
            Target(name.format(side), cell.ratio(side, "wall"), FIRST_TOKEN[side], at_most=True)
            for side in sides
        ]
    bound = HELD[arguments.what]
    if arguments.what == "take" and cell.context == CONTEXTS["take"][-1]:
        held = cell.ratio("take", "kv_bytes")
        found = [Target("take at 32768: most KV held over stock's", held, bound, at_most=True)]
        if (most := ATTENTION.get(kind(arguments.dtype))) is not None:
            name = "take at 32768: time in attention over stock's"
            found.append(Target(name, cell.ratio("take", "attention"), most, at_most=True))
        return found
    usual = (arguments.policy, arguments.budget, arguments.model_layers) == ("ada-snapkv", 0.1, 16)
    if arguments.what == "recycle" and usual and cell.context == CONTEXTS["recycle"][-1]:
        ratio = cell.ratio(IN_ONE_STEP, "kv_bytes")
        name = "read in one step at 8192: most KV held over that in several"
        return [Target(name, ratio, bound, at_most=True)]
    return []


def show(arguments: argparse.Namespace, cells: Sequence[Cell]) -> Table:
    """The results as a table."""
    formula = ["by the formula"] if arguments.what == "take" else []
    columns = [
        "first token s",
        "CPU s",
        "attention s",
        "KV MiB",
        "first token",
        "attention",
        "KV held",
        *formula,
    ]
    title = (
        f"{arguments.model_layers} layers, {arguments.dtype}, {arguments.threads} thread(s), medians [95 %]"
    )
    shown = table(title, ["tokens", "side"], columns)
    for cell in cells:
        for side, seen in cell.readings.items():
            times = (
                f"{estimate([getattr(one, what) for one in seen]).median:.2f}"
                for what in ("wall", "cpu", "attention")
            )
            row = [str(cell.context), side, *times, f"{max(one.kv_bytes for one in seen) / 2**20:.1f}"]
            if side != next(iter(cell.readings)):
                row += [str(cell.ratio(side, what)) for what in ("wall", "attention", "kv_bytes")]
                row += [f"{paper_share(cell.context):.3f}" for _ in formula]
            shown.add_row(*row)
    return shown


def panels(cells: Sequence[Cell]) -> list[Panel]:
    """Time to the first token, time in attention and KV held over the prompt's length."""
    figures = (("wall", "s to the first token", 1.0), ("attention", "s in attention", 1.0))
    found = []
    for what, label, unit in (*figures, ("kv_bytes", "MiB of KV held at most", 2.0**20)):
        lines = {
            side: [
                (cell.context, estimate([getattr(one, what) / unit for one in cell.readings[side]]))
                for cell in cells
            ]
            for side in cells[0].readings
        }
        found.append(Panel("tokens of the prompt", label, lines))
    return found


def measure(arguments: argparse.Namespace) -> Found:
    """Read every prompt."""
    sides = make_sides(arguments)
    with running(*sides):
        cells = read_all(arguments, sides)
    results = {"cells": [cell.summary() for cell in cells]}
    return Found(results, [show(arguments, cells)], targets(arguments, cells), panels(cells))
