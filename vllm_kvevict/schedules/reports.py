"""What ranks say of an eviction, and what they are told: extra tokens, and what none can decide alone. Owns nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvevict.policies.cuts import CutQuery, Tally


@dataclass(frozen=True)
class ExtraTokens:
    """Tokens that a step computes for a request beside those that it reads, only to choose by them.

    Attributes:
        name: by which vLLM knows them in the step's batch.
        request_id: of the request.
        start, stop: the tokens of the prompt that they are, or that the model repeats with them.
    """

    name: str
    request_id: str
    start: int
    stop: int


@dataclass(frozen=True)
class LayerWeights:
    """What the layers of a pipeline stage are worth, from its first layer in the model on."""

    first_layer: int
    weights: Sequence[float]


Claimed = LayerWeights | Tally
"""What a rank says of an eviction that no rank can decide alone: what its layers are worth, or how its candidates
answer the last question. The tally is empty on ranks whose KV heads are another rank's too."""
Answered = Sequence[int] | CutQuery | int
"""What the scheduler says to that: for every layer of the model the candidates that each KV head keeps, on average; or
the next question; or the order key from which on candidates stay."""


@dataclass(frozen=True)
class Claim:
    """What a rank says, in one admission of a request."""

    epoch: int
    said: Claimed


@dataclass(frozen=True)
class ArbiterAnswer:
    """What the scheduler says to the claims of all ranks, in the same admission."""

    epoch: int
    said: Answered


@dataclass(frozen=True)
class PartOfEviction:
    """What one rank did in a complete eviction of a request.

    Attributes:
        policy: label of the policy that chose.
        freed_pages: pages returned to the pool.
        peak_pages: the most pages that the request held on the rank until then.
        first_layer: the rank's first layer in the model.
        first_head: the rank's first KV head in the model.
        kept: [layers][KV heads] of the rank, entries kept.
        decision_seconds, compaction_seconds: spent on choosing and on moving.
        stored: as kept, before the eviction; None where these were all tokens of each row.
        pinned: as kept, the entries that it could not drop since they are not of its phase; None where there are none.
        phase: as of :class:`EvictionRecord`.
    """

    policy: str
    freed_pages: int
    peak_pages: int
    first_layer: int
    first_head: int
    kept: Sequence[Sequence[int]]
    decision_seconds: float
    compaction_seconds: float
    stored: Sequence[Sequence[int]] | None = None
    pinned: Sequence[Sequence[int]] | None = None
    phase: str = "prefill"


@dataclass(frozen=True)
class Report:
    """What a rank holds of a request after a position of its plan.

    Attributes:
        epoch: admission the report belongs to; the ledger drops a report of an older one.
        tokens: the position.
        pages: pages held on the rank.
        residues: [page_size], rows by kv_len modulo page_size.
        part: what the rank did, if an eviction is complete with that.
        filled: pages of the prefix before it that this one fills, where what it keeps is cached behind that.
    """

    epoch: int
    tokens: int
    pages: int
    residues: Sequence[int]
    part: PartOfEviction | None
    filled: int = 0


@dataclass(frozen=True)
class EvictionRecord:
    """One request's eviction, over all ranks; its fields are those of a line of ``eviction_log``.

    Attributes:
        request: id of the request in the engine, which begins with the one that the client was told.
        tokens: the request's token count when it was evicted.
        policy: label of the policy that chose.
        kept, stored: KV entries after and before, over all layers and KV heads.
        pinned: of those the entries of earlier parts of the prompt; of the answer, where that had begun; or of the
            prompt, where its answer was evicted.
        freed_pages: pages returned to the pools.
        held_pages: the most pages that the request held until then.
        heads: [layers][KV heads] of the model, entries kept.
        decision_seconds, compaction_seconds: spent on choosing and on moving, on the slowest rank.
        phase: "prefill" for a prompt's, "lookahead" if its answer had begun, "decode" for one of its answer.
    """

    request: str
    tokens: int
    policy: str
    kept: int
    stored: int
    freed_pages: int
    held_pages: int
    heads: list[list[int]]
    decision_seconds: float
    compaction_seconds: float
    phase: str = "prefill"
    pinned: int = 0

    @property
    def kept_ratio(self) -> float:
        """Share of the entries it could drop that it kept."""
        return (self.kept - self.pinned) / (self.stored - self.pinned)


def join(request_id: str, tokens: int, parts: Sequence[PartOfEviction]) -> EvictionRecord:
    """Make one eviction, after so many tokens, of what all ranks did, one part of each."""
    heads = kept_by_head(parts)
    stored = _total([(part, part.stored or ()) for part in parts]) or sum(map(len, heads)) * tokens
    return EvictionRecord(
        request=request_id,
        tokens=tokens,
        policy=parts[0].policy,
        kept=_total([(part, part.kept) for part in parts]),
        stored=stored,
        freed_pages=sum(part.freed_pages for part in parts),
        held_pages=sum(part.peak_pages for part in parts),
        heads=heads,
        decision_seconds=max(part.decision_seconds for part in parts),
        compaction_seconds=max(part.compaction_seconds for part in parts),
        phase=parts[0].phase,
        pinned=_total([(part, part.pinned or ()) for part in parts]),
    )


def kept_by_head(parts: Sequence[PartOfEviction]) -> list[list[int]]:
    """[layers][KV heads] of the model, entries kept."""
    return _by_head([(part, part.kept) for part in parts])


def _total(told: Sequence[tuple[PartOfEviction, Sequence[Sequence[int]]]]) -> int:
    """Entries of the model, from what the ranks tell of theirs."""
    return sum(map(sum, _by_head(told)))


def _by_head(told: Sequence[tuple[PartOfEviction, Sequence[Sequence[int]]]]) -> list[list[int]]:
    """[layers][KV heads] of the model, from what the ranks tell of theirs.

    Stages have layers of their own. Ranks of a stage have heads of the same layers; where they replicate a KV head
    they say the same of it, and it counts once.
    """
    layers: dict[int, dict[int, int]] = {}
    for part, of_rank in told:
        for layer, heads in enumerate(of_rank, part.first_layer):
            layers.setdefault(layer, {}).update(enumerate(heads, part.first_head))
    return [[heads[head] for head in sorted(heads)] for _, heads in sorted(layers.items())]
