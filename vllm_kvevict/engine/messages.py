"""What scheduler and workers tell each other."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.plan import Admission
from vllm_kvevict.schedules.reports import LayerBudgets, LayerWeights, Report


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a rank can do, told once before the first step.

    Attributes:
        rank: global rank.
        capacity: of its pool.
        version: of this package there.
        has_w_o: whether policies can read the output projections of its layers.
    """

    rank: int
    capacity: RankCapacity
    version: str
    has_w_o: bool = True


@dataclass
class StepMessage(KVConnectorMetadata):
    """What the workers must know before a step.

    Attributes:
        admissions: of the requests that it admits.
        layer_budgets: to apply before it, by request id.
        probes: of the rows in the batch that are a request's probe, the name that vLLM knows them by, and the
            request.
        most_pages: in check mode what each global rank may hold at any time of the step, else None.
    """

    admissions: list[Admission] = field(default_factory=list)
    layer_budgets: dict[str, LayerBudgets] = field(default_factory=dict)
    probes: dict[str, str] = field(default_factory=dict)
    most_pages: dict[int, int] | None = None


@dataclass
class RankMessage:
    """One rank's news of one step.

    Attributes:
        reports: by request id, of the evictions in this step.
        weights: by request id, of evictions in this step that wait for the other pipeline stages.
        physical_pages, logical_tokens: what the rank holds at the end of the step.
        holdings: in check mode (epoch, tokens, pages) by request id, else None.
    """

    reports: dict[str, Report]
    weights: dict[str, LayerWeights]
    physical_pages: int
    logical_tokens: int
    holdings: dict[str, tuple[int, int, int]] | None


@dataclass
class WorkerMessages(KVConnectorWorkerMetadata):
    """News of all ranks, keyed by global rank."""

    by_rank: dict[int, RankMessage]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMessages":
        assert isinstance(other, WorkerMessages)
        return WorkerMessages({**self.by_rank, **other.by_rank})
