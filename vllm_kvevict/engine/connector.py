"""Transport between scheduler and workers, on vLLM's KV-connector channel; no KV moves through it.

Down, with every step: the plans of the requests admitted in it, and layer budgets decided from the weights of all
pipeline stages. Up, from every rank of TP and PP: such weights, reports of evictions, and in check mode what the rank
holds. The connector is also where vLLM asks for metrics.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_world_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger

from vllm_kvevict import __version__
from vllm_kvevict.engine import metrics
from vllm_kvevict.engine.config import KEY, KVEvictionError, Options
from vllm_kvevict.engine.ledger import PageLedger
from vllm_kvevict.engine.messages import (
    Handshake,
    LayerWeights,
    Report,
    StepPlans,
    WorkerMessages,
)
from vllm_kvevict.engine.peaks import RankCapacity
from vllm_kvevict.engine.runtime import get_runtime, mark_started

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kv_eviction")


class EvictionConnector(KVConnectorBase_V1, SupportsHMA):
    """Both ends of the transport: vLLM makes one in the scheduler and one in each worker."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"):
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = Options.parse(vllm_config.additional_config[KEY])
        self.ledger: PageLedger
        self.statistics = metrics.EvictionStats()
        self.incomplete: dict[tuple[str, int], list[Report]] = {}

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.rank = get_world_group().rank_in_group
        get_runtime().attach(kv_caches)

    def get_handshake_metadata(self) -> Handshake:
        runtime = get_runtime()
        cache = runtime.cache
        capacity = RankCapacity(
            cache.pool.num_pages,
            runtime.evictor.first_layer,
            cache.num_layers,
            cache.num_kv_heads,
            runtime.evictor.num_model_layers,
            runtime.vllm_config.model_config.get_total_num_kv_heads(),
        )
        return Handshake(self.rank, capacity, __version__, runtime.projections.available)

    def build_connector_worker_meta(self) -> WorkerMessages | None:
        message = get_runtime().end_step(self.rank)
        return None if message is None else WorkerMessages({self.rank: message})

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """No KV is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No KV is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """No KV is saved."""

    def wait_for_save(self) -> None:
        """No KV is saved."""

    # Scheduler side.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        # vLLM binds its own manager first, then our scheduler binds the ledger.
        if isinstance(kv_cache_manager, PageLedger):
            self.ledger = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        shakes = [shake for shake in metadata.values() if isinstance(shake, Handshake)]
        for shake in shakes:
            if shake.version != __version__:
                raise KVEvictionError(
                    f"rank {shake.rank} has vllm-kvevict {shake.version}, the scheduler {__version__}: "
                    "--kv-eviction needs the same version on every machine"
                )
        self.ledger.set_capacity({shake.rank: shake.capacity for shake in shakes})
        self.ledger.has_w_o = all(shake.has_w_o for shake in shakes)
        logger.info(self._start_up_line())
        mark_started()

    def _start_up_line(self) -> str:
        options, ledger = self.options, self.ledger
        length = ledger.max_model_len
        config, _ = options.request_config(None)
        kept = config.budget_for(length) if length >= options.min_prompt and config.evicts(length) else length
        at_once = min(room.pages // (room.rows * -(-kept // options.page_size)) for room in ledger.capacity)
        pages = ", ".join(
            f"rank {r}: {room.pages}" for r, room in zip(ledger.ranks, ledger.capacity, strict=True)
        )
        budget = "" if options.policy == "full" else f", budget {options.budget:g}"
        budget += " of what comes before the question" if options.scope == "prefix" else ""
        return (
            f"KV eviction: policy {options.policy}{budget}, page size {options.page_size} tokens, pages per rank "
            f"({pages}), about {at_once} requests of {length:,} tokens at once after eviction"
        )

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepPlans:
        plans, self.ledger.admitted = self.ledger.admitted, []
        budgets, self.ledger.layer_budgets = self.ledger.layer_budgets, {}
        most_pages = (
            dict(zip(self.ledger.ranks, self.ledger.used, strict=True)) if self.options.check else None
        )
        return StepPlans(plans, budgets, most_pages=most_pages)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        messages = connector_output.kv_connector_worker_meta
        if not isinstance(messages, WorkerMessages):
            return
        self._share(messages)
        for rank, message in messages.by_rank.items():
            for request_id, report in message.reports.items():
                self.ledger.on_report(rank, request_id, report)
                if report.last:
                    self._count(request_id, report)
            if message.holdings is not None:
                self.ledger.verify(rank, message.holdings)
            self.statistics.on_gauges(rank, message.physical_pages, message.logical_tokens)

    def _share(self, messages: WorkerMessages) -> None:
        """Join the weights of all stages, which report a request's in the same step."""
        stages: dict[str, dict[int, LayerWeights]] = {}
        for message in messages.by_rank.values():
            for request_id, weights in message.weights.items():
                stages.setdefault(request_id, {})[weights.first_layer] = weights
        for request_id, by_layer in stages.items():
            parts = [by_layer[first] for first in sorted(by_layer)]
            joined = [weight for part in parts for weight in part.weights]
            self.ledger.on_weights(request_id, LayerWeights(parts[0].epoch, 0, joined))

    def _count(self, request_id: str, report: Report) -> None:
        # Not the ledger's business: a request may have finished with the very step that evicted it.
        reports = self.incomplete.setdefault((request_id, report.epoch), [])
        reports.append(report)
        if len(reports) == len(self.ledger.ranks):
            self.statistics.on_eviction(request_id, reports)
            del self.incomplete[request_id, report.epoch]

    def get_kv_connector_stats(self) -> metrics.EvictionStats | None:
        # vLLM asks on both sides; only the scheduler has seen every rank's reports.
        if self.role != KVConnectorRole.SCHEDULER or self.statistics.is_empty():
            return None
        statistics, self.statistics = self.statistics, metrics.EvictionStats()
        return statistics

    def has_pending_block_frees(self) -> bool:
        return self.ledger.awaits_reports

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Nothing is loaded from elsewhere."""

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> metrics.EvictionStats:
        return metrics.EvictionStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> metrics.EvictionPromMetrics:
        return metrics.EvictionPromMetrics(*args)
