"""What ranks say of an eviction, and what they are told where no rank can decide alone."""

from collections.abc import Sequence
from dataclasses import dataclass


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
