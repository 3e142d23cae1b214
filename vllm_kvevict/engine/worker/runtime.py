"""State of one worker process: its rank, the requests there, and the running step.

It owns the requests that hold pages; steps open and close them.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_kvevict.engine import process
from vllm_kvevict.engine.config import require_options
from vllm_kvevict.engine.devices import this_device
from vllm_kvevict.engine.memory import head_dims
from vllm_kvevict.engine.messages import RankMessage, StepMessage
from vllm_kvevict.engine.worker.attach import Rank, attach
from vllm_kvevict.engine.worker.batch import Batch, Served
from vllm_kvevict.engine.worker.model_runners import BatchOrder
from vllm_kvevict.engine.worker.reserve import allocate, allocate_ring
from vllm_kvevict.engine.worker.step import StepState, WorkerStep, replayable
from vllm_kvevict.schedules.eviction import ResidentRequest
from vllm_kvevict.schedules.inputs import LayerStep
from vllm_kvevict.schedules.ring import QueryRing

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger("vllm.kv_eviction")


class Runtime:
    """One per worker process; see :func:`get_runtime`."""

    def __init__(self, worker: Any):
        self.vllm_config: VllmConfig = worker.vllm_config
        self.options = require_options(self.vllm_config)
        self.runner = worker.model_runner
        self._order = BatchOrder(self.runner)
        self.residents: dict[str, ResidentRequest] = {}
        self.reserve: Tensor | None = None
        self.ring: QueryRing | None = None
        self.evicted_layers: list[str] = []
        """Names of the worker's evicted layers, from the lowest on; known before :attr:`kv_cache_config`."""
        self.kv_cache_config: Any = None
        """vLLM's layout of the KV memory, known before :meth:`attach`."""
        self._rank: Rank | None = None
        self._step: WorkerStep | None = None
        self._serves = False
        """Whether what vLLM runs now is that step."""
        device = this_device()
        assert device is not None
        self.device = device

    def take_reserve(self) -> None:
        """Take what requests of some policies hold beside their KV, before the KV cache takes what memory is left."""
        policies, model = self.options.reserved_for, self.vllm_config.model_config
        if policies:
            size = self.options.reserve_size(model.max_model_len, head_dims(self.vllm_config))
            self.reserve = allocate(self.vllm_config, size, self.runner.device)
            logger.info(
                "KV eviction: %.1f MiB are reserved for sums that %s needs while prompts are read",
                self.reserve.nbytes / 2**20,
                ", ".join(policies),
            )

        self.ring = allocate_ring(self.vllm_config, self.options, self.runner.device)
        if self.ring is not None:
            logger.info(
                "KV eviction: %.1f MiB are reserved for the last queries of %d requests at once",
                self.ring.memory.nbytes / 2**20,
                self.ring.num_parts,
            )

    def attach(self, kv_caches: dict[str, Tensor]) -> None:
        """Take over vLLM's KV memory: its views by layer name. Raises as of :func:`attach`."""
        context = self.vllm_config.compilation_config.static_forward_context
        self._rank = attach(
            self.vllm_config,
            self.options,
            self.device,
            self.runner.model,
            {name: context[name] for name in self.evicted_layers},
            self.kv_cache_config,
            kv_caches,
            self.reserve,
            self.ring,
        )

    @property
    def is_attached(self) -> bool:
        """Whether the KV memory is there."""
        return self._rank is not None

    @property
    def rank(self) -> Rank:
        """What this worker has of the model's KV."""
        assert self._rank is not None, "the KV memory is not there yet"
        return self._rank

    # A step, from the scheduler's message to the report.

    @torch.inference_mode()  # as vLLM's runner, which made the tables' tensors
    def begin_step(self, scheduler_output: "SchedulerOutput") -> None:
        """As of :meth:`WorkerStep.begin`."""
        # vLLM warms up with steps that no scheduler made, of requests that have no plan.
        message = scheduler_output.kv_connector_metadata
        self._serves = message is not None
        message = StepMessage() if message is None else message
        assert isinstance(message, StepMessage)
        self._step = WorkerStep(self.rank, self.residents, message, scheduler_output.num_scheduled_tokens)
        self._step.begin(scheduler_output)

    def reads_prompts(self) -> bool:
        """As of :meth:`WorkerStep.reads_prompts`."""
        return self._serves and self._step is not None and self._step.reads_prompts()

    def build(self, common: Any) -> StepState:
        """As of :meth:`WorkerStep.build`, or a dummy.

        Args:
            common: vLLM's CommonAttentionMetadata.
        """
        # Batch rows of dummy runs have indices that belong to no request, or to another one.
        if not self._serves or self._step is None:
            return self.build_dummy(common)
        return self._step.build(common, self._order.request_ids(common.num_reqs))

    def build_dummy(self, common: Any) -> StepState:
        """A step that touches no page; decodes alone are made of padding, so that a CUDA graph can capture them."""
        batch, rank = None, self._rank
        if rank and rank.pages.uses_triton and rank.decode_attention and common.max_query_len == 1:
            none = Served(rank.decode_slots[:0], None)
            batch = replayable(rank, Batch(common.num_actual_tokens, None, [], none), common.num_reqs)
            return StepState(batch, ring=rank.ring_step(batch, (), common.num_reqs))
        return StepState(batch)

    def after_attention(self, state: StepState, step: LayerStep) -> None:
        """Evict, or prepare to, once a layer has attended."""
        for eviction, rows in state.evictions:
            eviction.after_attention(step, rows)

    def leave_step(self) -> None:
        """The step's kernels are on their way; what vLLM runs from now on serves no request."""
        self._serves = False

    @torch.inference_mode()
    def end_step(self, number: int) -> RankMessage | None:
        """What this rank, by its global number, tells the scheduler after a step."""
        if not self.is_attached or self._step is None:
            return None
        return self._step.end(number, self.options.check)


_runtime: Runtime | None = None


def start_runtime(worker: Any) -> Runtime:
    """Make this worker process's runtime."""
    global _runtime
    _runtime = Runtime(worker)
    process.begin(worker)
    return _runtime


def stop_runtime(worker: Any) -> None:
    """Let go of the pool when its worker ends; its process may live on."""
    global _runtime
    if process.end(worker):
        _runtime = None


def get_runtime() -> Runtime:
    """The runtime of this worker process; vLLM builds attention layers and connectors without passing it."""
    assert _runtime is not None, "the KV eviction worker has not started"
    return _runtime
