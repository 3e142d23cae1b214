"""What scheduler and workers tell each other."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_kvevict.schedules.base import RankCapacity
from vllm_kvevict.schedules.plan import Admission
from vllm_kvevict.schedules.reports import ArbiterAnswer, Claim, ExtraTokens, Report


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a rank can do, told once before the first step.

    Attributes:
        rank: global rank.
        capacity: of its pool.
        version: of this package there.
        has_w_o: whether policies can read the output projections of its layers.
        has_rotary: whether they can undo their rotary embedding.
        ring_parts: answers whose queries it can keep at once.
    """

    rank: int
    capacity: RankCapacity
    version: str
    has_w_o: bool = True
    has_rotary: bool = True
    ring_parts: int = 0


@dataclass(frozen=True)
class StorePrefix:
    """A compressed prefix to be cached.

    Attributes:
        number: what it is called.
        fills: number of the prefix before it, whose partial pages it is to fill; None if it has its own.
    """

    number: int
    fills: int | None = None


@dataclass
class StepMessage(KVConnectorMetadata):
    """What the workers must know before a step.

    Attributes:
        admissions: of the requests that it admits.
        answers: to claims of earlier steps, by request id.
        stores: the prefixes to be cached once their eviction is done, by the id of the request that the step evicts.
        freezes: number and columns of the segments that are made of a request's pages, by its id: once the step has
            taken its pages, or before it ends if it has finished.
        leaves: number of the tail that a request leaves which has ended, and the tokens of its prompt and answer up to
            that one's last, by its id.
        cuts: tokens that tails lose at their end before it, by number.
        new_blocks, lost_blocks: of vLLM's blocks, those that become pages before it, and those that stop to be.
        drops: numbers of the compressed prefixes, tails and segments that are dropped before it.
        extra: tokens that it computes besides, None for none.
        most_pages: in check mode what each global rank may hold at any time of the step, else None.
    """

    admissions: list[Admission] = field(default_factory=list)
    answers: dict[str, ArbiterAnswer] = field(default_factory=dict)
    stores: dict[str, StorePrefix] = field(default_factory=dict)
    freezes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    leaves: dict[str, tuple[int, int]] = field(default_factory=dict)
    cuts: dict[int, int] = field(default_factory=dict)
    drops: list[int] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)
    lost_blocks: list[int] = field(default_factory=list)
    extra: ExtraTokens | None = None
    most_pages: dict[int, int] | None = None


@dataclass(frozen=True)
class Holdings:
    """All that a rank holds at the end of a step, told in check mode.

    Attributes:
        requests: (epoch, tokens, pages) by request id; what it borrows is among its pages.
        prefixes: pages of compressed prefixes, tails and segments by number.
    """

    requests: dict[str, tuple[int, int, int]]
    prefixes: dict[int, int] = field(default_factory=dict)


@dataclass
class RankMessage:
    """One rank's news of one step.

    Attributes:
        reports: by request id, of the evictions in this step, in their order.
        claims: by request id, of evictions that no pipeline stage can decide alone.
        physical_pages, cached_pages, uncompressed_pages: held on the rank at the end of the step, in all, by
            compressed prefixes, and by segments and tails.
        logical_tokens: entries that requests have stored on the rank, each those of its prefix too.
        holdings: in check mode, else None.
    """

    reports: dict[str, list[Report]]
    claims: dict[str, Claim]
    physical_pages: int
    cached_pages: int
    uncompressed_pages: int
    logical_tokens: int
    holdings: Holdings | None


@dataclass
class WorkerMessages(KVConnectorWorkerMetadata):
    """News of all ranks, keyed by global rank."""

    by_rank: dict[int, RankMessage]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMessages":
        assert isinstance(other, WorkerMessages)
        return WorkerMessages({**self.by_rank, **other.by_rank})
