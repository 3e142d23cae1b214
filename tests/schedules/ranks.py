"""What ranks say of an eviction."""

from vllm_kvevict.schedules.reports import EvictionRecord, PartOfEviction, join


def part(first_layer: int, first_head: int, kept: list[list[int]], seconds: float = 0.0) -> PartOfEviction:
    """What one rank did for a prompt of 500 tokens."""
    return PartOfEviction(
        policy="ada-snapkv",
        freed_pages=24,
        peak_pages=32,
        first_layer=first_layer,
        first_head=first_head,
        kept=kept,
        decision_seconds=seconds,
        compaction_seconds=2 * seconds,
    )


def eviction_of_eight_ranks() -> EvictionRecord:
    """Of four tensor-parallel ranks in each of two stages, two KV heads: two ranks of a stage hold the same head."""
    kept = {(0, 0): [[90]], (0, 1): [[110]], (1, 0): [[120]], (1, 1): [[80]]}
    ranks = [(layer, head) for layer in (1, 0) for head in (1, 1, 0, 0)]
    return join("r", 500, [part(*rank, kept[rank], index) for index, rank in enumerate(ranks)])
