"""vLLM's real scheduler with our ledger, against workers that keep lengths instead of keys and values.

The workers do what the runtime does with a step: free, open, grow, evict, report. They count pages from their own
lengths and know nothing of the ledger, so that every disagreement shows.
"""

import copy
import functools
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.models import make_model
from vllm_kvevict.engine.config import KEY, Options, Plan
from vllm_kvevict.engine.ledger import PageLedger
from vllm_kvevict.engine.messages import (
    Handshake,
    LayerWeights,
    RankCapacity,
    RankMessage,
    Report,
    WorkerMessages,
)
from vllm_kvevict.engine.scheduler import AsyncEvictionScheduler, EvictionScheduler

PAGE = 32
TOKEN = 7
"""What every sampled token is."""

Shape = tuple[int, int]
"""Layers and KV heads of a rank."""


@dataclass(frozen=True)
class Setup:
    """A server: its pools, its scheduler's limits, its eviction options.

    Attributes:
        shapes: (layers, KV heads) of each rank.
        pages: of each rank's pool.
        depth: steps in flight; above 1 as under pipeline parallelism or asynchronous scheduling.
        pipeline: whether each rank is a stage with layers of its own; else all hold the same layers.
        options: of ``additional_config["kv_eviction"]``; None builds vLLM's own scheduler, with as many blocks of
            ``PAGE`` tokens as the first rank's pool has pages for all its rows.
    """

    shapes: Sequence[Shape]
    pages: Sequence[int]
    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    depth: int = 1
    pipeline: bool = False
    asynchronous: bool = False
    priority: bool = False
    options: Mapping[str, Any] | None = field(default_factory=lambda: {"policy": "ada-snapkv", "budget": 0.2})


@functools.cache
def _base_config(evicts: bool) -> VllmConfig:
    """A configuration of a tiny model, from which each scheduler takes a changed copy."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder, layers=1, max_len=1 << 16)
        settings: dict[str, Any] = {"enable_prefix_caching": False}
        if evicts:
            settings = {"additional_config": {KEY: {"policy": "ada-snapkv"}}}
        args = EngineArgs(str(model), skip_tokenizer_init=True, dtype="float32", **settings)
        return args.create_engine_config()


def make_scheduler(setup: Setup) -> Scheduler:
    """Build the scheduler as the engine core does, and introduce the ranks to it."""
    config = copy.copy(_base_config(setup.options is not None))
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.model_config = copy.copy(config.model_config)
    config.cache_config = copy.copy(config.cache_config)
    config.scheduler_config.max_num_batched_tokens = setup.max_num_batched_tokens
    config.scheduler_config.max_num_scheduled_tokens = setup.max_num_batched_tokens
    config.scheduler_config.max_num_seqs = setup.max_num_seqs
    config.scheduler_config.policy = "priority" if setup.priority else "fcfs"
    config.scheduler_config.async_scheduling = setup.asynchronous
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.pipeline_parallel_size = len(setup.shapes) if setup.pipeline else 1
    config.model_config.max_model_len = setup.max_model_len
    layers, heads = setup.shapes[0]
    # The block that vLLM's manager always keeps aside comes on top.
    blocks = setup.pages[0] // (layers * heads) + 1
    config.cache_config.block_size = PAGE
    config.cache_config.num_gpu_blocks = blocks
    if setup.options is None:
        kind: type[Scheduler] = AsyncScheduler if setup.asynchronous else Scheduler
    else:
        config.additional_config = {KEY: {"page_size": PAGE, **setup.options}}
        kind = AsyncEvictionScheduler if setup.asynchronous else EvictionScheduler
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=heads, head_size=32, dtype=torch.float32)
    names = [f"layers.{index}" for index in range(layers)]
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(names, spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=PAGE,
        hash_block_size=PAGE,
    )
    if setup.options is not None:
        assert scheduler.connector is not None
        scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {
                (rank, 0): Handshake(rank, RankCapacity(pages, layers * heads))
                for rank, ((layers, heads), pages) in enumerate(zip(setup.shapes, setup.pages, strict=True))
            }
        )
    return scheduler


def make_request(
    name: str,
    prompt: int,
    max_tokens: int,
    extra_args: dict[str, Any] | None = None,
    priority: int = 0,
    arrival: float = 0.0,
) -> Request:
    """A request of ``prompt`` tokens that ends after exactly ``max_tokens`` outputs."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args)
    return Request(name, [TOKEN] * prompt, params, None, arrival_time=arrival, priority=priority)


@dataclass
class Resident:
    """A request on the workers: its admission, the length of each of its rows by rank, whether it waits for budgets."""

    plan: Plan
    kv_len: list[np.ndarray]
    tokens: int = 0
    evictions: int = 0
    waits: bool = False


