"""Transport between scheduler and workers, on vLLM's KV-connector channel; no KV moves through it.

Down, with every step: the admissions of requests in it, answers to what ranks claimed of evictions that no pipeline
stage can decide alone, and which prefixes are cached or dropped. Up, from every rank of TP and PP: such claims, reports
of evictions, and in check mode what the rank holds. The connector is also where vLLM asks for metrics.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from vllm_kvevict.engine import metrics
from vllm_kvevict.engine.config import require_options
from vllm_kvevict.engine.errors import other_scheduler
from vllm_kvevict.engine.messages import Handshake, StepMessage, WorkerMessages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_kvevict.engine.scheduler.connector import SchedulerEnd
    from vllm_kvevict.engine.worker.connector import WorkerEnd


class EvictionConnector(KVConnectorBase_V1, SupportsHMA):
    """What vLLM knows of the transport: it makes one in the scheduler and one in each worker.

    Each has its own end, and imports nothing of the other's.
    """

    requires_kv_delivery = False
    worker: "WorkerEnd"
    scheduler: "SchedulerEnd"

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"):
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            from vllm_kvevict.engine.worker.connector import WorkerEnd

            self.worker = WorkerEnd()
        else:
            from vllm_kvevict.engine.scheduler.connector import SchedulerEnd

            self.scheduler = SchedulerEnd(require_options(vllm_config))

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> Handshake:
        return self.worker.handshake()

    def build_connector_worker_meta(self) -> WorkerMessages | None:
        return self.worker.end_step()

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
        from vllm_kvevict.engine.scheduler.ledger import PageLedger

        # vLLM binds its own manager first, then our scheduler binds the ledger.
        if isinstance(kv_cache_manager, PageLedger):
            self.scheduler.ledger = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        if not self.scheduler.is_bound:
            # Not even the configuration says so if a plugin of this process alone has changed it.
            raise other_scheduler(self._vllm_config.scheduler_config.get_scheduler_cls())
        self.scheduler.on_handshakes([shake for shake in metadata.values() if isinstance(shake, Handshake)])

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMessage:
        return self.scheduler.next_message(scheduler_output.num_scheduled_tokens)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        messages = connector_output.kv_connector_worker_meta
        if isinstance(messages, WorkerMessages):
            self.scheduler.on_messages(messages)

    def get_kv_connector_stats(self) -> metrics.EvictionStats | None:
        # vLLM asks on both sides; only the scheduler has seen every rank's reports.
        return self.scheduler.take_statistics() if self.role == KVConnectorRole.SCHEDULER else None

    def has_pending_block_frees(self) -> bool:
        return self.scheduler.ledger.awaits_reports

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # None makes vLLM look again in the next step, and go on with other requests.
        ledger = self.scheduler.ledger
        waits = (
            not ledger.adapters.has_slot(request)
            or ledger.shared.is_awaited(request)
            or ledger.gate.turn_away(request)
        )
        return (None if waits else 0), False

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
