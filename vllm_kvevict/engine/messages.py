"""What scheduler and workers tell each other."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_kvevict.engine.config import Plan
from vllm_kvevict.engine.peaks import RankCapacity


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


@dataclass(frozen=True)
class LayerWeights:
    """What a pipeline stage says of its layers when no stage can decide alone.

    Attributes:
        epoch: admission they belong to.
        first_layer: the stage's first layer in the model.
        weights: of its layers, in order.
    """

    epoch: int
    first_layer: int
    weights: Sequence[float]


@dataclass(frozen=True)
class LayerBudgets:
    """What the scheduler decided from the weights of all stages.

    Attributes:
        epoch: admission they belong to.
        budgets: for every layer of the model the candidates that each KV head keeps, on average.
    """

    epoch: int
    budgets: Sequence[int]


@dataclass
class StepPlans(KVConnectorMetadata):
    """What the workers must know before a step.

    Attributes:
        plans: of the requests that it admits.
        layer_budgets: to apply before it, by request id.
        probes: of the rows in the batch that are a request's probe, the name that vLLM knows them by, and the
            request.
        most_pages: in check mode what each global rank may hold at any time of the step, else None.
    """

    plans: list[Plan] = field(default_factory=list)
    layer_budgets: dict[str, LayerBudgets] = field(default_factory=dict)
    probes: dict[str, str] = field(default_factory=dict)
    most_pages: dict[int, int] | None = None


@dataclass(frozen=True)
class Report:
    """What a rank says of one request after its eviction.

    Attributes:
        policy: name of the policy that chose.
        epoch: admission the report belongs to; the ledger drops a report of an older one.
        tokens: the request's token count when it was evicted.
        last: whether it is the request's last eviction.
        pages: pages held on the rank afterwards.
        freed_pages: pages returned to the pool, by earlier evictions too.
        peak_pages: the most pages that the request held on the rank until then.
        residues: [page_size], rows by kv_len modulo page_size.
        first_layer: the rank's first layer in the model.
        first_head: the rank's first KV head in the model.
        kept: [layers][KV heads] of the rank, entries kept of ``tokens`` stored.
        decision_seconds, compaction_seconds: spent on choosing and on moving, in earlier evictions too.
    """

    policy: str
    epoch: int
    tokens: int
    last: bool
    pages: int
    freed_pages: int
    peak_pages: int
    residues: Sequence[int]
    first_layer: int
    first_head: int
    kept: Sequence[Sequence[int]]
    decision_seconds: float
    compaction_seconds: float


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