class Workers:
    """All ranks; they see the steps in the same order.

    Attributes:
        evictions: (request id, epoch, token count) of every eviction so far.
        peak_pages: most pages ever held on each rank.
        tamper: changes a report before it is sent.
    """

    def __init__(self, setup: Setup, seed: int = 0):
        self.setup = setup
        self.random = np.random.default_rng(seed)
        self.live: dict[str, Resident] = {}
        self.evictions: list[tuple[str, int, int]] = []
        self.peak_pages = [0] * len(setup.shapes)
        self.tamper: Callable[[Report], Report] = lambda report: report

    def pages(self, kv_len: np.ndarray) -> int:
        """Pages of rows of these lengths."""
        return int((-(-kv_len // PAGE)).sum())

    def held(self, rank: int) -> int:
        """Pages held on a rank."""
        return sum(self.pages(resident.kv_len[rank]) for resident in self.live.values())

    def execute(self, output: SchedulerOutput) -> WorkerMessages:
        """Carry out a step.

        Returns:
            What every rank reports of it.
        """
        plans = output.kv_connector_metadata.plans
        for name in [*output.finished_req_ids, *(output.preempted_req_ids or ())]:
            self.live.pop(name, None)
        trimmed: list[Resident] = []
        for name, decided in output.kv_connector_metadata.layer_budgets.items():
            resident = self.live.get(name)
            if resident is not None and resident.plan.epoch == decided.epoch:
                assert resident.waits
                resident.waits = False
                trimmed.append(resident)
        reports = [
            self._trim(resident, output.kv_connector_metadata.layer_budgets[resident.plan.request_id].budgets)
            for resident in trimmed
        ]
        for plan in plans:
            assert plan.request_id not in self.live, f"{plan.request_id} was admitted while it was running"
            rows = [np.zeros(shape, dtype=np.int64) for shape in self.setup.shapes]
            self.live[plan.request_id] = Resident(plan, rows)
        leaving: list[Resident] = []
        for name, count in output.num_scheduled_tokens.items():
            resident = self.live[name]
            assert not resident.waits, f"{name} goes on before its layer budgets are known"
            before, resident.tokens = resident.tokens, resident.tokens + count
            for rows in resident.kv_len:
                rows += count
            evict_at = resident.plan.evict_at
            if evict_at is None:
                continue
            assert not before < evict_at < resident.tokens, f"a chunk of {name} crosses its eviction position"
            if resident.tokens == evict_at:
                leaving.append(resident)
        # The step's pages are all taken before anything is freed by its evictions.
        for rank, pages in enumerate(self.setup.pages):
            held = self.held(rank)
            assert held <= pages, f"rank {rank} would hold {held} of {pages} pages"
            self.peak_pages[rank] = max(self.peak_pages[rank], held)
        waiting = [r for r in leaving if self.setup.pipeline and not r.plan.config.layer_local]
        for resident in waiting:
            resident.waits = True
        leaving = [resident for resident in leaving if not resident.waits]
        reports += [self._evict(resident) for resident in leaving]
        return WorkerMessages(
            {
                rank: RankMessage(
                    {
                        resident.plan.request_id: self.tamper(by_rank[rank])
                        for resident, by_rank in zip(trimmed + leaving, reports, strict=True)
                    },
                    {resident.plan.request_id: self._weights(resident, rank) for resident in waiting},
                    physical_pages=self.held(rank),
                    logical_tokens=sum(int(r.kv_len[rank].sum()) for r in self.live.values()),
                    holdings={
                        name: (r.plan.epoch, r.tokens, self.pages(r.kv_len[rank]))
                        for name, r in self.live.items()
                    },
                )
                for rank in range(len(self.setup.shapes))
            }
        )

    def _weights(self, resident: Resident, rank: int) -> LayerWeights:
        """What a stage says of its layers."""
        first = sum(layers for layers, _ in self.setup.shapes[:rank])
        weights = self.random.gamma(1.0, size=self.setup.shapes[rank][0])
        return LayerWeights(resident.plan.epoch, first, weights.tolist())

    def _evict(self, resident: Resident) -> list[Report]:
        """Keep ragged counts whose total over all rows of all ranks is the policy's."""
        plan = resident.plan
        assert plan.evict_at is not None
        sizes = [layers * heads for layers, heads in self.setup.shapes]
        total = sum(sizes) * plan.config.budget_for(plan.evict_at)
        kept = split(total, sum(sizes), plan.evict_at, self.random)
        return self._keep(resident, np.split(kept, np.cumsum(sizes)[:-1]))

    def _trim(self, resident: Resident, budgets: Sequence[int]) -> list[Report]:
        """Keep ragged counts whose total in each layer is what the scheduler decided for it."""
        plan = resident.plan
        assert plan.evict_at is not None
        window = plan.config.window_for(plan.evict_at)
        past = plan.config.budget_for(plan.evict_at) - window
        assert sum(budgets) == sum(layers for layers, _ in self.setup.shapes) * past
        parts, first = [], 0
        for layers, heads in self.setup.shapes:
            totals = [heads * (window + b) for b in budgets[first : first + layers]]
            parts.append(np.concatenate([split(t, heads, plan.evict_at, self.random) for t in totals]))
            first += layers
        return self._keep(resident, parts)

    def _keep(self, resident: Resident, parts: Sequence[np.ndarray]) -> list[Report]:
        """Shorten the rows of each rank to these lengths and report it."""
        plan = resident.plan
        assert plan.evict_at is not None and resident.evictions == 0
        resident.evictions += 1
        self.evictions.append((plan.request_id, plan.epoch, plan.evict_at))
        reports = []
        for rank, part in enumerate(parts):
            rows = resident.kv_len[rank]
            before = self.pages(rows)
            rows[:] = part.reshape(rows.shape)
            pages = self.pages(rows)
            reports.append(
                Report(
                    policy=plan.config.label,
                    epoch=plan.epoch,
                    tokens=plan.evict_at,
                    pages=pages,
                    freed_pages=before - pages,
                    residues=np.bincount(rows.ravel() % PAGE, minlength=PAGE).tolist(),
                    first_layer=0,
                    first_head=0,
                    kept=rows.tolist(),
                    decision_seconds=0.0,
                    compaction_seconds=0.0,
                )
            )
        return reports


def split(total: int, rows: int, longest: int, random: np.random.Generator) -> np.ndarray:
    """Share ``total`` out among rows at random, anything between even and very uneven.

    Returns:
        [rows] int64 that sum to ``total``, each at most ``longest``.
    """
    weights = random.gamma(random.choice([0.1, 1.0, 100.0]), size=rows) + 1e-9
    if random.random() < 0.3:
        weights = np.sort(weights)  # whole ranks get less than others
    counts = np.minimum((weights / weights.sum() * total).astype(np.int64), longest)
    while (missing := total - int(counts.sum())) > 0:
        room = np.flatnonzero(counts < longest)
        extra = np.minimum(longest - counts[room], max(1, missing // len(room)))
        counts[room] += extra * (np.cumsum(extra) <= missing)
    return counts


class Simulation:
    """A scheduler and its workers, stepped as the engine core steps them.

    Attributes:
        outputs: tokens delivered by request id.
        prefilled: tokens computed for prompts and replays so far.
        most_running: most requests ever running at once.
        preemptions: so far, by request id.
    """

    def __init__(self, setup: Setup, seed: int = 0):
        self.setup = setup
        self.scheduler = make_scheduler(setup)
        self.workers = Workers(setup, seed) if setup.options is not None else None
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.outputs: dict[str, int] = {}
        self.preemptions: dict[str, int] = {}
        self.prefilled = 0
        self.most_running = 0
        self.steps = 0

    @property
    def ledger(self) -> PageLedger:
        manager = self.scheduler.kv_cache_manager
        assert isinstance(manager, PageLedger)
        return manager

    def add(self, request: Request) -> None:
        self.outputs[request.request_id] = 0
        self.preemptions[request.request_id] = 0
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """Dispatch one step; take the oldest one's output once ``depth`` are in flight or nothing can be scheduled."""
        self.steps += 1
        output = self.scheduler.schedule()
        for name in output.preempted_req_ids or ():
            self.preemptions[name] += 1
        self.most_running = max(self.most_running, len(self.scheduler.running))
        # Under priorities a step may do nothing but preempt, and one may only carry budgets; then the next must go on.
        sends = output.preempted_req_ids or getattr(output.kv_connector_metadata, "layer_budgets", None)
        if not (output.total_num_scheduled_tokens or sends or self.in_flight):
            unfinished = self.scheduler.get_num_unfinished_requests()
            assert not unfinished, f"hang: nothing is scheduled or in flight, {unfinished} requests wait"
        self.in_flight.append((output, self._execute(output)))
        if len(self.in_flight) >= self.setup.depth or not output.total_num_scheduled_tokens:
            self.deliver()
        return output

    def deliver(self) -> None:
        """Hand the scheduler the output of the oldest step in flight."""
        output, result = self.in_flight.popleft()
        for engine_outputs in self.scheduler.update_from_output(output, result).values():
            for delivered in engine_outputs.outputs:
                self.outputs[delivered.request_id] += len(delivered.new_token_ids)

    def run(self, max_steps: int) -> None:
        """Step until every request is finished and every output delivered."""
        limit = self.steps + max_steps
        while self.scheduler.has_requests():
            assert self.steps < limit, f"{self.scheduler.get_num_unfinished_requests()} requests unfinished"
            self.step()
        while self.in_flight:
            self.deliver()

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            sampled.append([] if request.is_prefill_chunk else [TOKEN])
            if request.is_prefill_chunk or output.num_scheduled_tokens[name] > 1:
                self.prefilled += output.num_scheduled_tokens[name]
        message = None
        if self.workers is not None:
            message = KVConnectorOutput(kv_connector_worker_meta=self.workers.execute(output))
        return ModelRunnerOutput(
            names, {name: index for index, name in enumerate(names)}, sampled, kv_connector_output=message
        )


def options_of(setup: Setup) -> Options:
    """The server's options as the scheduler reads them."""
    return Options.parse({"page_size": PAGE, **(setup.options or {})})
